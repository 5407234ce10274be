/** Streams by tenant and class of service: who has what, who waits. */

import { byId, instantiate, keyedList, setName, setText } from "./dom.js";
import { UNKNOWN, count, seconds } from "./format.js";
import { place, slack } from "./place.js";

const showList = keyedList(byId("groups"), () => instantiate("group-row"));
const PLACES = ["running", "waiting", "parked", "offloaded"];

/** Shows them once somebody is to be told apart: by a name, or by a class. */
export function showGroups(streams) {
  const groups = grouped(streams);
  const single = groups.length === 1 && groups[0].tenant === "anonymous" && groups[0].sla === "default";
  byId("groups-section").hidden = groups.length === 0 || single;
  showList(groups, (view, group) => showGroup(view.fields, group));
}

function grouped(streams) {
  const found = new Map();
  for (const stream of streams) {
    const tenant = stream.tenant ?? UNKNOWN;
    const sla = stream.sla ?? "default";
    const id = JSON.stringify([tenant, sla]);
    if (!found.has(id)) found.set(id, { id, tenant, sla, streams: [] });
    found.get(id).streams.push(stream);
  }
  return [...found.values()].sort((one, other) => (one.id < other.id ? -1 : 1));
}

function showGroup(fields, { tenant, sla, streams }) {
  setName(fields.tenant, tenant);
  setName(fields.sla, sla);
  setText(fields.streams, count(streams.length));
  for (const name of PLACES) {
    setText(fields[name], count(streams.filter((stream) => place(stream) === name).length));
  }
  const stalled = streams.filter((stream) => stream.reader_state === "stalled").length;
  setText(fields.stalled, count(stalled));
  fields.stalled.classList.toggle("short", stalled > 0);
  const lasting = streams.map(slack).filter((value) => value !== null);
  setText(fields.slack, seconds(lasting.length ? Math.min(...lasting) : null));
}
