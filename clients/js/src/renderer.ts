import { type Clock, type Frames, systemClock, systemFrames } from "./clock.js";
import { type Page, systemPage } from "./page.js";
import type { Amount, TokenFlowStream } from "./stream.js";
import { GrowingText } from "./text.js";

/** A reader's speed: tokens per second, or Unicode code points per second. `Infinity`: all at once. */
export type ReadingRate = { readonly tokens: number } | { readonly chars: number };

/**
 * `reading`: text is appearing. `waiting`: all that came is shown. `paused`, `hidden`: text waits for the
 * reader. `done`: all of a complete text is shown. `stopped`: disposed of before that.
 */
export type RendererState = "reading" | "waiting" | "paused" | "hidden" | "done" | "stopped";

export interface RendererOptions {
  /** Gets each piece of text as it is to appear after what is there. */
  readonly show: (text: string) => void;
  readonly rate: ReadingRate;
  /** Called when `shown`, `ahead` or `state` may have changed. */
  readonly onChange?: () => void;
  /** Shown again after having been hidden: go on at the reading rate (default), or show all that came. */
  readonly onReturn?: "rate" | "at-once";
  /** The stream that is told what the reader has seen. See also `follow`. */
  readonly stream?: TokenFlowStream | undefined;
  /** Ends the showing, as `dispose` does. */
  readonly signal?: AbortSignal;
  /** Language of the text, for the division into words; most need none. */
  readonly locale?: string;
  readonly clock?: Clock;
  readonly frames?: Frames;
  readonly page?: Page;
}

const MAX_STEP_MS = 1_000; // a frame that comes later than this was held up: the reader was not reading

/**
 * Shows text at the speed it is read, word by word, and tells the stream how far the reader is.
 *
 * Push text as it arrives: one `push` for each content event, if the rate is in tokens. Frames are asked for
 * only while there is something to show, and none while the page is hidden or the reader has paused.
 */
export class PacedRenderer {
  /** Resolves when all of a complete text is shown ("done") or the showing was stopped ("stopped"). */
  readonly finished: Promise<"done" | "stopped">;
  readonly #options: RendererOptions;
  readonly #clock: Clock;
  readonly #frames: Frames;
  readonly #page: Page;
  readonly #text: GrowingText;
  readonly #holds = new Set<string>();
  readonly #stop: (() => void)[];
  #finish!: (end: "done" | "stopped") => void;
  #end: "done" | "stopped" | undefined;
  #rate: ReadingRate;
  #stream: TokenFlowStream | undefined;
  #complete = false;
  #positionChars = 0;
  #shownUnits = 0;
  #atMs: number;
  #cancelFrame: (() => void) | undefined;

