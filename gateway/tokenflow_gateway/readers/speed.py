"""How fast people read, when nothing better is known, by the script of the text.

Latin script: 238 words a minute, most adults 175 to 300 (Brysbaert 2019, silent reading of English
non-fiction), at 6.0 characters a word with its space: 23.8 characters a second. Chinese and Japanese: 255 and
357 characters a minute read aloud (Trauzettel-Klosinski and Dietz 2012, IReST), taken 1.3 times as fast in
silence, as for English (238 against 183): about 6.6 characters a second. Aloud, and listening: 183 words a
minute. A rate in tokens follows from the characters a token has had in this answer so far.

Code (in ``` fences) is an assumption: half the pace of Latin prose, and anything from a fifth of that pace to
five quarters. No measurement of how fast people read code on a page was found. What is known is that
programmers, experts most of all, read it less linearly than prose (Busjahn et al. 2015, ICPC), so that parts
are looked at again: hence half. Some study every line, others skim to what they will copy: hence the wide
band. Code review, at 200 to 400 lines an hour, is another task. Tables read differently, too; no figure was
found, and none is assumed.
"""

from __future__ import annotations

import math
from functools import cache

from tokenflow_engine.protocol import Reader
from tokenflow_gateway.readers.estimator import Pace
from tokenflow_gateway.readers.learned import Habit

__all__ = ["TextShape", "learned_pace", "model_pace"]

_LATIN_CHARS_PER_S = 238 * 6.0 / 60
_LATIN_ALOUD_CHARS_PER_S = 183 * 6.0 / 60
_WIDE_CHARS_PER_S = (255 + 357) / 2 * 1.3 / 60
_WIDE_ALOUD_CHARS_PER_S = (255 + 357) / 2 / 60
_BAND = (175 / 238, 300 / 238)
_CODE_PACE = 0.5
_CODE_BAND = (0.4, 2.5)
_WIDE_FROM = "\u2e80"
"""First code point of the CJK blocks; what lies beyond is read by the character."""
_TYPICAL_CHARS_PER_TOKEN = 4.5
_MACHINE_RATE = 1000.0
"""Tokens per second of a reader that takes everything at once."""
_FENCE_TICKS = 3


class TextShape:
    """Counts of one answer's text: tokens, characters (code points), and how many of these are CJK or code.

    A run of three backticks or more begins or ends code, wherever it stands and however it is cut into
    tokens; what shares a token with it is not counted as code.
    """

    __slots__ = ("_in_code", "_ticks", "chars", "code_chars", "tokens", "wide_chars")

    def __init__(self) -> None:
        self.tokens = 0
        self.chars = 0
        self.wide_chars = 0
        """Those outside code."""
        self.code_chars = 0
        self._in_code = False
        self._ticks = 0

    def add(self, text: str, *, tokens: int = 1) -> None:
        """The text of one more token, or of several."""
        self.tokens += tokens
        self.chars += len(text)
        if "`" in text:
            self._fences(text)
        else:
            self._ticks = 0
            if self._in_code:
                self.code_chars += len(text)
                return
        if not text.isascii():
            self.wide_chars += sum(char >= _WIDE_FROM for char in text)

    def _fences(self, text: str) -> None:
        for char in text:
            self._ticks = self._ticks + 1 if char == "`" else 0
            if self._ticks == _FENCE_TICKS:
                self._in_code = not self._in_code


def model_pace(shape: TextShape, *, reader: Reader) -> Pace:
    """The pace of an average reader of this text, with the band of most adults."""
    return _model_pace(shape, reader) if shape.chars else _pace_before_text(reader)


@cache
def _pace_before_text(reader: Reader) -> Pace:
    """Every stream begins with it."""
    return _model_pace(TextShape(), reader)


def _model_pace(shape: TextShape, reader: Reader) -> Pace:
    if reader == "machine":
        return Pace(_MACHINE_RATE, _MACHINE_RATE, _MACHINE_RATE, "declared")
    aloud = reader == "voice"
    latin = _LATIN_ALOUD_CHARS_PER_S if aloud else _LATIN_CHARS_PER_S
    wide = _WIDE_ALOUD_CHARS_PER_S if aloud else _WIDE_CHARS_PER_S
    chars_per_token = shape.chars / shape.tokens if shape.chars else _TYPICAL_CHARS_PER_TOKEN
    wide_share = shape.wide_chars / shape.chars if shape.chars else 0.0
    code_share = shape.code_chars / shape.chars if shape.chars and not aloud else 0.0
    prose_s = (wide_share / wide + (1 - wide_share - code_share) / latin) * chars_per_token
    code_s = code_share / (latin * _CODE_PACE) * chars_per_token
    low, high = (1 / (prose_s / prose + code_s / code) for prose, code in zip(_BAND, _CODE_BAND, strict=True))
    return Pace(1 / (prose_s + code_s), low, high, "model")


def learned_pace(average: Pace, habit: Habit) -> Pace:
    """The pace of a reader whose habit is known, where an average one reads at `average`.

    A habit is of prose: what makes the band of this text wider than that of prose stays in it.
    """
    rate = average.rate * habit.ratio
    below = _beyond_prose(average.rate / average.low, prose=1 / _BAND[0])
    above = _beyond_prose(average.high / average.rate, prose=_BAND[1])
    low = rate * math.exp(-math.hypot(below, math.log(habit.ratio / habit.low)))
    high = rate * math.exp(math.hypot(above, math.log(habit.high / habit.ratio)))
    return Pace(rate, low, high, "learned")


def _beyond_prose(width: float, *, prose: float) -> float:
    """The part of a band's width, as logarithm, that the width of prose does not explain."""
    return math.sqrt(max(0.0, math.log(width) ** 2 - math.log(prose) ** 2))
