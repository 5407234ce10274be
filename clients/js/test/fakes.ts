import type { Clock, Frames, Page } from "../src/index.js";

interface Timer {
  readonly atMs: number;
  readonly run: () => void;
}

/** Time that a test moves. */
export class FakeClock implements Clock {
  #nowMs = 0;
  readonly #timers = new Set<Timer>();

  get timers(): number {
    return this.#timers.size;
  }

  now(): number {
    return this.#nowMs;
  }

  after(delayMs: number, run: () => void): () => void {
    const timer = { atMs: this.#nowMs + delayMs, run };
    this.#timers.add(timer);
    return () => this.#timers.delete(timer);
  }

  /** Moves time on, runs what falls due in its order, and lets what was begun come to rest after each. */
  async pass(ms: number): Promise<void> {
    const endMs = this.#nowMs + ms;
    for (let next = this.#next(endMs); next; next = this.#next(endMs)) {
      this.#nowMs = Math.max(this.#nowMs, next.atMs);
      this.#timers.delete(next);
      next.run();
      await settle();
    }
    this.#nowMs = endMs;
    await settle();
  }

  #next(endMs: number): Timer | undefined {
    const due = [...this.#timers].filter(({ atMs }) => atMs <= endMs);
    return due.sort((one, other) => one.atMs - other.atMs)[0];
  }
}

/** A screen of 60 Hz on a fake clock. `asked` counts the frames that were asked for. */
export class FakeFrames implements Frames {
  asked = 0;

  constructor(readonly clock: FakeClock) {}

  request(run: () => void): () => void {
    this.asked += 1;
    return this.clock.after(1_000 / 60, run);
  }
}

/** A page that a test hides, shows and leaves. */
export class FakePage implements Page {
  hidden = false;
  readonly beacons: { url: string; body: string }[] = [];
  readonly #visibility = new Set<() => void>();
  readonly #leave = new Set<() => void>();

  get listeners(): number {
    return this.#visibility.size + this.#leave.size;
  }

  onVisibility(run: () => void): () => void {
    this.#visibility.add(run);
    return () => this.#visibility.delete(run);
  }

  onLeave(run: () => void): () => void {
    this.#leave.add(run);
    return () => this.#leave.delete(run);
  }

  beacon(url: string, body: string): boolean {
    this.beacons.push({ url, body });
    return true;
  }

  setHidden(hidden: boolean): void {
    this.hidden = hidden;
    for (const run of this.#visibility) run();
  }

  leave(): void {
    for (const run of this.#leave) run();
  }
}

/** One report as it is on the wire. */
export interface Report {
  readonly seq: number;
  readonly age_ms: number;
  readonly chars?: number;
  readonly tokens?: number;
  readonly rate?: number;
  readonly visible?: boolean;
  readonly paused?: boolean;
}

/** A gateway behind a fetch: one answer that the test writes, and the reports that came. */
export class FakeGateway {
  readonly seen: { url: string; headers: Headers }[] = [];
  readonly posts: { url: string; atMs: number; capability: string; reports: Report[] }[] = [];
  /** What the progress route answers. */
  progress: () => Response | Promise<Response> = () => Response.json({ accepted: 1 });
  headers: Record<string, string> = { "x-tokenflow-stream": "tf-1.key" };
  /** How often the answer's body was asked for bytes. */
  pulls = 0;
  cancelled = false;
  #answer!: ReadableStreamDefaultController<Uint8Array>;

  constructor(readonly clock: FakeClock) {}

  get reports(): Report[] {
    return this.posts.flatMap(({ reports }) => reports);
  }

  readonly fetch: typeof globalThis.fetch = async (input, init) => {
    const url = input instanceof Request ? input.url : String(input);
    if (url.endsWith("/progress")) {
      this.posts.push({ url, atMs: this.clock.now(), ...JSON.parse(String(init?.body)) });
      return this.progress();
    }
    this.seen.push({ url, headers: new Headers(init?.headers) });
    const headers = { "content-type": "text/event-stream", ...this.headers };
    return new Response(this.#body(), { headers });
  };

  async send(bytes: Uint8Array | string): Promise<void> {
    this.#answer.enqueue(typeof bytes === "string" ? new TextEncoder().encode(bytes) : bytes);
    await settle();
  }

  async finish(): Promise<void> {
    this.#answer.close();
    await settle();
  }

  async break(): Promise<void> {
    this.#answer.error(new TypeError("terminated"));
    await settle();
  }

  #body(): ReadableStream<Uint8Array> {
    const source: UnderlyingDefaultSource<Uint8Array> = {
      start: (controller) => void (this.#answer = controller),
      pull: () => void (this.pulls += 1),
      cancel: () => void (this.cancelled = true),
    };
    return new ReadableStream(source, { highWaterMark: 0 });
  }
}

/** Lets everything run that waits for nothing but its turn. */
export async function settle(): Promise<void> {
  for (let turn = 0; turn < 3; turn += 1) await new Promise(setImmediate);
}

/** A chat chunk with this content, as an event. */
export function event(content: string): string {
  return `data: ${JSON.stringify({ choices: [{ index: 0, delta: { content } }] })}\n\n`;
}
