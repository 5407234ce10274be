import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createFetch } from "@tokenflow/client";
import OpenAI from "openai";

test("the SDKs' types take the fetch", () => {
  const fetch = createFetch({ reader: "human" });
  assert.ok(new OpenAI({ apiKey: "none", fetch }));
  assert.ok(createOpenAICompatible({ name: "tokenflow", baseURL: "https://gateway.test/v1", fetch }));
});
