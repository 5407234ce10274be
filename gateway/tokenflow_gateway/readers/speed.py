"""How fast people read, when nothing better is known, by the script of the text.

Latin script: 238 words a minute, most adults 175 to 300 (Brysbaert 2019, silent reading of English
non-fiction), at 6.0 characters a word with its space: 23.8 characters a second. Chinese and Japanese: 255 and
357 characters a minute read aloud (Trauzettel-Klosinski and Dietz 2012, IReST), taken 1.3 times as fast in
silence, as for English (238 against 183): about 6.6 characters a second. Aloud, and listening: 183 words a
minute. A rate in tokens follows from the characters a token has had in this answer so far. Code and tables
read differently; no figure was found, and none is assumed.
"""

from __future__ import annotations

from tokenflow_engine.protocol import Reader
from tokenflow_gateway.readers.estimator import Pace

__all__ = ["TextShape", "declared_pace", "model_pace"]

_LATIN_CHARS_PER_S = 238 * 6.0 / 60
_LATIN_ALOUD_CHARS_PER_S = 183 * 6.0 / 60
_WIDE_CHARS_PER_S = (255 + 357) / 2 * 1.3 / 60
_WIDE_ALOUD_CHARS_PER_S = (255 + 357) / 2 / 60
_BAND = (175 / 238, 300 / 238)
_WIDE_FROM = "\u2e80"
"""First code point of the CJK blocks; what lies beyond is read by the character."""
_TYPICAL_CHARS_PER_TOKEN = 4.5
_DECLARED_BAND = (0.9, 1.1)
_MACHINE_RATE = 1000.0
"""Tokens per second of a reader that takes everything at once."""


class TextShape:
    """Counts of one answer's text: tokens, characters (code points), and how many of these are CJK."""

    __slots__ = ("chars", "tokens", "wide_chars")

    def __init__(self) -> None:
        self.tokens = 0
        self.chars = 0
        self.wide_chars = 0

    def add(self, text: str) -> None:
        """One more token's text."""
        self.tokens += 1
        self.chars += len(text)
        if not text.isascii():
            self.wide_chars += sum(char >= _WIDE_FROM for char in text)


def model_pace(shape: TextShape, *, reader: Reader) -> Pace:
    """The pace of an average reader of this text, with the band of most adults."""
    if reader == "machine":
        return Pace(_MACHINE_RATE, _MACHINE_RATE, _MACHINE_RATE, "declared")
    aloud = reader == "voice"
    latin = _LATIN_ALOUD_CHARS_PER_S if aloud else _LATIN_CHARS_PER_S
    wide = _WIDE_ALOUD_CHARS_PER_S if aloud else _WIDE_CHARS_PER_S
    chars_per_token = shape.chars / shape.tokens if shape.chars else _TYPICAL_CHARS_PER_TOKEN
    wide_share = shape.wide_chars / shape.chars if shape.chars else 0.0
    seconds_per_char = wide_share / wide + (1 - wide_share) / latin
    rate = 1 / (seconds_per_char * chars_per_token)
    return Pace(rate, rate * _BAND[0], rate * _BAND[1], "model")


def declared_pace(rate: float) -> Pace:
    """The pace that a client has declared."""
    return Pace(rate, rate * _DECLARED_BAND[0], rate * _DECLARED_BAND[1], "declared")
