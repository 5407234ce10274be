// node chat.mjs openai|ai-sdk|plain BASE_URL [RATE [STOP_MS]]
// One chat through @tokenflow/client under an SDK, shown at RATE tokens per second (default: at once), with a
// pause of 300 ms after the tenth word where there is a rate. The reader leaves STOP_MS after the first word.
// Prints what was seen as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createFetch, PacedRenderer, readContent } from "@tokenflow/client";
import { streamText } from "ai";
import OpenAI from "openai";

const [sdk, baseURL, rate, stopMs] = process.argv.slice(2);
const model = "smollm2-135m";
const question = [{ role: "user", content: "Say hello in many scripts." }];
const seen = { id: null, text: "", shown: "", delivered: null, pauseMs: 0 };
let shows = 0;
let pausedAtMs;

const renderer = new PacedRenderer({ show, rate: { tokens: rate ? Number(rate) : Infinity } });
const fetch = createFetch({ reader: "human", rate: rate && Number(rate), onStream: follow });
let stream;

function follow(opened) {
  stream = opened;
  seen.id = opened.id;
  renderer.follow(opened);
}

function show(text) {
  seen.shown += text;
  shows += 1;
  if (stopMs && shows === 1) setTimeout(() => renderer.dispose(), Number(stopMs));
  if (pausedAtMs) seen.pauseMs ||= performance.now() - pausedAtMs;
  if (!rate || shows !== 10) return;
  pausedAtMs = performance.now();
  renderer.pause();
  setTimeout(() => renderer.resume(), 300);
}

const sdks = {
  async *openai() {
    const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, fetch });
    const chunks = await client.chat.completions.create({ model, messages: question, stream: true });
    for await (const chunk of chunks) yield chunk.choices[0]?.delta.content ?? "";
  },
  async *"ai-sdk"() {
    const provider = createOpenAICompatible({ name: "tokenflow", baseURL, fetch });
    const answer = streamText({ model: provider(model), messages: question, maxRetries: 0 });
    yield* answer.textStream;
  },
  async *plain() {
    const body = JSON.stringify({ model, messages: question, stream: true });
    const headers = { "content-type": "application/json" };
    yield* readContent(await fetch(`${baseURL}/chat/completions`, { method: "POST", headers, body }));
  },
};

for await (const text of sdks[sdk]()) {
  seen.text += text;
  renderer.push(text);
}
renderer.end();
await renderer.finished;
seen.delivered = stream?.delivered ?? null;
console.log(JSON.stringify(seen));
