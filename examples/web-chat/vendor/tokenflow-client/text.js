/**
 * Text that grows at its end, cut into units that are shown whole.
 *
 * A unit is a word with the space before it and the punctuation after it; in Chinese and Japanese, and for
 * emoji, a grapheme. The last unit is not settled while more text may lengthen it.
 */
export class GrowingText {
    #segments;
    #units = [];
    #pushEnds = [];
    #tail = "";
    #settledChars = 0;
    #pushedChars = 0;
    constructor(locale) {
        this.#segments = new Segmenters(locale);
    }
    /** Settled units, in order. */
    get units() {
        return this.#units;
    }
    /** Code points appended so far, settled or not. */
    get chars() {
        return this.#pushedChars;
    }
    /** Number of appended pieces: content events, where one event is one piece. */
    get pieces() {
        return this.#pushEnds.length;
    }
    append(piece) {
        this.#pushedChars += countChars(piece);
        this.#pushEnds.push(this.#pushedChars);
        this.#tail += piece;
        this.#settle(false);
    }
    /** Nothing more will come: what is left is settled. */
    end() {
        this.#settle(true);
    }
    /** How many code points the first `pieces` pieces hold; a fraction of a piece counts as that part of it. */
    charsAt(pieces) {
        const whole = Math.min(Math.floor(pieces), this.pieces);
        const before = this.#endOf(whole);
        return before + (this.#endOf(whole + 1) - before) * (pieces - whole);
    }
    /** The inverse of `charsAt`. */
    piecesAt(chars) {
        let whole = 0;
        for (let high = this.pieces; whole < high;) {
            const middle = (whole + high) >> 1;
            if (this.#endOf(middle + 1) <= chars)
                whole = middle + 1;
            else
                high = middle;
        }
        const before = this.#endOf(whole);
        const size = this.#endOf(whole + 1) - before;
        return size > 0 ? whole + (chars - before) / size : whole;
    }
    #endOf(pieces) {
        return pieces <= 0 ? 0 : (this.#pushEnds[Math.min(pieces, this.pieces) - 1] ?? 0);
    }
    #settle(final) {
        const texts = joinUnits(this.#segments.split(this.#tail), final);
        for (const text of texts) {
            this.#settledChars += countChars(text);
            this.#units.push({ text, endChars: this.#settledChars });
            this.#tail = this.#tail.slice(text.length);
        }
    }
}
const MAX_UNIT_CHARS = 24; // longer than nearly all words; else a URL or a line of base64 would come all at once
const SPACE = /^\s/u;
const SINGLE = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\u3000-\u303f\uff00-\uffef\p{Extended_Pictographic}\p{RI}]/u;
/** Number of Unicode code points. */
export function countChars(text) {
    let count = text.length;
    for (const _ of text.matchAll(/[\ud800-\udbff][\udc00-\udfff]/g))
        count -= 1;
    return count;
}
/** Splits text by `Intl.Segmenter` into words, and what is read sign by sign into graphemes. */
class Segmenters {
    #words;
    #graphemes;
    constructor(locale) {
        this.#words = new Intl.Segmenter(locale, { granularity: "word" });
        this.#graphemes = new Intl.Segmenter(locale, { granularity: "grapheme" });
    }
    *split(text) {
        for (const { segment, isWordLike } of this.#words.segment(text)) {
            if (SINGLE.test(segment))
                yield* this.#singles(segment);
            else if (segment.length > MAX_UNIT_CHARS)
                yield* this.#slices(segment);
            else if (SPACE.test(segment))
                yield { text: segment, kind: "space" };
            else
                yield { text: segment, kind: isWordLike ? "word" : "sign" };
        }
    }
    *#singles(text) {
        for (const { segment } of this.#graphemes.segment(text))
            yield { text: segment, kind: "single" };
    }
    *#slices(text) {
        for (const { segment } of this.#graphemes.segment(text))
            yield { text: segment, kind: "sign" };
    }
}
/** Joins segments into units; without `final` the last one is left out, for it may go on. */
function joinUnits(segments, final) {
    const units = [];
    let unit = "";
    let last;
    for (const segment of segments) {
        if (last && (mayBreak(last, segment) || countChars(unit) >= MAX_UNIT_CHARS)) {
            units.push(unit);
            unit = "";
        }
        unit += segment.text;
        last = segment;
    }
    if (final && unit)
        units.push(unit);
    return units;
}
function mayBreak(left, right) {
    if (left.kind === "space")
        return false; // a space is shown with what follows it
    if (right.kind === "space" || left.kind === "single" || right.kind === "single")
        return true;
    return left.kind === "word" && right.kind === "word"; // Thai, Lao, Khmer: words without spaces
}
