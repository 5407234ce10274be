import assert from "node:assert/strict";
import { test } from "node:test";
import { GrowingText, countChars } from "../src/text.js";

function unitsOf(pieces: string[], { ended = true } = {}): string[] {
  const text = new GrowingText();
  for (const piece of pieces) text.append(piece);
  if (ended) text.end();
  return text.units.map((unit) => unit.text);
}

/** The text one UTF-16 unit at a time: the worst cut there is. */
const shreds = (text: string): string[] => text.split("");

const cases: [what: string, text: string, units: string[]][] = [
  ["words keep space and punctuation", "Hello, big world!", ["Hello,", " big", " world!"]],
  ["newlines begin a unit", "One.\n\nTwo", ["One.", "\n\nTwo"]],
  ["Chinese by character", "你好，世界", ["你", "好", "，", "世", "界"]],
  ["Japanese kana and kanji", "日本のことば", ["日", "本", "の", "こ", "と", "ば"]],
  ["Latin inside Chinese", "用Python写", ["用", "Python", "写"]],
  ["Korean by word", "안녕 세상", ["안녕", " 세상"]],
  ["emoji whole", "👩‍👩‍👧🇫🇷👍🏽", ["👩‍👩‍👧", "🇫🇷", "👍🏽"]],
  ["combining marks stay", "cafe\u0301 ole\u0301", ["cafe\u0301", " ole\u0301"]],
  ["code", "foo(bar) + 1", ["foo(bar)", " +", " 1"]],
];

for (const [what, text, units] of cases) {
  test(`units: ${what}`, () => {
    assert.deepEqual(unitsOf([text]), units);
    if (!/\p{Extended_Pictographic}|\p{RI}/u.test(text)) assert.deepEqual(unitsOf(shreds(text)), units);
    assert.equal(unitsOf(shreds(text)).join(""), text);
  });
}

test("a word that may go on is not settled, and is at the end", () => {
  assert.deepEqual(unitsOf(["Hello wor"], { ended: false }), ["Hello"]);
  assert.deepEqual(unitsOf(["Hello wor", "ld "], { ended: false }), ["Hello", " world"]);
  assert.deepEqual(unitsOf(["Hello wor"]), ["Hello", " wor"]);
});

test("Thai, which has no spaces, is cut into words", () => {
  assert.ok(unitsOf(["ภาษาไทยเขียนโดยไม่มีช่องว่าง"]).length > 3);
});

test("a long run without a boundary does not hold the text up", () => {
  const units = unitsOf(["x".repeat(1_000)], { ended: false });
  assert.ok(units.length >= 40, `${units.length} units`);
  assert.ok(units.every((unit) => unit.length <= 24));
});

test("grapheme clusters are never cut, wherever the pieces were", () => {
  const text = "ab 👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 한국 日本語👍🏽";
  const clusters = new Set([0]);
  for (const { index, segment } of new Intl.Segmenter().segment(text)) clusters.add(index + segment.length);
  const whole: string[] = [...new Intl.Segmenter().segment(text)].map(({ segment }) => segment);
  for (let cut = 0; cut < whole.length; cut += 1) {
    let end = 0;
    for (const unit of unitsOf([whole.slice(0, cut).join(""), whole.slice(cut).join("")])) {
      end += unit.length;
      assert.ok(clusters.has(end), `cut at ${end} in pieces ${cut}`);
    }
  }
});

test("characters are code points", () => {
  assert.equal(countChars("a🌍é日"), 4);
  assert.equal(countChars("👩‍👧"), 3);
  assert.equal(countChars(""), 0);
});

test("pieces and characters convert both ways", () => {
  const text = new GrowingText();
  for (const piece of ["Hel", "lo", " 🌍🌍"]) text.append(piece);
  assert.equal(text.chars, 8);
  assert.deepEqual([0, 1, 1.5, 2, 3, 9].map((pieces) => text.charsAt(pieces)), [0, 3, 4, 5, 8, 8]);
  for (const chars of [0, 1, 3, 4, 5, 8]) assert.equal(text.charsAt(text.piecesAt(chars)), chars);
  assert.equal(new GrowingText().piecesAt(5), 0);
});