  constructor(options: RendererOptions) {
    this.#options = options;
    this.#clock = options.clock ?? systemClock;
    this.#frames = options.frames ?? systemFrames;
    this.#page = options.page ?? systemPage;
    this.#text = new GrowingText(options.locale);
    this.#rate = validRate(options.rate);
    this.#atMs = this.#clock.now();
    this.finished = new Promise((resolve) => (this.#finish = resolve));
    this.#stop = [this.#page.onVisibility(() => this.#visibilityChanged()), this.#stopOn(options.signal)];
    if (options.stream) this.follow(options.stream);
  }

  get state(): RendererState {
    if (this.#end) return this.#end;
    if (this.#page.hidden) return "hidden";
    if (this.#holds.size > 0) return "paused";
    return this.#hasMore() ? "reading" : "waiting";
  }

  /** What the reader has been shown. `tokens`: pushes, with a fraction for one that is shown in part. */
  get shown(): Amount {
    const chars = this.#text.units[this.#shownUnits - 1]?.endChars ?? 0;
    return { chars, tokens: this.#text.piecesAt(chars) };
  }

  /** What has been pushed and not been shown. */
  get ahead(): Amount {
    const { chars, tokens } = this.shown;
    return { chars: this.#text.chars - chars, tokens: this.#text.pieces - tokens };
  }

  /** Seconds until the reader has seen all that came. */
  get aheadS(): number {
    return "tokens" in this.#rate ? this.ahead.tokens / this.#rate.tokens : this.ahead.chars / this.#rate.chars;
  }

  get rate(): ReadingRate {
    return this.#rate;
  }

  set rate(rate: ReadingRate) {
    this.#advance();
    this.#rate = validRate(rate);
    this.#tell();
  }

  /** From now on this stream is told what the reader has seen. */
  follow(stream: TokenFlowStream): void {
    if (this.#end) return;
    if (this.#stream !== stream) this.#stream?.leave();
    this.#stream = stream;
    if (this.#holds.size > 0) stream.pause();
    this.#tell();
  }

  /** Text that has arrived; empty text is nothing. */
  push(text: string): void {
    if (this.#end || text === "") return;
    this.#advance(); // time in which there was nothing to read is over
    this.#text.append(text);
    this.#changed();
  }

  /** All text has been pushed. */
  end(): void {
    this.#complete = true;
    this.#text.end();
    this.#changed();
  }

  /** The reader stops, for this reason; reading goes on when every reason is gone. */
  pause(reason = "button"): void {
    if (this.#end || this.#holds.has(reason)) return;
    this.#advance();
    this.#holds.add(reason);
    this.#stream?.pause();
    this.#changed();
  }

  resume(reason = "button"): void {
    if (!this.#holds.delete(reason) || this.#holds.size > 0) return;
    this.#atMs = this.#clock.now();
    this.#stream?.resume();
    this.#changed();
  }

  /** Shows now all that has come. */
  catchUp(): void {
    if (this.#end) return;
    this.#positionChars = this.#text.chars;
    this.#reveal();
    this.#changed();
  }

  /** Stops for good: nothing is shown any more, and nothing reported beyond what was. */
  dispose(): void {
    if (this.#end) return;
    this.#close("stopped");
    this.#options.onChange?.();
  }

  #stopOn(signal: AbortSignal | undefined): () => void {
    const stop = (): void => this.dispose();
    signal?.addEventListener("abort", stop);
    if (signal?.aborted) queueMicrotask(stop);
    return () => signal?.removeEventListener("abort", stop);
  }

  #visibilityChanged(): void {
    this.#atMs = this.#clock.now();
    if (!this.#page.hidden && this.#options.onReturn === "at-once" && this.#holds.size === 0) this.catchUp();
    else this.#changed();
  }

  /** Moves the reader on to the present moment and shows what that brings. */
  #advance(): void {
    const nowMs = this.#clock.now();
    const elapsedS = Math.min(nowMs - this.#atMs, MAX_STEP_MS) / 1_000;
    this.#atMs = nowMs;
    if (!this.#isReading() || elapsedS <= 0) return;
    this.#positionChars = Math.min(this.#positionAfter(elapsedS), this.#text.chars);
    this.#reveal();
  }

  #positionAfter(elapsedS: number): number {
    if ("chars" in this.#rate) return this.#positionChars + this.#rate.chars * elapsedS;
    const pieces = this.#text.piecesAt(this.#positionChars) + this.#rate.tokens * elapsedS;
    return pieces >= this.#text.pieces ? this.#text.chars : this.#text.charsAt(pieces);
  }

  #reveal(): void {
    const { units } = this.#text;
    let text = "";
    for (let next = units[this.#shownUnits]; next && next.endChars <= this.#positionChars; ) {
      text += next.text;
      next = units[++this.#shownUnits];
    }
    if (text === "") return;
    this.#tell(); // first, so that a pause out of `show` is reported with this position
    this.#options.show(text);
  }

  #tell(): void {
    if (this.#end) return;
    const { chars, tokens } = this.shown;
    const perChar = chars > 0 ? tokens / chars : undefined;
    const rate = "tokens" in this.#rate ? this.#rate.tokens : perChar && this.#rate.chars * perChar;
    this.#stream?.shown({ chars, ...(Number.isFinite(rate) && { rate }) });
  }

  #isReading(): boolean {
    return !this.#end && !this.#page.hidden && this.#holds.size === 0;
  }

  #hasMore(): boolean {
    return this.#positionChars < this.#text.chars || this.#shownUnits < this.#text.units.length;
  }

  #changed(): void {
    if (this.#complete && this.#shownUnits === this.#text.units.length) this.#close("done");
    else this.#askForFrame();
    this.#options.onChange?.();
  }

  #askForFrame(): void {
    const wanted = this.#isReading() && this.#hasMore();
    if (!wanted) {
      this.#cancelFrame?.();
      this.#cancelFrame = undefined;
    }
    if (wanted) this.#cancelFrame ??= this.#frames.request(() => this.#frame());
  }

  #frame(): void {
    this.#cancelFrame = undefined;
    this.#advance();
    this.#reveal();
    this.#changed();
  }

  #close(end: "done" | "stopped"): void {
    if (this.#end) return;
    this.#end = end;
    this.#cancelFrame?.();
    for (const stop of this.#stop) stop();
    this.#stream?.leave();
    this.#finish(end);
  }
}

function validRate(rate: ReadingRate): ReadingRate {
  const value = "tokens" in rate ? rate.tokens : rate.chars;
  if (!(value > 0)) throw new RangeError(`a reading rate must be greater than 0, not ${value}`);
  return rate;
}
