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

/** Who reads: a person on the page, one who listens, or a program. */
export type ReaderKind = "human" | "voice" | "machine";

export interface StreamOptions {
  readonly id: string;
  readonly capability: string;
  /** The progress route of this stream. */
  readonly url: string;
  /** Only a person on the page stops reading because it is hidden. */
  readonly reader: ReaderKind;
  readonly positionFrom: PositionSource;
  readonly fetch: typeof globalThis.fetch;
  readonly clock: Clock;
  readonly page: Page;
}

const HEARTBEAT_MS = 1_000; // while the reader reads
const SAME_RATE = 0.1; // relative: within it the heartbeat's correction is enough
const READ_ON_MS = 60_000; // after the answer; the gateway takes reports for five minutes
const SIGN_OF_LIFE_MS = 5_000; // while nothing moves: the gateway ends a pause after 15 s of silence

/**
 * One streamed answer, and what the gateway is told about its reader.
 *
 * Tell it the position with `shown`, whenever it changes, and `pause` and `resume`: it decides what is worth a
 * report. It sees by itself that the page is hidden. Nothing is reported before the first position. After the
 * end of the answer it goes on until all that came has been shown or the reader has left (`leave`), for a
 * minute at most. No method throws or waits.
 */
export class TokenFlowStream {
  readonly id: string;
  readonly #reporter: Reporter;
  readonly #clock: Clock;
  readonly #page: Page;
  readonly #reader: ReaderKind;
  readonly #positionFrom: PositionSource;
  readonly #content = new ContentReader((text) => this.#count(text));
  #delivered: Amount = { tokens: 0, chars: 0 };
  #position: ReaderPosition | undefined;
  #positionAtMs = 0;
  #paused = false;
  #reported: { readonly position: ReaderPosition; readonly tokens: number; readonly atMs: number } | undefined;
  #counting = true;
  #over = false;
  #cancelSignOfLife = (): void => {};
  #cancelReadOn = (): void => {};
  readonly #stop: (() => void)[];

  constructor(options: StreamOptions) {
    this.id = options.id;
    this.#clock = options.clock;
    this.#page = options.page;
    this.#reader = options.reader;
    this.#positionFrom = options.positionFrom;
    this.#reporter = new Reporter(options, () => this.#release());
    this.#stop = [
      this.#page.onVisibility(() => this.#changed()),
      this.#page.onLeave(() => this.#pageLeft()),
    ];
  }

  /** Content that has arrived at this program. */
  get delivered(): Amount {
    return this.#delivered;
  }

  /** True while reports are of use: the reader reads on and the gateway takes them. */
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
    this.#positionAtMs = this.#clock.now();
    if (this.#over && !this.#hasMore()) this.#finish();
    else if (newRate || this.#isDue(position)) this.#report();
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

  /**
   * The reader has left: what has not been shown will not be. Reported is only what was shown last, then nothing
   * before the next position; after the end of the answer, nothing at all.
   */
  leave(): void {
    this.#reportLast();
    this.#cancelSignOfLife();
    this.#position = undefined;
    this.#reported = undefined;
    this.#paused = false;
    if (this.#over) this.#finish();
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

  /** The answer is over, in whatever way; its reader may read on. Called by the fetch. */
  end(): void {
    if (this.#over) return;
    this.#over = true;
    if (!this.open || !this.#hasMore()) return this.#finish();
    this.#cancelReadOn = this.#clock.after(READ_ON_MS, () => this.#finish());
    if (!this.#isStill()) this.#cancelSignOfLife();
  }

  /** Whether the reader is known to have come only as far as a part of what came. */
  #hasMore(): boolean {
    if (!this.#position) return false;
    if ("chars" in this.#position) return this.#position.chars < this.#delivered.chars;
    return this.#position.tokens < this.#delivered.tokens;
  }

  #isStill(): boolean {
    return this.#paused || (this.#reader === "human" && this.#page.hidden === true);
  }

  #finish(): void {
    this.#reportLast();
    this.#reporter.finish();
    this.#release();
  }

  #release(): void {
    this.#cancelSignOfLife();
    this.#cancelReadOn();
    for (const stop of this.#stop.splice(0)) stop();
  }

  /** What was shown last, if it has not been reported, as of the time when it was shown. */
  #reportLast(): void {
    if (!this.#position || this.#position === this.#reported?.position) return;
    this.#reporter.report(this.#state(this.#position), { urgent: true, atMs: this.#positionAtMs });
  }

  #count(text: string): void {
    const { tokens, chars } = this.#delivered;
    this.#delivered = { tokens: tokens + 1, chars: chars + countChars(text) };
    if (this.#positionFrom === "read") this.shown({ tokens: tokens + 1 });
  }

  #changed(): void {
    this.#report({ urgent: true });
  }

  #pageLeft(): void {
    if (!this.#position) return;
    const gone = { ...this.#state(this.#position), visible: false, ...(this.#reader !== "human" && { paused: true }) };
    this.#reporter.leave(gone, this.#over ? this.#positionAtMs : undefined);
  }

  #report({ urgent = false } = {}): void {
    if (!this.#position || !this.open) return;
    const position = this.#position;
    this.#reporter.report(this.#state(position), { urgent, atMs: this.#trueAtMs() });
    this.#reported = { position, tokens: this.#tokensOf(position), atMs: this.#clock.now() };
    this.#cancelSignOfLife();
    if (this.#over && !this.#isStill()) return; // who left without a word must not look like one who is slow
    this.#cancelSignOfLife = this.#clock.after(SIGN_OF_LIFE_MS, () => this.#report());
  }

  /** When what is to be reported was so. Where a display that has stopped is, is known of when it was last heard. */
  #trueAtMs(): number {
    return this.#over && this.#isStill() ? this.#positionAtMs : this.#clock.now();
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
    const gone = this.#isStill() ? 0 : ((position.rate ?? 0) * elapsedMs) / 1_000;
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
