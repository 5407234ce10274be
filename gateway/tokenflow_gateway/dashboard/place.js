/** Where a stream is, why, and how long what is unread will last. */

const WORDS = {
  ADMITTED: "there is room",
  AHEAD: "reader is ahead",
  FIXED: "cannot be preempted",
  HOST_FULL: "host memory is full: to be computed again",
  LEAD_CAP: "lead at its cap",
  MEMORY: "room was needed for others' tokens",
  NO_READER: "read by a machine",
  NO_ROOM: "no room",
  OVERLOAD: "overload: a class of more weight goes first",
  PAUSED: "reader pauses",
  RESUMED: "about to come back",
  URGENT: "would run dry soonest",
};

/** The state, with streams whose KV has left the device told from those that are parked on it. */
export const place = ({ state, offloaded }) => (state === "parked" && offloaded ? "offloaded" : state);

/** The policy's reason in words; an unknown one as it came. */
export function why({ reason }) {
  if (!reason) return "";
  return WORDS[reason.toUpperCase()] ?? reason;
}

/** Seconds until a reader has nothing to read; null while none is expected to read on. */
export function slack({ buffered, rate, reader_state: state }) {
  if (buffered === null || buffered === undefined || !(rate > 0) || state === "paused") return null;
  return buffered / rate;
}
