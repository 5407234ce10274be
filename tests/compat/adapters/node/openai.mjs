// node openai.mjs PACKAGE: openai for Node as an application uses it; PACKAGE is one of the installed majors.
import { z } from "zod";
import { serve, versionOf } from "./job.mjs";

const name = process.argv[2];
const { default: OpenAI } = await import(name);
const { zodResponseFormat } = await import(`${name}/helpers/zod`);
const City = z.object({ name: z.string(), country: z.string() });

function client(job) {
  return new OpenAI({ baseURL: job.base_url, apiKey: "none", maxRetries: job.retries, timeout: 60_000 });
}

await serve(versionOf(name), {
  async chat(job, outcome) {
    const answer = await client(job).chat.completions.create(job.body);
    if (!job.body.stream) return outcome.addChunk(answer);
    for await (const chunk of answer) {
      outcome.addChunk(chunk);
      if (outcome.chunks === job.leave_after) break; // aborts the request
    }
  },

  async parse(job, outcome) {
    const { stream, ...body } = { ...job.body, response_format: zodResponseFormat(City, "City") };
    const { completions } = client(job).chat;
    let completion;
    if (stream) {
      const running = completions.stream(body);
      for await (const chunk of running) outcome.addChunk(chunk);
      completion = await running.finalChatCompletion();
    } else {
      completion = await completions.parse(body);
      outcome.addChunk(completion);
    }
    outcome.parsed = completion.choices[0].message.parsed;
  },

  async models(job, outcome) {
    for await (const model of client(job).models.list()) outcome.models.push(model.id);
  },
});
