/** A rate over the last minute, drawn as an SVG path. Where values are missing the line has a gap. */

const WINDOW_S = 60;
const GAP_S = 3;
const WIDTH = 120;
const HEIGHT = 32;
const MARGIN = 2;

export class Sparkline {
  #samples = [];
  #area;
  #stroke;

  /** Draws into the two paths of this `svg`, whose view box is 120 by 32. */
  constructor(svg) {
    this.#area = svg.querySelector(".area");
    this.#stroke = svg.querySelector(".stroke");
  }

  /** Adds a value (`null`: not known) of time `at` in seconds. Returns the peak of the minute, or null. */
  add(at, value) {
    this.#samples.push({ at, value });
    this.#samples = this.#samples.filter((sample) => sample.at >= at - WINDOW_S && sample.at <= at);
    const values = this.#samples.map((sample) => sample.value).filter((each) => each !== null);
    const peak = values.length ? Math.max(...values) : null;
    this.#draw(at, peak || 1);
    return peak;
  }

  #draw(now, peak) {
    const x = (at) => (WIDTH * (1 - (now - at) / WINDOW_S)).toFixed(2);
    const y = (value) => (HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (value / peak)).toFixed(2);
    const lines = segments(this.#samples).map((part) => part.map(({ at, value }) => `${x(at)} ${y(value)}`));
    this.#stroke.setAttribute("d", lines.map((points) => `M${points.join("L")}`).join(""));
    this.#area.setAttribute("d", lines.map(closed).join(""));
  }
}

/** Runs of samples with known values and no long silence between them. */
function segments(samples) {
  const parts = [];
  let last = null;
  for (const sample of samples) {
    if (sample.value !== null) {
      const joined = last !== null && last.value !== null && sample.at - last.at <= GAP_S;
      if (joined) parts.at(-1).push(sample);
      else parts.push([sample]);
    }
    last = sample;
  }
  return parts;
}

/** The line and the ground below it. */
function closed(points) {
  const [left, right] = [points[0], points.at(-1)].map((point) => point.split(" ")[0]);
  return `M${left} ${HEIGHT}L${points.join("L")}L${right} ${HEIGHT}Z`;
}
