import assert from "node:assert/strict";
import { test } from "node:test";
import { PacedRenderer, type RendererOptions } from "../src/index.js";
import { FakeClock, FakeFrames, FakePage } from "./fakes.js";

const WORDS = Array.from({ length: 100 }, (_, number) => ` word${number % 10}`);

function setUp(options: Partial<RendererOptions> = {}) {
  const clock = new FakeClock();
  const frames = new FakeFrames(clock);
  const page = new FakePage();
  const screen = { text: "", words: () => screen.text.split(" ").length - 1 };
  const show = (text: string): void => void (screen.text += text);
  const renderer = new PacedRenderer({ show, rate: { tokens: 10 }, clock, frames, page, ...options });
  return { clock, frames, page, screen, renderer };
}

/** All words at once, as a fast engine brings them. */
function filled(options: Partial<RendererOptions> = {}) {
  const all = setUp(options);
  for (const word of WORDS) all.renderer.push(word);
  return all;
}

const near = (actual: number, expected: number): void =>
  assert.ok(Math.abs(actual - expected) <= 1, `${actual} instead of ${expected}`);

test("text appears at the reader's rate, word by word, and never ahead of it", async () => {
  const { clock, screen } = filled();
  for (let second = 1; second <= 5; second += 1) {
    await clock.pass(1_000);
    near(screen.words(), second * 10);
    assert.ok(screen.words() <= second * 10);
    assert.match(screen.text, /^( word\d)*$/);
  }
});

test("a rate in characters is kept too", async () => {
  const { clock, screen } = filled({ rate: { chars: 30 } });
  await clock.pass(2_000);
  near(screen.text.length / 6, 10);
});

test("a new rate holds from now on", async () => {
  const { clock, screen, renderer } = filled();
  await clock.pass(1_000);
  renderer.rate = { tokens: 40 };
  await clock.pass(1_000);
  near(screen.words(), 50);
  assert.throws(() => (renderer.rate = { tokens: 0 }), RangeError);
  assert.throws(() => (renderer.rate = { chars: NaN }), RangeError);
});

test("time without text is not saved up", async () => {
  const { clock, screen, renderer } = setUp();
  renderer.push(" one two");
  await clock.pass(60_000);
  assert.equal(screen.text, " one");
  assert.equal(renderer.state, "waiting");
  for (const word of WORDS) renderer.push(word);
  await clock.pass(1_000);
  near(screen.words(), 2 + 10);
});

test("no frames while there is nothing to show", async () => {
  const { clock, frames, renderer } = setUp();
  renderer.push(" one ");
  await clock.pass(10_000);
  const { asked } = frames;
  await clock.pass(10_000);
  assert.equal(frames.asked, asked);
  assert.equal(clock.timers, 0);
});

test("a pause stops the text at once; it goes on from there", async () => {
  const { clock, frames, screen, renderer } = filled();
  await clock.pass(1_000);
  renderer.pause();
  const { text } = screen;
  const { asked } = frames;
  await clock.pass(30_000);
  assert.equal(screen.text, text);
  assert.equal(frames.asked, asked);
  assert.equal(renderer.state, "paused");
  renderer.resume();
  assert.equal(renderer.state, "reading");
  await clock.pass(1_000);
  near(screen.words(), 20);
});

test("each reason to pause has to go", async () => {
  const { renderer } = filled();
  renderer.pause("button");
  renderer.pause("scroll");
  renderer.resume("button");
  assert.equal(renderer.state, "paused");
  renderer.resume("scroll");
  assert.equal(renderer.state, "reading");
});

test("a hidden page shows nothing and asks for no frame; then the reading goes on", async () => {
  const { clock, frames, page, screen, renderer } = filled();
  await clock.pass(1_000);
  const { text } = screen;
  page.setHidden(true);
  const { asked } = frames;
  await clock.pass(60_000);
  assert.equal(screen.text, text);
  assert.equal(frames.asked, asked);
  assert.equal(clock.timers, 0);
  assert.equal(renderer.state, "hidden");
  page.setHidden(false);
  await clock.pass(1_000);
  near(screen.words(), 20);
});

test("or everything is shown on return, if so wished, unless the reader has paused", async () => {
  const { page, screen, renderer } = filled({ onReturn: "at-once" });
  renderer.pause();
  page.setHidden(true);
  page.setHidden(false);
  assert.equal(screen.words(), 0);
  renderer.resume();
  page.setHidden(true);
  page.setHidden(false);
  assert.equal(screen.words(), WORDS.length - 1);
});

test("the end shows the last word and is told", async () => {
  const { clock, screen, renderer } = setUp();
  renderer.push(" the");
  renderer.push(" end");
  await clock.pass(5_000);
  assert.equal(screen.text, " the");
  renderer.end();
  await clock.pass(100);
  assert.equal(screen.text, " the end");
  assert.equal(renderer.state, "done");
  assert.equal(await renderer.finished, "done");
});

test("an empty answer is done at once", async () => {
  const { renderer } = setUp();
  renderer.end();
  assert.equal(await renderer.finished, "done");
});

test("abort and dispose stop for good and leave nothing behind", async () => {
  const abort = new AbortController();
  const { clock, page, screen, renderer } = filled({ signal: abort.signal });
  await clock.pass(1_000);
  const { text } = screen;
  abort.abort();
  renderer.push(" more");
  renderer.catchUp();
  await clock.pass(5_000);
  assert.equal(screen.text, text);
  assert.equal(renderer.state, "stopped");
  assert.equal(clock.timers, 0);
  assert.equal(page.listeners, 0);
  assert.equal(await renderer.finished, "stopped");
});

test("a signal that was aborted before stops it too", async () => {
  assert.equal(await setUp({ signal: AbortSignal.abort() }).renderer.finished, "stopped");
});

test("what is shown and ahead adds up, in both units", async () => {
  const { clock, screen, renderer } = filled();
  await clock.pass(1_234);
  assert.equal(renderer.shown.chars, screen.text.length);
  assert.equal(renderer.shown.tokens, screen.words());
  assert.equal(renderer.shown.chars + renderer.ahead.chars, 600);
  assert.equal(renderer.shown.tokens + renderer.ahead.tokens, 100);
  near(renderer.aheadS * 10, renderer.ahead.tokens);
});

test("a machine that slept does not dump the text", async () => {
  const { clock, screen, renderer } = filled();
  await clock.pass(1_000);
  renderer.push(" x"); // the frame is overdue by a minute when it comes
  const asleep = clock.now.bind(clock);
  clock.now = () => asleep() + 60_000;
  await clock.pass(50);
  assert.ok(screen.words() <= 21, `${screen.words()} words`);
});
