// How every JavaScript adapter talks; see ../job.py for what a job and its outcome are.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

export class Outcome {
  texts = [];
  finish_reasons = [];
  tool_calls = [];
  chunks = 0;
  logprobs = 0;
  usage = null;
  parsed = null;
  models = [];
  error = null;

  addText(text, choice = 0) {
    this.texts[choice] = (this.texts[choice] ?? "") + (text ?? "");
  }

  finish(reason, choice = 0) {
    if (reason) this.finish_reasons[choice] = reason;
  }

  addToolCall(index, name, args) {
    this.tool_calls[index] ??= { name: "", arguments: "" };
    this.tool_calls[index].name += name ?? "";
    this.tool_calls[index].arguments += args ?? "";
  }

  setUsage(prompt, completion) {
    this.usage = { prompt_tokens: prompt, completion_tokens: completion };
  }

  /** A chunk, or a whole answer, in the form it has on the wire. */
  addChunk(chunk) {
    this.chunks += 1;
    if (chunk.usage) this.setUsage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens);
    for (const choice of chunk.choices ?? []) {
      const part = choice.delta ?? choice.message ?? {};
      this.addText(part.content, choice.index);
      this.finish(choice.finish_reason, choice.index);
      this.logprobs += choice.logprobs?.content?.length ?? 0;
      for (const [position, call] of (part.tool_calls ?? []).entries()) {
        this.addToolCall(call.index ?? position, call.function.name, call.function.arguments);
      }
    }
  }

  fail(error) {
    const status = error.status ?? error.statusCode ?? null;
    this.error = { type: error.constructor.name, status, message: message(error) };
  }
}

function message(error) {
  return typeof error === "string" ? error : error.message ?? JSON.stringify(error);
}

/** The version that is installed under this name, which may be an alias. */
export function versionOf(name) {
  return JSON.parse(readFileSync(new URL(`./node_modules/${name}/package.json`, import.meta.url))).version;
}

/** Say which version of the client this is, then do jobs until stdin ends. */
export async function serve(version, ops) {
  console.log(JSON.stringify({ version }));
  for await (const line of createInterface({ input: process.stdin })) {
    const job = JSON.parse(line);
    const outcome = new Outcome();
    try {
      await ops[job.op](job, outcome);
    } catch (error) {
      outcome.fail(error);
    }
    console.log(JSON.stringify(outcome));
  }
}
