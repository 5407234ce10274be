/** Reads the gateway's admin answers, with the admin token of this tab where there is one. */

const TOKEN_KEY = "tokenflow-admin-token";
const ANSWER_TIMEOUT_MS = 5000;

/** The gateway wants an admin token; `refused` if it was given one and did not take it. */
export class TokenNeeded extends Error {
  constructor(refused) {
    super("admin token needed");
    this.refused = refused;
  }
}

/** No usable answer; the message says why, for people. */
export class Unavailable extends Error {}

/** Keeps the token for as long as this tab lives. */
export const keepToken = (token) => sessionStorage.setItem(TOKEN_KEY, token);

/** The JSON at `path`. Throws `TokenNeeded` or `Unavailable`. */
export async function read(path) {
  const token = sessionStorage.getItem(TOKEN_KEY);
  const response = await answer(path, token);
  if (response.status === 401 || (response.status === 403 && token !== null)) {
    sessionStorage.removeItem(TOKEN_KEY);
    throw new TokenNeeded(token !== null);
  }
  if (response.status === 403) throw new Unavailable((await parsed(response)).error.message);
  if (!response.ok) throw new Unavailable(`gateway answered ${response.status}, retrying`);
  return parsed(response);
}

async function answer(path, token) {
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  try {
    return await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(ANSWER_TIMEOUT_MS) });
  } catch {
    throw new Unavailable("gateway not reachable, retrying");
  }
}

/** The body may still fail: cut off on its way, or the page of a proxy in between. */
async function parsed(response) {
  try {
    return await response.json();
  } catch {
    throw new Unavailable("gateway gave no complete answer, retrying");
  }
}
