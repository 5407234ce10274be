import assert from "node:assert/strict";
import { test } from "node:test";
import { createFetch, type FetchOptions, PacedRenderer, streamOf, type TokenFlowStream } from "../src/index.js";
import { FakeClock, FakeFrames, FakeGateway, FakePage, event, settle } from "./fakes.js";

const CHAT = "https://gateway.test/prefix/v1/chat/completions";

async function ask(options: FetchOptions = {}, prepare: (gateway: FakeGateway) => void = () => {}) {
  const clock = new FakeClock();
  const page = new FakePage();
  const gateway = new FakeGateway(clock);
  prepare(gateway);
  let stream!: TokenFlowStream;
  const onStream = (opened: TokenFlowStream): void => void (stream = opened);
  const fetch = createFetch({ fetch: gateway.fetch, clock, page, onStream, ...options });
  const response = await fetch(CHAT, { method: "POST", headers: { "x-mine": "kept" } });
  return { clock, page, gateway, fetch, response, stream };
}

/** A stream whose text has all arrived and been read by the program. */
async function readToNow(options: FetchOptions = {}, words = 100) {
  const all = await ask(options);
  const reader = all.response.body!.getReader();
  await all.gateway.send(event(" word").repeat(words));
  await reader.read();
  return { ...all, reader };
}

// ---- the fetch ----

test("headers say what the options say; the caller's own stay", async () => {
  const { gateway } = await ask({ reader: "voice", rate: 3.5, sla: "gold", ttftMs: 300, delivery: "paced" });
  assert.deepEqual(Object.fromEntries(gateway.seen[0]!.headers), {
    "x-mine": "kept",
    "x-tokenflow-delivery": "paced",
    "x-tokenflow-rate": "3.5",
    "x-tokenflow-reader": "voice",
    "x-tokenflow-sla": "gold",
    "x-tokenflow-ttft-ms": "300",
  });
  const { gateway: other, fetch } = await ask({ sla: "gold" });
  await fetch(new Request(CHAT, { method: "POST", body: "{}", headers: { "X-TokenFlow-SLA": "mine" } }));
  assert.equal(other.seen[1]!.headers.get("x-tokenflow-sla"), "mine");
  await fetch("https://gateway.test/v1/models");
  assert.equal(other.seen[2]!.headers.has("x-tokenflow-sla"), false);
});

test("bytes pass untouched, in the same pieces, as soon as they are there", async () => {
  const { gateway, response } = await ask();
  const reader = response.body!.getReader();
  for (const part of [Uint8Array.of(0, 255, 0xf0, 0x9f), new TextEncoder().encode('data: {"cho')]) {
    const sent = part.slice();
    const read = reader.read();
    await gateway.send(part);
    assert.deepEqual((await read).value, sent);
  }
  await gateway.finish();
  assert.equal((await reader.read()).done, true);
});

test("nothing is read from the network before the program asks for it", async () => {
  const { gateway, response } = await ask();
  await settle();
  assert.equal(gateway.pulls, 0);
  const read = response.body!.getReader().read();
  await gateway.send("x");
  await read;
  assert.equal(gateway.pulls, 1);
});

test("without the header the response is the very one of the fetch underneath", async () => {
  const plain = new Response("x");
  const untouched = await createFetch({ fetch: async () => plain })(CHAT);
  assert.equal(untouched, plain);
  for (const value of ["", "tf-1", "tf-1.", ".key", "tf 1.key", "../x.key"]) {
    const { response, stream } = await ask({}, (gateway) => (gateway.headers = { "x-tokenflow-stream": value }));
    assert.equal(stream, undefined, value);
    assert.equal(streamOf(response), undefined);
  }
});

test("errors and cancellation go through in both directions", async () => {
  const broken = await ask();
  const failing = assert.rejects(broken.response.text(), new TypeError("terminated"));
  await settle();
  await broken.gateway.break();
  await failing;
  assert.equal(broken.stream.open, false);

  const left = await ask();
  await left.response.body!.cancel();
  assert.equal(left.gateway.cancelled, true);
  assert.equal(left.stream.open, false);
  assert.equal(left.page.listeners, 0);
  assert.equal(left.clock.timers, 0);
});

