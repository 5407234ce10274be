import type { Clock } from "./clock.js";
import { ContentReader } from "./content.js";
import type { Page } from "./page.js";
import { type ReaderState, Reporter } from "./reporter.js";
import { countChars } from "./text.js";

/** Whose position is reported: what a reader has been shown, or what the program has read. */
export type PositionSource = "shown" | "read";

/** An amount of content: events that carried some, and Unicode code points in them. */
export interface Amount {
  readonly tokens: number;
  readonly chars: number;
}

/** Where the reader is: one of the two counts, and the speed in tokens per second if it is known. */
export type ReaderPosition = ({ readonly chars: number } | { readonly tokens: number }) & {
  readonly rate?: number | undefined;
};

export interface StreamOptions {
  readonly id: string;
  readonly capability: string;
  /** The progress route of this stream. */
  readonly url: string;
  readonly positionFrom: PositionSource;
  readonly fetch: typeof globalThis.fetch;
  readonly clock: Clock;
  readonly page: Page;
}

const HEARTBEAT_MS = 1_000; // while the reader reads
const SAME_RATE = 0.1; // relative: within it the heartbeat's correction is enough
const SIGN_OF_LIFE_MS = 5_000; // while nothing moves: the gateway ends a pause after 15 s of silence

/**
 * One streamed answer, and what the gateway is told about its reader.
 *
 * Tell it the position with `shown`, whenever it changes, and `pause` and `resume`: it decides what is worth a
 * report. It sees by itself that the page is hidden. Nothing is reported before the first position, nor after
 * the answer is complete. No method throws or waits.
 */
export class TokenFlowStream {
  readonly id: string;
  readonly #reporter: Reporter;
  readonly #clock: Clock;
  readonly #page: Page;
  readonly #positionFrom: PositionSource;
  readonly #content = new ContentReader((text) => this.#count(text));
  #delivered: Amount = { tokens: 0, chars: 0 };
  #position: ReaderPosition | undefined;
  #paused = false;
  #reported: { readonly tokens: number; readonly atMs: number } | undefined;
  #counting = true;
  #cancelSignOfLife = (): void => {};
  readonly #stop: (() => void)[];

  constructor(options: StreamOptions) {
    this.id = options.id;
    this.#clock = options.clock;
    this.#page = options.page;
    this.#positionFrom = options.positionFrom;
    this.#reporter = new Reporter(options);
    this.#stop = [
      this.#page.onVisibility(() => this.#changed()),
      this.#page.onLeave(() => this.#leave()),
    ];
  }

  /** Content that has arrived at this program. */
  get delivered(): Amount {
    return this.#delivered;
  }

  /** True while reports are of use: the answer goes on and the gateway takes them. */
  get open(): boolean {
    return this.#reporter.open;
  }

  get paused(): boolean {
    return this.#paused;
  }

  /** The reader has now consumed this much in all. Cheap: call it as often as the position changes. */
  shown(position: ReaderPosition): void {
    const newRate = differs(position.rate, this.#position?.rate);
    this.#position = position;
    if (newRate || this.#isDue(position)) this.#report();
  }

  /** The reader has stopped. Reported at once. */
  pause(): void {
    if (this.#paused) return;
    this.#paused = true;
    this.#changed();
  }

  /** The reader goes on. Reported at once. */
  resume(): void {
    if (!this.#paused) return;
    this.#paused = false;
    this.#changed();
  }

  /** Bytes of the answer, as they arrive. Called by the fetch. */
  take(bytes: Uint8Array): void {
    if (!this.#counting) return;
    try {
      this.#content.feed(bytes);
    } catch {
      this.#counting = false; // an endless event; the bytes go on to whoever reads them
    }
  }

  /** The answer is over, in whatever way: nothing is reported any more. Called by the fetch. */
  close(): void {
    this.#reporter.close();
    this.#cancelSignOfLife();
    for (const stop of this.#stop.splice(0)) stop();
  }

  #count(text: string): void {
    const { tokens, chars } = this.#delivered;
    this.#delivered = { tokens: tokens + 1, chars: chars + countChars(text) };
    if (this.#positionFrom === "read") this.shown({ tokens: tokens + 1 });
  }

  #changed(): void {
    this.#report({ urgent: true });
  }

  #leave(): void {
    if (this.#position) this.#reporter.leave({ ...this.#state(this.#position), visible: false });
  }

  #report({ urgent = false } = {}): void {
    if (!this.#position || !this.open) return;
    this.#reporter.report(this.#state(this.#position), { urgent });
    this.#reported = { tokens: this.#tokensOf(this.#position), atMs: this.#clock.now() };
    this.#cancelSignOfLife();
    this.#cancelSignOfLife = this.#clock.after(SIGN_OF_LIFE_MS, () => this.#report());
  }

  #state({ rate, ...position }: ReaderPosition): ReaderState {
    const { hidden } = this.#page;
    return {
      ...position,
      ...(rate !== undefined && { rate }),
      ...(hidden !== undefined && { visible: !hidden }),
      paused: this.#paused,
    };
  }

  /** Whether the gateway, going on from the last report, would now be off by a token; or it is time anyway. */
  #isDue(position: ReaderPosition): boolean {
    if (!this.#reported) return true;
    const elapsedMs = this.#clock.now() - this.#reported.atMs;
    if (elapsedMs >= HEARTBEAT_MS) return true;
    const still = this.#paused || this.#page.hidden;
    const gone = still ? 0 : ((position.rate ?? 0) * elapsedMs) / 1_000;
    const foreseen = Math.min(this.#reported.tokens + gone, this.#delivered.tokens);
    return Math.abs(this.#tokensOf(position) - foreseen) >= 1;
  }

  /** Characters are taken as tokens of this answer's mean length. */
  #tokensOf(position: ReaderPosition): number {
    if ("tokens" in position) return position.tokens;
    const { tokens, chars } = this.#delivered;
    return chars > 0 ? (position.chars * tokens) / chars : 0;
  }
}

/** Whether a speed is another one, and not only measured more finely. */
function differs(rate: number | undefined, before: number | undefined): boolean {
  if (rate === undefined || before === undefined) return rate !== before;
  return Math.abs(rate - before) > SAME_RATE * before;
}
