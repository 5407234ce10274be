const SPACING_MS = 200; // at most five requests a second
const URGENT_SPACING_MS = 60; // for a button pressed fast; the gateway takes 20 requests a second
const MAX_AGE_MS = 60_000; // the gateway refuses what is older
const MAX_BATCH = 64; // the gateway refuses more reports in one request
const MAX_IN_FLIGHT = 2; // a browser has six connections to a host, and the streams need them
const TIMEOUT_MS = 5_000;
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 8_000;
/**
 * Sends reports of one stream, in batches, and gives up quietly when nobody wants them.
 *
 * Nothing here throws, and nothing waits for a report. What could not be sent is sent again with what comes
 * later, since every report is a whole state and its `seq` says which is newer.
 */
export class Reporter {
    #options;
    #onUnwanted;
    #pending = [];
    #seq = 0;
    #sentAtMs = -Infinity;
    #blockedUntilMs = -Infinity;
    #retryMs = FIRST_RETRY_MS;
    #inFlight = 0;
    #closed = false;
    #cancelTimer = () => { };
    /** `onUnwanted` is called when the gateway has said that it wants no reports of this stream any more. */
    constructor(options, onUnwanted) {
        this.#options = options;
        this.#onUnwanted = onUnwanted;
    }
    /** False after `finish`, or once the gateway has said that it wants no reports of this stream. */
    get open() {
        return !this.#closed;
    }
    /** Takes a state to be reported: at once if `urgent`, else with the next batch. `atMs`: when it was so. */
    report(state, { urgent = false, atMs = this.#options.clock.now() } = {}) {
        if (this.#closed)
            return;
        this.#add(state, urgent, atMs);
        this.#schedule();
    }
    /** Hands everything pending and this last state to the browser, which sends it even if the page is gone. */
    leave(state, atMs = this.#options.clock.now()) {
        if (this.#closed)
            return;
        this.#add(state, true, atMs);
        if (this.#options.page.beacon(this.#options.url, this.#body(this.#pending.slice(-MAX_BATCH))))
            this.#pending = [];
    }
    /** Sends what is pending now or never, and nothing after it. */
    finish() {
        if (this.#mayBeSent() && this.#options.clock.now() >= this.#blockedUntilMs)
            void this.#send();
        this.#close();
    }
    #close() {
        this.#closed = true;
        this.#pending = [];
        this.#cancelTimer();
    }
    #add(state, urgent, atMs) {
        if (this.#pending.at(-1)?.urgent === false)
            this.#pending.pop(); // the newer position replaces it
        this.#pending.push({ seq: ++this.#seq, atMs, state, urgent });
    }
    #mayBeSent() {
        return !this.#closed && this.#pending.length > 0 && this.#inFlight < MAX_IN_FLIGHT;
    }
    #schedule() {
        this.#cancelTimer();
        if (!this.#mayBeSent())
            return;
        const spacing = this.#pending.some(({ urgent }) => urgent) ? URGENT_SPACING_MS : SPACING_MS;
        const dueMs = Math.max(this.#sentAtMs + spacing, this.#blockedUntilMs);
        const delayMs = dueMs - this.#options.clock.now();
        if (delayMs > 0)
            this.#cancelTimer = this.#options.clock.after(delayMs, () => this.#schedule());
        else
            void this.#send();
    }
    async #send() {
        const batch = this.#pending.slice(-MAX_BATCH);
        this.#pending = [];
        this.#sentAtMs = this.#options.clock.now();
        this.#inFlight += 1;
        const outcome = await this.#post(this.#body(batch));
        this.#inFlight -= 1;
        if (outcome === "unwanted")
            this.#refused();
        else if (outcome === "taken")
            this.#retryMs = FIRST_RETRY_MS;
        else
            this.#retry(batch, outcome);
        this.#schedule();
    }
    /** One request. Returns what became of it, or for how many milliseconds to leave the gateway alone. */
    async #post(body) {
        const { url, fetch, clock } = this.#options;
        const timeout = new AbortController();
        const cancelTimeout = clock.after(TIMEOUT_MS, () => timeout.abort());
        try {
            const response = await fetch(url, {
                method: "POST",
                body,
                headers: { "content-type": "text/plain" }, // a simple request: no preflight for each report
                credentials: "omit",
                keepalive: true,
                signal: timeout.signal,
            });
            await response.text(); // read to its end, so that the connection can be used again
            return this.#judge(response);
        }
        catch {
            return this.#retryMs;
        }
        finally {
            cancelTimeout();
        }
    }
    #judge(response) {
        if (response.ok)
            return "taken";
        if (response.status !== 429 && response.status < 500)
            return "unwanted";
        const afterS = Number(response.headers.get("retry-after") ?? NaN);
        return afterS > 0 ? Math.max(this.#retryMs, Math.min(afterS * 1_000, LAST_RETRY_MS)) : this.#retryMs;
    }
    #refused() {
        this.#close();
        this.#onUnwanted();
    }
    #retry(batch, waitMs) {
        this.#blockedUntilMs = this.#options.clock.now() + waitMs;
        this.#retryMs = Math.min(this.#retryMs * 2, LAST_RETRY_MS);
        if (this.#pending.length === 0 && !this.#closed)
            this.#pending = batch.slice(-1);
    }
    #body(batch) {
        const nowMs = this.#options.clock.now();
        const age_ms = (atMs) => Math.min(Math.round(nowMs - atMs), MAX_AGE_MS);
        const reports = batch.map(({ seq, atMs, state }) => ({ seq, age_ms: age_ms(atMs), ...state }));
        return JSON.stringify({ capability: this.#options.capability, reports });
    }
}