test("content is counted while it passes", async () => {
  const { stream, response, gateway } = await ask();
  assert.equal(streamOf(response), stream);
  const text = response.text();
  await gateway.send(event("日本") + event("🌍") + "data: [DONE]\n\n");
  assert.deepEqual(stream.delivered, { tokens: 2, chars: 3 });
  await gateway.finish();
  await text;
});

// ---- reports ----

test("no report before the first position", async () => {
  const { clock, page, gateway, stream } = await readToNow();
  page.setHidden(true);
  page.leave();
  stream.pause();
  await clock.pass(60_000);
  assert.deepEqual([gateway.posts, page.beacons], [[], []]);
});

test("a report is on the wire as the gateway reads it", async () => {
  const { gateway, stream } = await readToNow();
  stream.shown({ chars: 12, rate: 5.2 });
  await settle();
  assert.deepEqual(gateway.posts, [
    {
      url: "https://gateway.test/prefix/v1/streams/tf-1/progress",
      atMs: 0,
      capability: "key",
      reports: [{ seq: 1, age_ms: 0, chars: 12, rate: 5.2, visible: true, paused: false }],
    },
  ]);
});

test("a steady reader is reported once a second, exactly", async () => {
  const { clock, gateway, stream } = await readToNow();
  for (let tick = 0; tick <= 500; tick += 1) {
    stream.shown({ tokens: tick / 10, rate: 10 });
    await clock.pass(10);
  }
  assert.ok(gateway.posts.length >= 5 && gateway.posts.length <= 7, `${gateway.posts.length} reports`);
  for (const { atMs, reports } of gateway.posts) {
    assert.ok(Math.abs(reports.at(-1)!.tokens! - atMs / 100) < 0.2, JSON.stringify(reports));
  }
});

test("a reader who is elsewhere than foreseen is reported before he is two tokens off", async () => {
  const { clock, gateway, stream } = await readToNow();
  stream.shown({ tokens: 0, rate: 10 });
  for (let tick = 0; tick < 50; tick += 1) {
    await clock.pass(10);
    stream.shown({ tokens: 0, rate: 10 }); // he says 10 a second and does not move
  }
  assert.ok(gateway.posts.length >= 2);
  assert.ok(gateway.posts[1]!.atMs <= 200, `after ${gateway.posts[1]!.atMs} ms`);
});

test("never more than five requests a second while reading", async () => {
  const { clock, gateway, stream } = await readToNow();
  for (let tick = 0; tick < 300; tick += 1) {
    stream.shown({ tokens: (tick * 7) % 90 });
    await clock.pass(10);
  }
  assert.ok(gateway.posts.length <= 16, `${gateway.posts.length} in 3 s`);
  assert.ok(gateway.posts.length >= 10);
});

test("a pause, its end and a hidden page are reported at once", async () => {
  const { clock, page, gateway, stream } = await readToNow();
  stream.shown({ chars: 5 });
  await clock.pass(100); // in the middle of the spacing of ordinary reports
  const changes: [() => void, { paused?: boolean; visible?: boolean }][] = [
    [() => stream.pause(), { paused: true, visible: true }],
    [() => stream.resume(), { paused: false, visible: true }],
    [() => page.setHidden(true), { paused: false, visible: false }],
    [() => page.setHidden(false), { paused: false, visible: true }],
  ];
  for (const [change, wanted] of changes) {
    change();
    await settle();
    const { atMs, reports } = gateway.posts.at(-1)!;
    assert.deepEqual([atMs, reports.at(-1)!.paused, reports.at(-1)!.visible], [clock.now(), wanted.paused, wanted.visible]);
    await clock.pass(100);
  }
});

