import { type Clock, systemClock } from "./clock.js";
import { type Page, systemPage } from "./page.js";
import { type PositionSource, type ReaderKind, TokenFlowStream } from "./stream.js";

export interface FetchOptions {
  /** Who reads. Default: the gateway takes a person. */
  readonly reader?: ReaderKind;
  /** The reader's speed in tokens per second, where it is known beforehand. */
  readonly rate?: number;
  /** Class of service, by its name at the gateway. */
  readonly sla?: string;
  /** Target for the first token, in milliseconds. */
  readonly ttftMs?: number;
  /** Text at once as it is generated (the gateway's default), or at the reader's speed. */
  readonly delivery?: "immediate" | "paced";
  /**
   * What counts as consumed: what `TokenFlowStream.shown` was told ("shown", the default), or whatever the
   * program has read from the body ("read", the default for `reader: "machine"`).
   */
  readonly positionFrom?: PositionSource;
  /** Called with each stream that takes reports, before the first byte of it can be read. */
  readonly onStream?: (stream: TokenFlowStream, response: Response) => void;
  /** The fetch underneath. Default: the global one. */
  readonly fetch?: typeof globalThis.fetch;
  readonly clock?: Clock;
  readonly page?: Page;
}

const STREAM_HEADER = "x-tokenflow-stream";
const STREAM_KEY = /^([\w-]+)\.([\w-]+)$/;
const COMPLETIONS = /\/(?:chat\/)?completions$/;
const streams = new WeakMap<Response, TokenFlowStream>();

/**
 * A `fetch` for the OpenAI SDK, the AI SDK, or plain use, that lets the gateway know its reader.
 *
 * Requests get the headers that the options say; a header the caller set stays as it is. The bytes of answers
 * pass as they come and only when they are asked for; answers of other servers are the very responses of the
 * fetch underneath.
 */
export function createFetch(options: FetchOptions = {}): typeof globalThis.fetch {
  const headers = requestHeaders(options);
  return async (input, init) => {
    const fetch = options.fetch ?? globalThis.fetch;
    const url = input instanceof Request ? input.url : String(input);
    if (!COMPLETIONS.test(pathOf(url))) return fetch(input, init);
    const response = await fetch(input, { ...init, headers: withHeaders(input, init, headers) });
    return follow(response, response.url || url, fetch, options);
  };
}

/** The stream that this response carries, if the gateway takes reports of it. */
export function streamOf(response: Response): TokenFlowStream | undefined {
  return streams.get(response);
}

function requestHeaders(options: FetchOptions): [name: string, value: string][] {
  const values: [string, string | number | undefined][] = [
    ["x-tokenflow-reader", options.reader],
    ["x-tokenflow-rate", options.rate],
    ["x-tokenflow-sla", options.sla],
    ["x-tokenflow-ttft-ms", options.ttftMs],
    ["x-tokenflow-delivery", options.delivery],
  ];
  return values.flatMap(([name, value]) => (value === undefined ? [] : [[name, String(value)]]));
}

function withHeaders(
  input: RequestInfo | URL,
  init: RequestInit | undefined,
  ours: readonly [string, string][],
): Headers {
  const headers = new Headers(init?.headers ?? (input instanceof Request ? input.headers : undefined));
  for (const [name, value] of ours) if (!headers.has(name)) headers.set(name, value);
  return headers;
}

function follow(response: Response, url: string, fetch: typeof globalThis.fetch, options: FetchOptions): Response {
  const key = STREAM_KEY.exec(response.headers.get(STREAM_HEADER) ?? "");
  if (!key?.[1] || !key[2] || !response.body) return response;
  const stream = new TokenFlowStream({
    id: key[1],
    capability: key[2],
    url: progressUrl(url, key[1]),
    reader: options.reader ?? "human",
    positionFrom: options.positionFrom ?? (options.reader === "machine" ? "read" : "shown"),
    fetch,
    clock: options.clock ?? systemClock,
    page: options.page ?? systemPage,
  });
  const watched = withBody(response, watch(response.body, stream));
  streams.set(watched, stream);
  options.onStream?.(stream, watched);
  return watched;
}

/** The same bytes in the same pieces, taken from `source` only when somebody wants them. */
function watch(source: ReadableStream<Uint8Array>, stream: TokenFlowStream): ReadableStream<Uint8Array> {
  const reader = source.getReader();
  const pull = async (controller: ReadableStreamDefaultController<Uint8Array>): Promise<void> => {
    const read = await reader.read().catch((error: unknown) => {
      stream.end();
      throw error;
    });
    if (read.done) {
      stream.end();
      controller.close();
      return;
    }
    stream.take(read.value);
    controller.enqueue(read.value);
  };
  const cancel = (reason: unknown): Promise<void> => {
    stream.end();
    return reader.cancel(reason);
  };
  return new ReadableStream({ pull, cancel }, { highWaterMark: 0 });
}

function withBody(response: Response, body: ReadableStream<Uint8Array>): Response {
  const { status, statusText, headers, url } = response;
  return Object.defineProperty(new Response(body, { status, statusText, headers }), "url", { value: url });
}

function pathOf(url: string): string {
  return url.split(/[?#]/, 1)[0] ?? "";
}

function progressUrl(url: string, id: string): string {
  return pathOf(url).replace(COMPLETIONS, `/streams/${id}/progress`);
}
