const FRAME_MS = 33; // where no screen sets the pace: two thirds of a word at 20 words a second
/** `performance.now` and `setTimeout`; a timer does not keep a Node process alive. */
export const systemClock = {
    now: () => performance.now(),
    after: (delayMs, run) => {
        const timer = setTimeout(run, delayMs);
        if (typeof timer === "object")
            timer.unref();
        return () => clearTimeout(timer);
    },
};
/** `requestAnimationFrame`, or a timer of 33 ms where there is none (Node). */
export const systemFrames = {
    request: (run) => {
        if (typeof requestAnimationFrame === "function") {
            const frame = requestAnimationFrame(() => run());
            return () => cancelAnimationFrame(frame);
        }
        const timer = setTimeout(run, FRAME_MS);
        return () => clearTimeout(timer);
    },
};