test("a hidden page stops a person, and no voice", async () => {
  const reports: Record<string, number> = {};
  for (const reader of ["human", "voice"] as const) {
    const { clock, page, gateway, stream } = await readToNow({ reader }, 50);
    stream.shown({ tokens: 0, rate: 10 });
    page.setHidden(true);
    await clock.pass(100);
    const before = gateway.reports.length;
    for (let tokens = 1; tokens <= 30; tokens += 1) {
      stream.shown({ tokens, rate: 10 });
      await clock.pass(100);
    }
    assert.equal(gateway.reports.at(-1)!.paused, false);
    reports[reader] = gateway.reports.length - before;
    page.leave();
    assert.equal(JSON.parse(page.beacons[0]!.body).reports.at(-1).paused, reader === "voice", "with the page it is gone");
  }
  assert.ok(reports["voice"]! <= 4, `${reports["voice"]} reports of what was foreseen`);
  assert.ok(reports["human"]! > 4, "of a person it was not");
});

test("a button pressed like mad makes batches, with every press in them", async () => {
  const { clock, gateway, stream } = await readToNow();
  stream.shown({ chars: 5 });
  for (let press = 0; press < 50; press += 1) {
    if (stream.paused) stream.resume();
    else stream.pause();
    await clock.pass(10);
  }
  await clock.pass(1_000);
  assert.ok(gateway.posts.length <= 10, `${gateway.posts.length} requests in 0.5 s`);
  assert.deepEqual(gateway.reports.map(({ seq }) => seq), Array.from({ length: 51 }, (_, index) => index + 1));
  assert.equal(gateway.reports.at(-1)!.paused, false);
  assert.ok(gateway.reports.some(({ age_ms }) => age_ms > 0));
});

test("a pause gives signs of life, so that it does not expire", async () => {
  const { clock, gateway, stream } = await readToNow();
  stream.shown({ chars: 5 });
  stream.pause();
  await clock.pass(60_000);
  const times = gateway.posts.map(({ atMs }) => atMs);
  for (let index = 1; index < times.length; index += 1) assert.ok(times[index]! - times[index - 1]! <= 5_100);
  assert.ok(times.length >= 12 && times.length <= 14, `${times.length}`);
});

test("a page that goes away sends a beacon, and what was pending with it", async () => {
  const { page, gateway, stream } = await readToNow();
  stream.shown({ chars: 5, rate: 4 });
  stream.shown({ chars: 50, rate: 4 }); // waits for the next batch
  page.leave();
  const [{ url, body }] = page.beacons as [{ url: string; body: string }];
  assert.equal(url, gateway.posts[0]!.url);
  assert.deepEqual(JSON.parse(body), {
    capability: "key",
    reports: [{ seq: 3, age_ms: 0, chars: 50, rate: 4, visible: false, paused: false }],
  });
});

test("a program that is its own reader is reported by what it has read", async () => {
  const { clock, gateway } = await readToNow({ reader: "machine" }, 7);
  await clock.pass(300);
  assert.equal(gateway.reports.at(-1)!.tokens, 7);
  const { clock: later, gateway: person } = await readToNow({ reader: "human" }, 7);
  await later.pass(300);
  assert.deepEqual(person.posts, []);
});

// ---- a gateway that does not play along ----

/** A reader moves for 20 s. Returns what the gateway got, after having checked that the answer was not harmed. */
async function readWhile(progress: FakeGateway["progress"]) {
  const { clock, gateway, stream, reader } = await readToNow();
  gateway.progress = progress;
  for (let tick = 0; tick < 200; tick += 1) {
    stream.shown({ tokens: tick % 2 });
    await clock.pass(100);
  }
  const read = reader.read();
  await gateway.send("still here");
  assert.equal(new TextDecoder().decode((await read).value), "still here");
  return { gateway, stream };
}

for (const status of [400, 403, 404, 405, 410]) {
  test(`${status} ends the reports, not the answer`, async () => {
    const { gateway, stream } = await readWhile(() => new Response("no", { status }));
    assert.equal(gateway.posts.length, 1);
    assert.equal(stream.open, false);
  });
}

