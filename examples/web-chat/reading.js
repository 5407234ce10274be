// The strip between text and question: how far ahead of the reader the model is.

const STATES = {
  reading: "reading",
  waiting: "waiting for text",
  paused: "paused",
  hidden: "hidden",
  done: "all read",
  stopped: "stopped",
};
const FULL_TOKENS = 60; // the bar's length to begin with; it grows with the largest buffer of an answer

const find = (id) => document.getElementById(id);
let fullTokens = FULL_TOKENS;

/** Shows where the reader of this answer is, and what waits for him. */
export function showReading(answer) {
  if (!answer) return;
  const { aheadTokens, shownTokens, aheadS } = answer.reading;
  if (shownTokens === 0 && aheadTokens === 0) fullTokens = FULL_TOKENS;
  fullTokens = Math.max(fullTokens, aheadTokens);
  const state = find("state");
  state.dataset.state = answer.state;
  if (state.textContent !== STATES[answer.state]) state.textContent = STATES[answer.state];
  find("ahead-bar").style.transform = `scaleX(${aheadTokens / fullTokens})`;
  find("ahead-text").textContent = `${Math.round(aheadTokens)} tokens ahead, ${aheadS.toFixed(1)} s`;
  const meter = find("ahead");
  meter.setAttribute("aria-valuenow", String(Math.round(aheadTokens)));
  meter.setAttribute("aria-valuemax", String(Math.round(fullTokens)));
}
