// node bytes.mjs BASE_URL: the body of one chat, as it came out of @tokenflow/client's fetch.
import { createFetch } from "@tokenflow/client";

const body = JSON.stringify({ model: "smollm2-135m", messages: [], stream: true });
const fetch = createFetch();
const response = await fetch(`${process.argv[2]}/chat/completions`, { method: "POST", body });
for await (const part of response.body) process.stdout.write(part);