const failures: [string, FakeGateway["progress"]][] = [
  ["503", () => new Response("no", { status: 503 })],
  ["no network", () => Promise.reject(new TypeError("failed to fetch"))],
];
for (const [what, progress] of failures) {
  test(`${what}: tried again, less and less often`, async () => {
    const { gateway, stream } = await readWhile(progress);
    assert.ok(gateway.posts.length >= 4 && gateway.posts.length <= 7, `${gateway.posts.length} tries`);
    assert.equal(stream.open, true);
  });
}

test("429: left alone for as long as it asks", async () => {
  const retry = new Response("slow down", { status: 429, headers: { "retry-after": "5" } });
  const { gateway } = await readWhile(() => retry.clone());
  assert.ok(gateway.posts.length >= 2);
  assert.ok(gateway.posts[1]!.atMs >= 5_000, `again after ${gateway.posts[1]!.atMs} ms`);
});

test("a report that failed is sent again with its own age", async () => {
  const { clock, gateway, stream } = await readToNow();
  let failing = true;
  gateway.progress = () => (failing ? Promise.reject(new TypeError("down")) : Response.json({}));
  stream.shown({ chars: 5 });
  await settle();
  await clock.pass(100);
  failing = false;
  await clock.pass(500);
  assert.deepEqual(
    gateway.reports.map(({ seq, age_ms }) => [seq, age_ms]),
    [[1, 0], [1, 500]],
  );
});

test("a progress route that hangs holds two connections at most", async () => {
  let open = 0;
  let most = 0;
  const { clock, gateway, stream } = await readToNow();
  gateway.progress = () => {
    most = Math.max(most, ++open);
    return new Promise(() => {});
  };
  for (let tick = 0; tick < 30; tick += 1) {
    stream.shown({ tokens: tick });
    await clock.pass(100);
  }
  assert.equal(most, 2);
});

// ---- together with a renderer ----

test("the reports are what the renderer has really shown", async () => {
  const { clock, page, gateway, stream } = await readToNow();
  const screen: string[] = [];
  const show = (text: string): void => void screen.push(text);
  const frames = new FakeFrames(clock);
  const renderer = new PacedRenderer({ show, rate: { tokens: 10 }, stream, clock, page, frames });
  for (let word = 0; word < 100; word += 1) renderer.push(" word");
  await clock.pass(4_321);
  renderer.pause();
  await settle();
  const last = gateway.reports.at(-1)!;
  assert.deepEqual([last.chars, last.rate, last.paused], [screen.join("").length, 10, true]);
  assert.ok(gateway.posts.length <= 8, `${gateway.posts.length} requests for 4.3 s of steady reading`);
  renderer.resume();
  await clock.pass(60);
  assert.equal(gateway.reports.at(-1)!.paused, false);
  page.setHidden(true);
  await clock.pass(60);
  assert.deepEqual([gateway.reports.at(-1)!.visible, gateway.reports.at(-1)!.chars], [false, screen.join("").length]);
});

// ---- after the answer ----

/** An answer of 100 words that is complete, and a display of it at ten words a second. */
async function completeAnswer(options: FetchOptions = {}) {
  const all = await readToNow(options);
  const { clock, page, gateway, stream, reader } = all;
  const screen: string[] = [];
  const show = (text: string): void => void screen.push(text);
  const display = (): PacedRenderer => {
    const frames = new FakeFrames(clock);
    const renderer = new PacedRenderer({ show, rate: { tokens: 10 }, stream, clock, page, frames });
    for (let word = 0; word < 100; word += 1) renderer.push(" word");
    return renderer;
  };
  const finish = async (): Promise<void> => {
    await gateway.finish();
    await reader.read();
  };
  const shownChars = (): number => screen.join("").length;
  const nothingIsLeft = (): void => assert.deepEqual([clock.timers, page.listeners, stream.open], [0, 0, false]);
  return { ...all, display, finish, shownChars, nothingIsLeft };
}

