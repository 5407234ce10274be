import { createFetch, observeScroll, PacedRenderer, readContent } from "@tokenflow/client";
import { chatRequest, firstModel } from "./gateway.js";

/** One answer: read as fast as it comes, shown at the reader's pace. */
export class Answer {
  #where;
  #user;
  #renderer;
  #abort = new AbortController();
  #stopObserving;
  pausedByButton = false;
  stream;

  /**
   * `rate` in tokens per second; `user` is who reads; `log` is the element that scrolls; `show` gets text to
   * append.
   */
  constructor({ where, user, rate, log, show, onChange }) {
    this.#where = where;
    this.#user = user;
    this.#renderer = new PacedRenderer({ show, onChange, rate: { tokens: rate }, signal: this.#abort.signal });
    this.#stopObserving = observeScroll(log, this.#renderer);
  }

  /** Resolves when all is shown, or the reader has stopped it. Throws what went wrong, after what came before. */
  async read(messages) {
    try {
      await this.#fetch(messages);
    } catch (error) {
      if (!this.#abort.signal.aborted) await this.#finish(error);
    }
    await this.#finish();
  }

  async #fetch(messages) {
    const { signal } = this.#abort;
    const model = this.#where.model || (await firstModel(this.#where));
    const rate = this.#renderer.rate.tokens;
    const fetch = createFetch({ reader: "human", rate, onStream: (stream) => this.#follow(stream) });
    const request = chatRequest(this.#where, { model, messages, user: this.#user, signal });
    for await (const text of readContent(await fetch(...request))) this.#renderer.push(text);
  }

  /** Lets the reader read what came, then cleans up. */
  async #finish(error) {
    this.#renderer.end();
    await this.#renderer.finished;
    this.#stopObserving();
    if (error) throw error;
  }

  #follow(stream) {
    this.stream = stream;
    this.#renderer.follow(stream);
  }

  get over() {
    return this.state === "done" || this.state === "stopped";
  }

  get state() {
    return this.#renderer.state;
  }

  /** Tokens written and not shown, tokens shown, seconds until the reader has caught up. */
  get reading() {
    const { ahead, shown, aheadS } = this.#renderer;
    return { aheadTokens: ahead.tokens, shownTokens: shown.tokens, aheadS };
  }

  setRate(tokens) {
    this.#renderer.rate = { tokens };
  }

  togglePause() {
    this.pausedByButton = !this.pausedByButton;
    if (this.pausedByButton) this.#renderer.pause();
    else this.#renderer.resume();
  }

  stop() {
    this.#abort.abort();
  }
}
