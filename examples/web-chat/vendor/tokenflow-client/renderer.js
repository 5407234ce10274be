import { systemClock, systemFrames } from "./clock.js";
import { systemPage } from "./page.js";
import { GrowingText } from "./text.js";
const MAX_STEP_MS = 1_000; // a frame that comes later than this was held up: the reader was not reading
/**
 * Shows text at the speed it is read, word by word, and tells the stream how far the reader is.
 *
 * Push text as it arrives: one `push` for each content event, if the rate is in tokens. Frames are asked for
 * only while there is something to show, and none while the page is hidden or the reader has paused.
 */
export class PacedRenderer {
    /** Resolves when all of a complete text is shown ("done") or the showing was stopped ("stopped"). */
    finished;
    #options;
    #clock;
    #frames;
    #page;
    #text;
    #holds = new Set();
    #stop;
    #finish;
    #end;
    #rate;
    #stream;
    #complete = false;
    #positionChars = 0;
    #shownUnits = 0;
    #atMs;
    #cancelFrame;
    constructor(options) {
        this.#options = options;
        this.#clock = options.clock ?? systemClock;
        this.#frames = options.frames ?? systemFrames;
        this.#page = options.page ?? systemPage;
        this.#text = new GrowingText(options.locale);
        this.#rate = validRate(options.rate);
        this.#atMs = this.#clock.now();
        this.finished = new Promise((resolve) => (this.#finish = resolve));
        this.#stop = [this.#page.onVisibility(() => this.#visibilityChanged()), this.#stopOn(options.signal)];
        if (options.stream)
            this.follow(options.stream);
    }
    get state() {
        if (this.#end)
            return this.#end;
        if (this.#page.hidden)
            return "hidden";
        if (this.#holds.size > 0)
            return "paused";
        return this.#hasMore() ? "reading" : "waiting";
    }
    /** What the reader has been shown. `tokens`: pushes, with a fraction for one that is shown in part. */
    get shown() {
        const chars = this.#text.units[this.#shownUnits - 1]?.endChars ?? 0;
        return { chars, tokens: this.#text.piecesAt(chars) };
    }
    /** What has been pushed and not been shown. */
    get ahead() {
        const { chars, tokens } = this.shown;
        return { chars: this.#text.chars - chars, tokens: this.#text.pieces - tokens };
    }
    /** Seconds until the reader has seen all that came. */
    get aheadS() {
        return "tokens" in this.#rate ? this.ahead.tokens / this.#rate.tokens : this.ahead.chars / this.#rate.chars;
    }
    get rate() {
        return this.#rate;
    }
    set rate(rate) {
        this.#advance();
        this.#rate = validRate(rate);
        this.#tell();
    }
    /** From now on this stream is told what the reader has seen. */
    follow(stream) {
        if (this.#end)
            return;
        if (this.#stream !== stream)
            this.#stream?.leave();
        this.#stream = stream;
        if (this.#holds.size > 0)
            stream.pause();
        this.#tell();
    }
    /** Text that has arrived; empty text is nothing. */
    push(text) {
        if (this.#end || text === "")
            return;
        this.#advance(); // time in which there was nothing to read is over
        this.#text.append(text);
        this.#changed();
    }
    /** All text has been pushed. */
    end() {
        this.#complete = true;
        this.#text.end();
        this.#changed();
    }
    /** The reader stops, for this reason; reading goes on when every reason is gone. */
    pause(reason = "button") {
        if (this.#end || this.#holds.has(reason))
            return;
        this.#advance();
        this.#holds.add(reason);
        this.#stream?.pause();
        this.#changed();
    }
    resume(reason = "button") {
        if (!this.#holds.delete(reason) || this.#holds.size > 0)
            return;
        this.#atMs = this.#clock.now();
        this.#stream?.resume();
        this.#changed();
    }
    /** Shows now all that has come. */
    catchUp() {
        if (this.#end)
            return;
        this.#positionChars = this.#text.chars;
        this.#reveal();
        this.#changed();
    }
    /** Stops for good: nothing is shown any more, and nothing reported beyond what was. */
    dispose() {
        if (this.#end)
            return;
        this.#close("stopped");
        this.#options.onChange?.();
    }
    #stopOn(signal) {
        const stop = () => this.dispose();
        signal?.addEventListener("abort", stop);
        if (signal?.aborted)
            queueMicrotask(stop);
        return () => signal?.removeEventListener("abort", stop);
    }
    #visibilityChanged() {
        this.#atMs = this.#clock.now();
        if (!this.#page.hidden && this.#options.onReturn === "at-once" && this.#holds.size === 0)
            this.catchUp();
        else
            this.#changed();
    }
    /** Moves the reader on to the present moment and shows what that brings. */
    #advance() {
        const nowMs = this.#clock.now();
        const elapsedS = Math.min(nowMs - this.#atMs, MAX_STEP_MS) / 1_000;
        this.#atMs = nowMs;
        if (!this.#isReading() || elapsedS <= 0)
            return;
        this.#positionChars = Math.min(this.#positionAfter(elapsedS), this.#text.chars);
        this.#reveal();
    }
    #positionAfter(elapsedS) {
        if ("chars" in this.#rate)
            return this.#positionChars + this.#rate.chars * elapsedS;
        const pieces = this.#text.piecesAt(this.#positionChars) + this.#rate.tokens * elapsedS;
        return pieces >= this.#text.pieces ? this.#text.chars : this.#text.charsAt(pieces);
    }
    #reveal() {
        const { units } = this.#text;
        let text = "";
        for (let next = units[this.#shownUnits]; next && next.endChars <= this.#positionChars;) {
            text += next.text;
            next = units[++this.#shownUnits];
        }
        if (text === "")
            return;
        this.#tell(); // first, so that a pause out of `show` is reported with this position
        this.#options.show(text);
    }
    #tell() {
        if (this.#end)
            return;
        const { chars, tokens } = this.shown;
        const perChar = chars > 0 ? tokens / chars : undefined;
        const rate = "tokens" in this.#rate ? this.#rate.tokens : perChar && this.#rate.chars * perChar;
        this.#stream?.shown({ chars, ...(Number.isFinite(rate) && { rate }) });
    }
    #isReading() {
        return !this.#end && !this.#page.hidden && this.#holds.size === 0;
    }
    #hasMore() {
        return this.#positionChars < this.#text.chars || this.#shownUnits < this.#text.units.length;
    }
    #changed() {
        if (this.#complete && this.#shownUnits === this.#text.units.length)
            this.#close("done");
        else
            this.#askForFrame();
        this.#options.onChange?.();
    }
    #askForFrame() {
        const wanted = this.#isReading() && this.#hasMore();
        if (!wanted) {
            this.#cancelFrame?.();
            this.#cancelFrame = undefined;
        }
        if (wanted)
            this.#cancelFrame ??= this.#frames.request(() => this.#frame());
    }
    #frame() {
        this.#cancelFrame = undefined;
        this.#advance();
        this.#reveal();
        this.#changed();
    }
    #close(end) {
        if (this.#end)
            return;
        this.#end = end;
        this.#cancelFrame?.();
        for (const stop of this.#stop)
            stop();
        this.#stream?.leave();
        this.#finish(end);
    }
}
function validRate(rate) {
    const value = "tokens" in rate ? rate.tokens : rate.chars;
    if (!(value > 0))
        throw new RangeError(`a reading rate must be greater than 0, not ${value}`);
    return rate;
}