test("after the answer the reports go on until all is shown, and then stop", async () => {
  const { clock, gateway, display, finish, shownChars, nothingIsLeft } = await completeAnswer();
  const renderer = display();
  renderer.end();
  await clock.pass(1_000);
  await finish();
  for (let second = 2; second <= 9; second += 1) {
    const { length } = gateway.reports;
    await clock.pass(1_000);
    assert.ok(gateway.reports.length > length, `nothing in second ${second}`);
    const behind = shownChars() - gateway.reports.at(-1)!.chars!;
    assert.ok(behind >= 0 && behind <= 60, `${behind} characters behind`);
  }
  await clock.pass(2_000);
  assert.equal(renderer.state, "done");
  assert.equal(gateway.reports.at(-1)!.chars, 500);
  nothingIsLeft();
  const { length } = gateway.posts;
  await clock.pass(120_000);
  assert.equal(gateway.posts.length, length);
});

test("where nobody says what is shown, nothing is left after the answer", async () => {
  const { clock, page, gateway, stream, finish, nothingIsLeft } = await completeAnswer();
  await finish();
  nothingIsLeft();
  stream.pause();
  page.setHidden(true);
  await clock.pass(60_000);
  assert.deepEqual(gateway.posts, []);
});

test("what was shown at the end of the answer is told at once, and only once", async () => {
  const { clock, gateway, stream, finish, nothingIsLeft } = await completeAnswer();
  stream.shown({ chars: 450, rate: 10 });
  await clock.pass(50); // in the middle of the spacing of ordinary reports
  stream.shown({ chars: 500, rate: 10 });
  await finish();
  await settle();
  assert.deepEqual(gateway.reports.map(({ chars }) => chars), [450, 500]);
  nothingIsLeft();
  await clock.pass(60_000);
  assert.equal(gateway.reports.length, 2);
});

for (const over of [true, false]) {
  test(`who leaves ${over ? "after" : "before"} the end is reported where he was, and no more`, async () => {
    const { clock, page, gateway, display, finish, shownChars, nothingIsLeft } = await completeAnswer();
    const renderer = display();
    if (over) await finish();
    await clock.pass(2_345);
    renderer.dispose();
    await settle();
    assert.equal(gateway.reports.at(-1)!.chars, shownChars());
    assert.ok(shownChars() < 500);
    const { length } = gateway.posts;
    if (over) nothingIsLeft();
    page.setHidden(true);
    page.setHidden(false);
    page.leave();
    await clock.pass(60_000);
    assert.deepEqual([gateway.posts.length, page.beacons], [length, []]);
    if (!over) await finish();
    nothingIsLeft();
  });
}

test("a display that is replaced by another one before the end goes on being followed", async () => {
  const { clock, gateway, stream, display, finish } = await completeAnswer();
  const first = display();
  await clock.pass(1_000);
  first.pause();
  first.dispose();
  const second = display();
  second.end();
  await finish();
  await clock.pass(11_000);
  assert.deepEqual([gateway.reports.at(-1)!.chars, gateway.reports.at(-1)!.paused], [500, false]);
  assert.equal(stream.open, false);
});

test("a display that stops without a word is not reported as one that stands still", async () => {
  const { clock, page, gateway, stream, finish, nothingIsLeft } = await completeAnswer();
  stream.shown({ chars: 50 });
  await clock.pass(10_000);
  assert.equal(gateway.reports.length, 3, "before the end it is: the control");
  await finish();
  await clock.pass(20_000);
  assert.equal(gateway.reports.length, 3);
  page.setHidden(true);
  await clock.pass(100);
  const hidden = gateway.reports.at(-1)!;
  assert.deepEqual([hidden.chars, hidden.visible, hidden.age_ms], [50, false, 30_000], "as of when it was shown");
  page.setHidden(false);
  const { length } = gateway.reports;
  await clock.pass(40_000);
  assert.ok(gateway.reports.length <= length + 1);
  nothingIsLeft();
});

