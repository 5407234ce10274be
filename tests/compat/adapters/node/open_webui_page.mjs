// What Open WebUI's page does with an event stream, in our own words: eventsource-parser over fetch; it ends at
// [DONE] or at an error, and passes over JSON that it cannot read.
import { EventSourceParserStream } from "eventsource-parser/stream";
import { serve, versionOf } from "./job.mjs";

class ShownError extends Error {}

await serve(`eventsource-parser ${versionOf("eventsource-parser")}`, {
  async chat(job, outcome) {
    const window = new AbortController();
    const answer = await fetch(`${job.base_url}/chat/completions`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(job.body),
      signal: window.signal,
    });
    if (!answer.ok) throw Object.assign(new ShownError(await answer.text()), { status: answer.status });
    const events = answer.body.pipeThrough(new TextDecoderStream()).pipeThrough(new EventSourceParserStream());
    for await (const { data } of events) {
      if (data.startsWith("[DONE]")) return;
      let chunk;
      try {
        chunk = JSON.parse(data);
      } catch {
        continue;
      }
      if (chunk.error) throw new ShownError(JSON.stringify(chunk.error));
      outcome.addChunk({ ...chunk, choices: chunk.choices?.slice(0, 1) });
      if (outcome.chunks === job.leave_after) return window.abort();
    }
  },

  async models(job, outcome) {
    const answer = await fetch(`${job.base_url}/models`);
    outcome.models = (await answer.json()).data.map((model) => model.id);
  },
});
