import { createParser } from "eventsource-parser";

/** An error that the gateway or the engine reported inside a stream. */
export class StreamError extends Error {
  override readonly name = "StreamError";
}

const MAX_EVENT_CHARS = 8 * 1024 * 1024; // far above any real event: bounds what a broken stream can make us keep

interface Choice {
  readonly text?: unknown;
  readonly delta?: { readonly content?: unknown } | null;
}

/**
 * Reads an event stream of chat completions or completions, in pieces cut anywhere.
 *
 * `onContent` gets the text of each choice that carries some. Reasoning and tool calls are no content: they
 * take no reading time. `onError` gets the message of an error event.
 */
export class ContentReader {
  readonly #decoder = new TextDecoder();
  readonly #parser;
  #failed: Error | undefined;

  constructor(onContent: (text: string) => void, onError: (message: string) => void = () => {}) {
    this.#parser = createParser({
      maxBufferSize: MAX_EVENT_CHARS,
      onEvent: ({ data }) => readEvent(data, onContent, onError),
      onError: (error) => {
        if (error.type === "max-buffer-size-exceeded") this.#failed = error;
      },
    });
  }

  /** Takes bytes. Throws if an event is longer than 8 MiB. */
  feed(bytes: Uint8Array): void {
    this.#parser.feed(this.#decoder.decode(bytes, { stream: true }));
    if (this.#failed) throw this.#failed;
  }
}

/**
 * The text of a streamed answer, piece by piece, for pages without an SDK.
 *
 * Throws `StreamError` for an error status, an answer that is no stream, and an error event.
 */
export async function* readContent(response: Response): AsyncGenerator<string, void, undefined> {
  const type = response.headers.get("content-type") ?? "nothing";
  if (!response.ok) throw new StreamError(await errorOf(response));
  if (!response.body || !type.startsWith("text/event-stream")) {
    throw new StreamError(`the server answered with ${type}, not with a stream`);
  }
  const texts: string[] = [];
  let failure: string | undefined;
  const reader = new ContentReader(
    (text) => texts.push(text),
    (message) => (failure ??= message),
  );
  const source = response.body.getReader();
  try {
    for (let read = await source.read(); !read.done; read = await source.read()) {
      reader.feed(read.value);
      yield* texts.splice(0);
      if (failure !== undefined) throw new StreamError(failure);
    }
  } finally {
    await source.cancel().catch(() => {}); // a stream that broke has said so already
  }
}

function readEvent(data: string, onContent: (text: string) => void, onError: (message: string) => void): void {
  const event = parse(data);
  if (event?.error || event?.object === "error") {
    onError(messageOf(event) ?? "the engine reported an error without a message");
    return;
  }
  for (const choice of Array.isArray(event?.choices) ? (event.choices as (Choice | null)[]) : []) {
    const text = choice?.delta?.content ?? choice?.text;
    if (typeof text === "string" && text !== "") onContent(text);
  }
}

async function errorOf(response: Response): Promise<string> {
  const said = messageOf(parse(await response.text()));
  return said ?? `the server answered ${response.status} ${response.statusText}`.trimEnd();
}

/** The object that this JSON is; `undefined` for anything else, `[DONE]` for example. */
function parse(json: string): Record<string, unknown> | undefined {
  try {
    const value: unknown = JSON.parse(json);
    return typeof value === "object" && value !== null ? (value as Record<string, unknown>) : undefined;
  } catch {
    return undefined;
  }
}

/** The message of an error in OpenAI's shape, in SGLang's flat one, or as FastAPI words it. */
function messageOf(body: Record<string, unknown> | undefined): string | undefined {
  const nested = body?.error as { message?: unknown } | string | undefined;
  const said = typeof nested === "object" ? nested?.message : (nested ?? body?.message ?? body?.detail);
  return typeof said === "string" ? said : undefined;
}
