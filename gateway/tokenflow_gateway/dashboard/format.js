/** How values read. What is not known (`null`) is an en dash, never a zero. */

export const UNKNOWN = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

const known = (value) => value !== null && value !== undefined;

/** A count of things, grouped by thousands. */
export const count = (value) => (known(value) ? whole.format(value) : UNKNOWN);

/** Tokens per second: a tenth matters below a hundred only. */
export const rate = (value) => (known(value) ? (value < 99.95 ? tenths : whole).format(value) : UNKNOWN);

/** Used of total, and per cent. */
export function usage(used, total) {
  if (!known(used) || !known(total)) return UNKNOWN;
  const percent = total > 0 ? ` (${whole.format((100 * used) / total)}%)` : "";
  return `${whole.format(used)} / ${whole.format(total)}${percent}`;
}

/** An age in seconds: `3.2 s`, `2 min 05 s`, `1 h 02 min`. */
export function age(seconds) {
  if (!known(seconds)) return UNKNOWN;
  if (seconds < 59.95) return `${tenths.format(Math.max(0, seconds))} s`;
  const total = Math.round(seconds);
  if (total < 3600) return `${Math.floor(total / 60)} min ${padded(total % 60)} s`;
  return `${Math.floor(total / 3600)} h ${padded(Math.floor((total % 3600) / 60))} min`;
}

/** A latency given in seconds: milliseconds below a second. */
export function latency(seconds) {
  if (!known(seconds)) return UNKNOWN;
  return seconds < 0.9995 ? `${whole.format(1000 * seconds)} ms` : `${seconds.toFixed(2)} s`;
}

/** A short time ahead in seconds: tenths below ten. */
export function seconds(value) {
  if (!known(value)) return UNKNOWN;
  return `${(value < 9.95 ? tenths : whole).format(value)} s`;
}

/** The start of an id, enough to tell two apart by eye. */
export const shortId = (id) => (id.length > 12 ? `${id.slice(0, 11)}…` : id);

const padded = (value) => String(value).padStart(2, "0");