test("a pause after the answer is kept alive for a minute, and its end is told", async () => {
  const { clock, gateway, stream, display, finish, shownChars, nothingIsLeft } = await completeAnswer();
  const renderer = display();
  await clock.pass(1_000);
  await finish();
  renderer.pause();
  await clock.pass(30_100);
  const pauses = gateway.reports.filter(({ paused }) => paused);
  assert.ok(pauses.length >= 6 && pauses.length <= 8, `${pauses.length}`);
  renderer.resume();
  await clock.pass(100);
  const { paused, age_ms } = gateway.reports.at(-1)!;
  assert.deepEqual([paused, age_ms], [false, 0]);
  renderer.pause();
  await clock.pass(60_000);
  assert.equal(gateway.reports.at(-1)!.chars, shownChars());
  assert.equal(stream.open, false);
  assert.equal(clock.timers, 0);
  renderer.dispose();
  nothingIsLeft();
});

test("a long text is followed for a minute after the answer", async () => {
  const { clock, gateway, display, finish, nothingIsLeft } = await completeAnswer();
  const renderer = display();
  renderer.rate = { tokens: 1 };
  await finish();
  await clock.pass(61_000);
  const last = gateway.posts.at(-1)!;
  assert.ok(last.atMs > 58_000 && last.atMs <= 60_000, `${last.atMs}`);
  assert.equal(renderer.state, "reading");
  assert.ok(gateway.posts.length <= 65, `${gateway.posts.length} requests in a minute`);
  renderer.dispose();
  nothingIsLeft();
});

test("a page that goes away after the answer says where its reader was", async () => {
  const { clock, page, gateway, stream, finish } = await completeAnswer();
  stream.shown({ chars: 50 });
  await finish();
  await clock.pass(2_000);
  page.leave();
  const { reports } = JSON.parse(page.beacons[0]!.body);
  assert.deepEqual(reports, [{ seq: 2, age_ms: 2_000, chars: 50, visible: false, paused: false }]);
  assert.equal(gateway.reports.length, 1);
});

for (const status of [404, 410]) {
  test(`${status} after the answer ends the reports and leaves nothing`, async () => {
    const { clock, gateway, stream, finish, nothingIsLeft } = await completeAnswer();
    stream.shown({ chars: 50 });
    await clock.pass(1_000);
    await finish();
    gateway.progress = () => new Response("gone", { status });
    stream.shown({ chars: 100 });
    await settle();
    nothingIsLeft();
    stream.shown({ chars: 200 });
    stream.leave();
    await clock.pass(60_000);
    assert.equal(gateway.posts.length, 2);
  });
}

test("a last report that fails is not tried again", async () => {
  const { clock, gateway, stream, display, finish, nothingIsLeft } = await completeAnswer();
  const renderer = display();
  await finish();
  await clock.pass(1_500);
  gateway.progress = () => Promise.reject(new TypeError("failed to fetch"));
  renderer.dispose();
  const { length } = gateway.posts;
  await settle();
  nothingIsLeft();
  await clock.pass(60_000);
  assert.deepEqual([gateway.posts.length, stream.open], [length, false]);
});

test("no report is older than the gateway takes", async () => {
  const { clock, page, gateway, stream, finish } = await completeAnswer();
  stream.shown({ chars: 50 });
  await clock.pass(100_000); // the engine is slow
  await finish();
  page.setHidden(true);
  await clock.pass(100);
  assert.deepEqual([gateway.reports.at(-1)!.visible, gateway.reports.at(-1)!.age_ms], [false, 60_000]);
});

test("an answer that breaks off is read on", async () => {
  const { clock, gateway, reader, display, shownChars } = await completeAnswer();
  display();
  const read = assert.rejects(reader.read(), TypeError);
  await gateway.break();
  await read;
  await clock.pass(3_000);
  assert.ok(shownChars() - gateway.reports.at(-1)!.chars! <= 60);
  assert.ok(gateway.reports.at(-1)!.chars! > 50);
});
