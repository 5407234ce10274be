// node chat.mjs BASE_URL MODEL stream|plain
// One chat through the official client; prints {text, chunks, finish_reason, usage} or {error} as JSON.
import OpenAI from "openai";

const [baseURL, model, mode] = process.argv.slice(2);
if (!["stream", "plain"].includes(mode)) {
  console.error("usage: node chat.mjs BASE_URL MODEL stream|plain");
  process.exit(2);
}

const client = new OpenAI({ baseURL, apiKey: process.env.OPENAI_API_KEY ?? "none", maxRetries: 0 });
const question = { model, messages: [{ role: "user", content: "What is the capital of France?" }] };

async function plain() {
  const answer = await client.chat.completions.create(question);
  const [choice] = answer.choices;
  return { text: choice.message.content, chunks: 1, finish_reason: choice.finish_reason, usage: answer.usage };
}

async function streamed() {
  const result = { text: "", chunks: 0, finish_reason: null, usage: null };
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create({ ...question, ...options })) {
    result.chunks += 1;
    result.usage = chunk.usage ?? result.usage;
    const [choice] = chunk.choices ?? [];
    result.text += choice?.delta.content ?? "";
    result.finish_reason = choice?.finish_reason ?? result.finish_reason;
  }
  return result;
}

async function attempt() {
  try {
    return await (mode === "stream" ? streamed() : plain());
  } catch (error) {
    return { error: { type: error.constructor.name, status: error.status ?? null, message: error.message } };
  }
}

console.log(JSON.stringify(await attempt()));
