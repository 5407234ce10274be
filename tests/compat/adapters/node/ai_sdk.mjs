// node ai_sdk.mjs AI PROVIDER: the AI SDK with its openai-compatible provider, under their installed names.
import { z } from "zod";
import { serve, versionOf } from "./job.mjs";

const [ai, provider] = process.argv.slice(2);
const { Output, generateText, jsonSchema, streamText, tool } = await import(ai);
const { createOpenAICompatible } = await import(provider);
const City = z.object({ name: z.string(), country: z.string() });
globalThis.AI_SDK_LOG_WARNINGS = false;

function call(job) {
  const { model, messages, temperature, tools, tool_choice, max_tokens } = job.body;
  const connection = createOpenAICompatible({
    name: "tokenflow",
    baseURL: job.base_url,
    apiKey: "none",
    includeUsage: Boolean(job.body.stream_options),
    supportsStructuredOutputs: true,
  });
  const options = { model: connection(model), messages: messages.map(spelled), temperature, maxRetries: job.retries };
  if (max_tokens) options.maxOutputTokens = max_tokens;
  if (tools) {
    options.tools = Object.fromEntries(tools.map(({ function: f }) => [f.name, tool({ ...f, inputSchema: jsonSchema(f.parameters) })]));
    options.toolChoice = { type: "tool", toolName: tool_choice.function.name };
  }
  return options;
}

/** A message in the SDK's words: an image is a file of its own. */
function spelled({ role, content }) {
  if (typeof content === "string") return { role, content };
  return { role, content: content.map((part) => (part.type === "image_url" ? image(part.image_url.url) : part)) };
}

function image(url) {
  const [, mediaType, data] = /^data:(.*);base64,(.*)$/.exec(url);
  return { type: "file", mediaType, data };
}

function usage(outcome, { inputTokens, outputTokens }) {
  if (outputTokens !== undefined) outcome.setUsage(inputTokens, outputTokens);
}

function toolCall(outcome, { toolName, input }) {
  outcome.addToolCall(outcome.tool_calls.length, toolName, JSON.stringify(input));
}

async function streamed(options, job, outcome) {
  const window = new AbortController();
  const result = streamText({ ...options, abortSignal: window.signal, onError() {} });
  for await (const part of result.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") {
      outcome.chunks += 1;
      outcome.addText(part.text);
      if (outcome.chunks === job.leave_after) window.abort();
    } else if (part.type === "tool-call") {
      toolCall(outcome, part);
    } else if (part.type === "finish") {
      outcome.finish(part.finishReason);
      usage(outcome, part.totalUsage);
    }
  }
  return result;
}

async function plain(options, outcome) {
  const result = await generateText(options);
  outcome.chunks = 1;
  outcome.addText(result.text);
  outcome.finish(result.finishReason);
  usage(outcome, result.usage);
  for (const made of result.toolCalls) toolCall(outcome, made);
  return result;
}

await serve(`${versionOf(ai)}, provider ${versionOf(provider)}`, {
  async chat(job, outcome) {
    await (job.body.stream ? streamed(call(job), job, outcome) : plain(call(job), outcome));
  },

  async parse(job, outcome) {
    const options = { ...call(job), output: Output.object({ schema: City }) };
    const result = await (job.body.stream ? streamed(options, job, outcome) : plain(options, outcome));
    outcome.parsed = await result.output;
  },
});
