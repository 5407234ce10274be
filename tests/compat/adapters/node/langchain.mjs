// LangChain for JavaScript with @langchain/openai, as a chain uses it.
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import { serve, versionOf } from "./job.mjs";

const City = z.object({ name: z.string(), country: z.string() });

function model(job) {
  const { model, temperature, max_tokens, n, logprobs, top_logprobs, stream_options } = job.body;
  return new ChatOpenAI({
    model,
    temperature,
    n,
    logprobs,
    apiKey: "none",
    maxTokens: max_tokens,
    topLogprobs: top_logprobs,
    maxRetries: job.retries,
    streamUsage: Boolean(stream_options),
    timeout: 60_000,
    configuration: { baseURL: job.base_url },
  });
}

function take(message, outcome, choice = 0) {
  outcome.addText(message.text, choice);
  outcome.finish(message.response_metadata.finish_reason, choice);
  outcome.logprobs += message.response_metadata.logprobs?.content?.length ?? 0;
  if (message.usage_metadata) outcome.setUsage(message.usage_metadata.input_tokens, message.usage_metadata.output_tokens);
  for (const [index, call] of (message.tool_calls ?? []).entries()) {
    outcome.addToolCall(index, call.name, JSON.stringify(call.args));
  }
}

await serve(versionOf("@langchain/openai"), {
  async chat(job, outcome) {
    const { messages, tools, tool_choice, stream, n } = job.body;
    const llm = model(job);
    const chain = tools ? llm.bindTools(tools, { tool_choice }) : llm;
    if (stream) {
      let total;
      for await (const chunk of await chain.stream(messages)) {
        outcome.chunks += 1;
        total = total ? total.concat(chunk) : chunk;
        if (outcome.chunks === job.leave_after) break;
      }
      take(total, outcome);
    } else if (n) {
      const { generations } = await llm.generate([messages]);
      for (const [choice, made] of generations[0].entries()) take(made.message, outcome, choice);
    } else {
      take(await chain.invoke(messages), outcome);
    }
  },

  async parse(job, outcome) {
    const chain = model(job).withStructuredOutput(City, { method: "jsonSchema", name: "City" });
    if (job.body.stream) {
      for await (const part of await chain.stream(job.body.messages)) outcome.parsed = part;
    } else {
      outcome.parsed = await chain.invoke(job.body.messages);
    }
  },
});
