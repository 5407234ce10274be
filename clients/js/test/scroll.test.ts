import assert from "node:assert/strict";
import { test } from "node:test";
import { observeScroll } from "../src/index.js";

/** A scrolled element, as far as it is looked at. */
class Box extends EventTarget {
  scrollTop = 500;
  scrollHeight = 1_000;
  clientHeight = 500;

  change(to: Partial<Pick<Box, "scrollTop" | "scrollHeight" | "clientHeight">>): void {
    Object.assign(this, to);
    this.dispatchEvent(new Event("scroll"));
  }
}

function watched() {
  const box = new Box();
  const reasons = new Set<string>();
  const target = { pause: (reason: string) => reasons.add(reason), resume: (reason: string) => reasons.delete(reason) };
  const stop = observeScroll(box as unknown as Element, target, { marginPx: 40 });
  return { box, stop, paused: () => reasons.size > 0 };
}

test("scrolling back pauses, coming back to the end resumes", () => {
  const { box, paused } = watched();
  box.change({ scrollTop: 470 });
  assert.equal(paused(), false, "within the margin");
  box.change({ scrollTop: 300 });
  assert.equal(paused(), true);
  box.change({ scrollTop: 400 });
  assert.equal(paused(), true, "on the way down");
  box.change({ scrollTop: 480 });
  assert.equal(paused(), false);
});

test("text that grows below, or a smaller container, is no scrolling back", () => {
  const { box, paused } = watched();
  box.change({ scrollHeight: 1_400 });
  box.change({ clientHeight: 200, scrollTop: 600 });
  assert.equal(paused(), false);
});

test("the end of the watching ends its pause", () => {
  const { box, stop, paused } = watched();
  box.change({ scrollTop: 100 });
  stop();
  assert.equal(paused(), false);
  box.change({ scrollTop: 50 });
  assert.equal(paused(), false);
});
