/** Time as this package uses it, so that tests can move it by hand. All times are milliseconds. */
export interface Clock {
  /** Milliseconds since any fixed moment; never goes back. */
  now(): number;
  /** Runs `run` once after `delayMs`. Returns what cancels it. */
  after(delayMs: number, run: () => void): () => void;
}

/** When text may be drawn: once for each frame of the screen that was asked for. */
export interface Frames {
  /** Runs `run` at the next frame. Returns what cancels it. */
  request(run: () => void): () => void;
}

const FRAME_MS = 33; // where no screen sets the pace: two thirds of a word at 20 words a second

/** `performance.now` and `setTimeout`; a timer does not keep a Node process alive. */
export const systemClock: Clock = {
  now: () => performance.now(),
  after: (delayMs, run) => {
    const timer: unknown = setTimeout(run, delayMs);
    if (typeof timer === "object") (timer as NodeJS.Timeout).unref();
    return () => clearTimeout(timer as number);
  },
};

/** `requestAnimationFrame`, or a timer of 33 ms where there is none (Node). */
export const systemFrames: Frames = {
  request: (run) => {
    if (typeof requestAnimationFrame === "function") {
      const frame = requestAnimationFrame(() => run());
      return () => cancelAnimationFrame(frame);
    }
    const timer = setTimeout(run, FRAME_MS);
    return () => clearTimeout(timer);
  },
};
