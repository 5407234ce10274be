/** The cards of the engines, and their totals. */

import { byId, instantiate, keyedList, setBadge, setBar, setName, setText } from "./dom.js";
import { count, rate, usage } from "./format.js";
import { Sparkline } from "./sparkline.js";

const COUNTS = ["running", "waiting", "parked", "offloaded", "streams"];

const showList = keyedList(byId("engines"), () => {
  const view = instantiate("engine-card");
  view.sparkline = new Sparkline(view.fields.sparkline);
  return view;
});

/** Shows an answer of `/admin/engines`. */
export function showEngines({ at, engines }) {
  byId("no-engines").hidden = engines.length > 0;
  showList(engines, (view, engine) => showEngine(view, engine, at));
  showTotals(engines);
}

function showTotals(engines) {
  const linked = engines.filter((engine) => engine.linked);
  for (const name of ["waiting", "parked", "offloaded"]) setText(byId(`total-${name}`), count(sum(linked, name)));
  setText(byId("total-linked"), `${linked.length} of ${engines.length}`);
  byId("total-linked").classList.toggle("short", linked.length < engines.length);
  setText(byId("total-rate"), rate(sum(linked, "tokens_per_s")));
}

/** Over the engines that tell; null if none does. */
function sum(engines, name) {
  const known = engines.map((engine) => engine[name]).filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((total, value) => total + value, 0) : null;
}

function showEngine({ root, fields, sparkline }, engine, at) {
  root.classList.toggle("troubled", !(engine.healthy && engine.linked));
  setName(fields.id, engine.id, engine.url);
  setBadge(fields.healthy, engine.healthy ? "healthy" : "not healthy", engine.healthy ? "good" : "bad");
  setBadge(fields.linked, engine.linked ? "linked" : "not linked", engine.linked ? "good" : "warn");
  setName(fields.about, [engine.engine, ...engine.models].filter(Boolean).join(" · ") || engine.url);
  setText(fields.reason, engine.reason ?? "");
  for (const name of COUNTS) setText(fields[name], count(engine[name]));
  setText(fields.policy, engine.policy ? `policy ${engine.policy}` : "");
  fields.policy.title = engine.fixed ? `never preempts: ${engine.fixed}` : "";
  showMemory(fields, engine);
  showRate(fields, sparkline.add(at, engine.tokens_per_s), engine.tokens_per_s);
}

function showMemory(fields, { kv_used_tokens: used, kv_tokens: total }) {
  const bar = fields["kv-bar"];
  const text = usage(used, total);
  setText(fields["kv-text"], text);
  setBar(bar, used && total ? used / total : 0);
  bar.classList.toggle("unknown", used === null);
  bar.setAttribute("aria-valuemax", total ?? 0);
  bar.setAttribute("aria-valuenow", used ?? 0);
  bar.setAttribute("aria-valuetext", used === null ? "not known" : text);
}

function showRate(fields, peak, now) {
  setText(fields.rate, rate(now));
  setText(fields.peak, `peak ${rate(peak)}`);
  fields.sparkline.setAttribute("aria-label", `Tokens per second over the last minute, peak ${rate(peak)}`);
}
