/** The table of open streams. */

import { byId, instantiate, keyedList, setBadge, setBar, setName, setText } from "./dom.js";
import { UNKNOWN, age, count, latency, rate, seconds, shortId } from "./format.js";
import { place, slack, why } from "./place.js";

const SMALLEST_SCALE_TOKENS = 16;
const STATES = ["waiting", "running", "parked", "offloaded", "finished", "aborted", "closing"];
const READER_STATES = ["reading", "stalled", "paused", "ahead"];

const showList = keyedList(byId("streams"), () => instantiate("stream-row"));

/** Shows an answer of `/admin/streams`. */
export function showStreams({ total, streams }) {
  const scale = unreadScale(streams);
  setText(byId("total-streams"), count(total));
  setText(byId("unread-scale"), `0–${count(scale)}`);
  setText(byId("total-stalled"), count(streams.filter((stream) => stream.reader_state === "stalled").length));
  byId("streams-box").hidden = total === 0;
  byId("no-streams").hidden = total > 0;
  showList(streams, (view, stream) => showStream(view.fields, stream, scale));
  byId("more-streams").hidden = total <= streams.length;
  setText(byId("more-streams"), `The oldest ${count(streams.length)} of ${count(total)} open streams.`);
}

/** The command that opens a stream of `model` on the gateway that served this page. */
export function showCommand(model) {
  const body = { model, stream: true, messages: [{ role: "user", content: "Tell me a story." }] };
  const url = new URL("v1/chat/completions", document.baseURI);
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  setText(byId("try"), `curl -N ${url} \\\n  -H 'Content-Type: application/json' \\\n  -d '${quoted}'`);
}

/** One scale for all rows, a power of two, so that bars compare and seldom jump. */
function unreadScale(streams) {
  const largest = Math.max(SMALLEST_SCALE_TOKENS, ...streams.map(({ buffered }) => buffered ?? 0));
  return 2 ** Math.ceil(Math.log2(largest));
}

function showStream(fields, stream, scale) {
  setName(fields.id, shortId(stream.id), stream.id);
  const where = place(stream);
  setBadge(fields.state, where, STATES.includes(where) ? where : "unknown");
  setName(fields.why, why(stream));
  showReader(fields.reader, stream);
  showUnread(fields, stream, where, scale);
  setText(fields.rate, rate(stream.rate));
  fields.rate.title = `${rate(stream.rate_low)} to ${rate(stream.rate_high)}`;
  setText(fields.generated, count(stream.generated));
  setText(fields.delivered, count(stream.delivered));
  setText(fields.consumed, count(stream.consumed));
  setText(fields.age, age(stream.age_s));
  setText(fields.ttft, latency(stream.ttft_s));
  for (const name of ["tenant", "sla", "model", "engine"]) setName(fields[name], stream[name] ?? UNKNOWN);
}

/** The buffer as a bar that moves with the reader; it warns where it lasts for less than a second. */
function showUnread(fields, stream, where, scale) {
  const bar = fields["unread-bar"];
  const lasts = slack(stream);
  setBar(bar, (stream.buffered ?? 0) / scale);
  bar.dataset.kind = lasts !== null && lasts < 1 && where !== "waiting" ? "low" : where;
  setText(fields.unread, count(stream.buffered));
  setText(fields.slack, seconds(lasts));
}

/** What the reader is doing; the tooltip says who reads and on what evidence the estimate rests. */
function showReader(badge, { reader, reader_state: state, source, connection }) {
  setBadge(badge, state, READER_STATES.includes(state) ? state : "unknown");
  setName(badge, state, `${reader}; estimated by ${source}; connection ${connection ?? UNKNOWN}`);
}
