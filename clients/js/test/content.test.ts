import assert from "node:assert/strict";
import { test } from "node:test";
import { ContentReader, readContent } from "../src/content.js";
import { StreamError } from "../src/index.js";
import { event } from "./fakes.js";

function read(parts: Iterable<Uint8Array>): { texts: string[]; errors: string[] } {
  const texts: string[] = [];
  const errors: string[] = [];
  const reader = new ContentReader((text) => texts.push(text), (message) => errors.push(message));
  for (const part of parts) reader.feed(part);
  return { texts, errors };
}

const bytes = (text: string): Uint8Array => new TextEncoder().encode(text);
const answer = `: ping\r\n\r\n${event("Hé")}${event("")}data: ${JSON.stringify({ choices: [], usage: {} })}\n\n${event("🌍")}data: [DONE]\n\n`;

test("content is the same wherever the bytes are cut", () => {
  const whole = bytes(answer);
  for (let cut = 0; cut <= whole.length; cut += 1) {
    assert.deepEqual(read([whole.slice(0, cut), whole.slice(cut)]).texts, ["Hé", "🌍"], `cut at ${cut}`);
  }
});

test("reasoning, tool calls and roles are no content; completions' text is", () => {
  const deltas = [{ reasoning_content: "hm" }, { tool_calls: [{ index: 0 }] }, { role: "assistant", content: null }];
  const chat = deltas.map((delta) => `data: ${JSON.stringify({ choices: [{ delta }] })}\n\n`).join("");
  assert.deepEqual(read([bytes(chat)]).texts, []);
  assert.deepEqual(read([bytes(`data: {"choices":[{"text":"plain"}]}\n\n`)]).texts, ["plain"]);
});

test("what is no JSON, or another JSON, is passed over", () => {
  const odd = ["nothing", "3", "null", "[]", `{"choices":5}`, `{"choices":[null]}`].map((data) => `data: ${data}\n\n`);
  assert.deepEqual(read([bytes(odd.join("") + event("ok"))]), { texts: ["ok"], errors: [] });
});

test("an event without end is refused before it fills the memory", () => {
  const reader = new ContentReader(() => {});
  const part = bytes("x".repeat(1024 * 1024));
  assert.throws(() => {
    for (let sent = 0; sent < 16; sent += 1) reader.feed(part);
  }, /buffer/i);
});

async function textOf(response: Response): Promise<string> {
  let text = "";
  for await (const piece of readContent(response)) text += piece;
  return text;
}

const stream = (body: string, status = 200): Response =>
  new Response(body, { status, headers: { "content-type": "text/event-stream" } });

test("readContent gives the text of an answer", async () => {
  assert.equal(await textOf(stream(answer)), "Hé🌍");
});

test("readContent throws what the server said, and gives the text before it", async () => {
  const failing = readContent(stream(`${event("Hé")}data: {"error":{"message":"engine lost"}}\n\ndata: [DONE]\n\n`));
  assert.deepEqual(await failing.next(), { done: false, value: "Hé" });
  await assert.rejects(failing.next(), new StreamError("engine lost"));
});

test("readContent throws for error statuses and answers that are no stream", async () => {
  const saying = (message: string): StreamError => new StreamError(message);
  await assert.rejects(textOf(Response.json({ error: { message: "no such model" } }, { status: 404 })), saying("no such model"));
  await assert.rejects(textOf(Response.json({ detail: "not found" }, { status: 404 })), saying("not found"));
  await assert.rejects(textOf(stream("<html>", 502)), /the server answered 502/);
  await assert.rejects(textOf(Response.json({})), /answered with application\/json, not with a stream/);
});
