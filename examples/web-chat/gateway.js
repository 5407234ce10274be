// What this page asks of an OpenAI-compatible server.

/** Arguments of `fetch` for a streamed chat. `user` names the reader, so that the gateway can learn the pace. */
export function chatRequest({ baseUrl, apiKey }, { model, messages, user, signal }) {
  const headers = { "content-type": "application/json", ...bearer(apiKey) };
  const body = JSON.stringify({ model, messages, user, stream: true });
  return [`${baseUrl}/chat/completions`, { method: "POST", headers, body, signal }];
}

/** Names of all models. Throws in words if the server does not say. */
export async function modelNames({ baseUrl, apiKey }) {
  const response = await fetch(`${baseUrl}/models`, { headers: bearer(apiKey) });
  if (!response.ok) throw new Error(`${baseUrl}/models answered ${response.status}: is the base URL right?`);
  const { data } = await response.json();
  return data.map(({ id }) => id);
}

export async function firstModel(where) {
  const [name] = await modelNames(where);
  if (name === undefined) throw new Error(`${where.baseUrl} serves no model yet`);
  return name;
}

function bearer(apiKey) {
  return apiKey ? { authorization: `Bearer ${apiKey}` } : {};
}
