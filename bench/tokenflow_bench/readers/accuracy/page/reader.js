// Reads one answer at a known pace and notes, in milliseconds of `performance.now()`, what is on the screen.
import { createFetch, PacedRenderer, readContent } from "@tokenflow/client";

const reading = { shown: [], pauses: [], begunMs: 0, over: false, error: null };
const abort = new AbortController();
let renderer;

/** `segments`: seconds and tokens per second, 0 for a pause by the button (`pauseBy` "button"). */
async function begin({ url, model, segments, pauseBy }) {
  const [, rate] = segments[0];
  const text = document.getElementById("text");
  renderer = new PacedRenderer({
    rate: { tokens: rate },
    signal: abort.signal,
    show(words) {
      reading.shown.push([performance.now(), renderer.shown.tokens]);
      text.append(words);
    },
  });
  const fetch = createFetch({ reader: "human", rate, onStream: (stream) => renderer.follow(stream) });
  reading.begunMs = performance.now();
  if (pauseBy === "button") pressButton(segments);
  try {
    const body = JSON.stringify({ model, stream: true, messages: [{ role: "user", content: "Go on." }] });
    const headers = { "content-type": "application/json" };
    const answer = await fetch(`${url}/v1/chat/completions`, { method: "POST", headers, body, signal: abort.signal });
    for await (const piece of readContent(answer)) renderer.push(piece);
    throw new Error("the answer ended before its reader");
  } catch (error) {
    if (!abort.signal.aborted) reading.error = String(error);
  }
}

function pressButton(segments) {
  let atS = 0;
  for (const [seconds, rate] of segments) {
    if (rate === 0) setTimeout(holdFor, atS * 1_000, seconds * 1_000);
    atS += seconds;
  }
}

function holdFor(ms) {
  const beginMs = performance.now();
  renderer.pause();
  setTimeout(() => {
    reading.pauses.push([beginMs, performance.now()]);
    renderer.resume();
  }, ms);
}

let hiddenMs;
document.addEventListener("visibilitychange", () => {
  if (document.hidden) hiddenMs = performance.now();
  else reading.pauses.push([hiddenMs, performance.now()]);
});

/** Leaves the answer; what was noted. */
function end() {
  abort.abort();
  return { ...reading, endedMs: performance.now() };
}

globalThis.reader = { begin, end };
