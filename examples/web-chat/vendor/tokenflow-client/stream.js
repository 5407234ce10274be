import { ContentReader } from "./content.js";
import { Reporter } from "./reporter.js";
import { countChars } from "./text.js";
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
    id;
    #reporter;
    #clock;
    #page;
    #positionFrom;
    #content = new ContentReader((text) => this.#count(text));
    #delivered = { tokens: 0, chars: 0 };
    #position;
    #paused = false;
    #reported;
    #counting = true;
    #cancelSignOfLife = () => { };
    #stop;
    constructor(options) {
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
    get delivered() {
        return this.#delivered;
    }
    /** True while reports are of use: the answer goes on and the gateway takes them. */
    get open() {
        return this.#reporter.open;
    }
    get paused() {
        return this.#paused;
    }
    /** The reader has now consumed this much in all. Cheap: call it as often as the position changes. */
    shown(position) {
        const newRate = differs(position.rate, this.#position?.rate);
        this.#position = position;
        if (newRate || this.#isDue(position))
            this.#report();
    }
    /** The reader has stopped. Reported at once. */
    pause() {
        if (this.#paused)
            return;
        this.#paused = true;
        this.#changed();
    }
    /** The reader goes on. Reported at once. */
    resume() {
        if (!this.#paused)
            return;
        this.#paused = false;
        this.#changed();
    }
    /** Bytes of the answer, as they arrive. Called by the fetch. */
    take(bytes) {
        if (!this.#counting)
            return;
        try {
            this.#content.feed(bytes);
        }
        catch {
            this.#counting = false; // an endless event; the bytes go on to whoever reads them
        }
    }
    /** The answer is over, in whatever way: nothing is reported any more. Called by the fetch. */
    close() {
        this.#reporter.close();
        this.#cancelSignOfLife();
        for (const stop of this.#stop.splice(0))
            stop();
    }
    #count(text) {
        const { tokens, chars } = this.#delivered;
        this.#delivered = { tokens: tokens + 1, chars: chars + countChars(text) };
        if (this.#positionFrom === "read")
            this.shown({ tokens: tokens + 1 });
    }
    #changed() {
        this.#report({ urgent: true });
    }
    #leave() {
        if (this.#position)
            this.#reporter.leave({ ...this.#state(this.#position), visible: false });
    }
    #report({ urgent = false } = {}) {
        if (!this.#position || !this.open)
            return;
        this.#reporter.report(this.#state(this.#position), { urgent });
        this.#reported = { tokens: this.#tokensOf(this.#position), atMs: this.#clock.now() };
        this.#cancelSignOfLife();
        this.#cancelSignOfLife = this.#clock.after(SIGN_OF_LIFE_MS, () => this.#report());
    }
    #state({ rate, ...position }) {
        const { hidden } = this.#page;
        return {
            ...position,
            ...(rate !== undefined && { rate }),
            ...(hidden !== undefined && { visible: !hidden }),
            paused: this.#paused,
        };
    }
    /** Whether the gateway, going on from the last report, would now be off by a token; or it is time anyway. */
    #isDue(position) {
        if (!this.#reported)
            return true;
        const elapsedMs = this.#clock.now() - this.#reported.atMs;
        if (elapsedMs >= HEARTBEAT_MS)
            return true;
        const still = this.#paused || this.#page.hidden;
        const gone = still ? 0 : ((position.rate ?? 0) * elapsedMs) / 1_000;
        const foreseen = Math.min(this.#reported.tokens + gone, this.#delivered.tokens);
        return Math.abs(this.#tokensOf(position) - foreseen) >= 1;
    }
    /** Characters are taken as tokens of this answer's mean length. */
    #tokensOf(position) {
        if ("tokens" in position)
            return position.tokens;
        const { tokens, chars } = this.#delivered;
        return chars > 0 ? (position.chars * tokens) / chars : 0;
    }
}
/** Whether a speed is another one, and not only measured more finely. */
function differs(rate, before) {
    if (rate === undefined || before === undefined)
        return rate !== before;
    return Math.abs(rate - before) > SAME_RATE * before;
}
