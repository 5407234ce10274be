/** Polls the gateway and shows what it says: connection, engines, streams. */

import { byId, setBadge, setText } from "./dom.js";
import { showEngines } from "./engines.js";
import { showGroups } from "./groups.js";
import { TokenNeeded, Unavailable, keepToken, read } from "./gateway.js";
import { showCommand, showStreams } from "./streams.js";

const POLL_MS = 500;
const RETRY_MS = 1000;

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** The next event of this type. */
const event = (target, type) =>
  new Promise((resolve) => target.addEventListener(type, resolve, { once: true }));

async function poll() {
  const engines = await read("admin/engines");
  const streams = await read("admin/streams");
  showEngines(engines);
  showStreams(streams);
  showGroups(streams.streams);
  showCommand(engines.engines.flatMap((engine) => engine.models)[0] ?? "MODEL");
  byId("live").hidden = false;
  byId("live").classList.remove("stale");
  showConnection("live", "good");
}

function showConnection(text, kind) {
  setBadge(byId("connection"), text, kind);
}

/** What was last seen stays, dimmed: it is old, not wrong. */
function showFailure(error) {
  if (!(error instanceof Unavailable)) console.error(error);
  byId("live").classList.add("stale");
  showConnection(error instanceof Unavailable ? error.message : "this page failed: reload it", "bad");
}

/** Shows the form, and nothing that needs the token, until a token was entered. */
async function askForToken({ refused }) {
  const form = byId("token-form");
  byId("live").hidden = true;
  form.hidden = false;
  setText(byId("token-error"), refused ? "The gateway refused this token." : "");
  showConnection("admin token needed", "warn");
  byId("token").focus();
  keepToken(await enteredToken(form));
  form.reset();
  form.hidden = true;
  showConnection("connecting", "waiting");
}

async function enteredToken(form) {
  for (;;) {
    await event(form, "submit");
    const token = byId("token").value.trim();
    if (/^[\x21-\x7e]+$/.test(token)) return token;
    setText(byId("token-error"), "A token has only ASCII letters, digits and signs, and no spaces.");
  }
}

/** One poll and what follows from it. Returns the milliseconds until the next one is due. */
async function step() {
  try {
    await poll();
    return POLL_MS;
  } catch (error) {
    if (!(error instanceof TokenNeeded)) {
      showFailure(error);
      return RETRY_MS;
    }
    await askForToken(error);
    return 0;
  }
}

async function run() {
  for (;;) {
    while (document.hidden) await event(document, "visibilitychange");
    const started = performance.now();
    const pause = await step();
    await sleep(Math.max(0, pause - (performance.now() - started)));
  }
}

byId("token-form").addEventListener("submit", (submitted) => submitted.preventDefault());
run();
