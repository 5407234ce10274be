"""What has been learned of each reader: how many times as fast as the average he or she reads.

88.5 % of the variance of reading speed is between readers and 11.5 % within one (Trauzettel-Klosinski and
Dietz 2012, IReST), so that a reader who has been watched once is known better than the model of all readers.
What is kept is a ratio to the model's pace for the same text: a rate in tokens or characters would depend on
the script. Pure: the caller gives the time, in seconds of one clock.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from dataclasses import dataclass

from tokenflow_engine.protocol import Reader

__all__ = ["LEAST_EVIDENCE_S", "MAX_RATIO", "Habit", "LearnedRates"]

LEAST_EVIDENCE_S = 5.0
"""Watched for less than this, a reader teaches nothing."""
MAX_RATIO = 5.0
"""Nobody is taken to read more than so many times faster, or slower, than the average."""
HALF_LIFE_S = 30 * 86_400.0
_TEXT_S = 30.0
"""Reading watched for as long as this counts as one text."""
_MOST_TEXTS = 20.0
"""More than this is not remembered, so that a reader who changes is followed."""
_LEAST_TEXTS = 0.05
"""With less left of it, a habit is no better than the model."""
_BAND_SIGMAS = 1.28
"""The band spans the central 80 % of a normal distribution."""
_VARIANCE = (math.log(300 / 175) / 2 / _BAND_SIGMAS) ** 2
"""Of the logarithm of adults' speeds, most of which are 175 to 300 words a minute (Brysbaert 2019)."""
_BETWEEN, _WITHIN = 0.885 * _VARIANCE, 0.115 * _VARIANCE
_WITHIN_TEXTS = 4.0
"""So many texts' worth the published variance within readers counts beside a reader's own, if it is more."""


@dataclass(frozen=True, slots=True)
class Habit:
    """How many times as fast as the average one reads: the best guess for the next text, and its band."""

    ratio: float
    low: float
    high: float

    def __post_init__(self) -> None:
        assert 0 < self.low <= self.ratio <= self.high


@dataclass(slots=True)
class _Evidence:
    """Weighted moments of the logarithm of one reader's ratios; `texts` is the weight."""

    texts: float
    mean: float
    variance: float
    at: float

    def age(self, now: float) -> None:
        self.texts *= 0.5 ** (max(0.0, now - self.at) / HALF_LIFE_S)
        self.at = max(self.at, now)

    def add(self, value: float, texts: float) -> None:
        self.texts += texts
        share = texts / self.texts
        off = value - self.mean
        self.mean += share * off
        self.variance = (1 - share) * (self.variance + share * off**2)
        self.texts = min(self.texts, _MOST_TEXTS)


class LearnedRates:
    """Habits of the readers seen last, in memory. Knows readers by a keyed hash only."""

    def __init__(self, *, key: bytes, capacity: int = 100_000) -> None:
        """`key` keeps who a reader is from being guessed and tried; at most 64 bytes."""
        self._key = key
        self._capacity = capacity
        self._readers: OrderedDict[bytes, _Evidence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._readers)

    def name(self, *, tenant: str, user: str, reader: Reader) -> bytes:
        """What this user of this tenant is known by; listening and reading are different habits."""
        digest = hashlib.blake2b(key=self._key, digest_size=16)
        for part in (reader, tenant, user):
            encoded = part.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(4, "big") + encoded)
        return digest.digest()

    def habit(self, name: bytes, *, now: float) -> Habit | None:
        """What is known of a reader; None where that is not more than of anyone."""
        evidence = self._readers.get(name)
        if evidence is None:
            return None
        evidence.age(now)
        if evidence.texts < _LEAST_TEXTS:
            del self._readers[name]
            return None
        self._readers.move_to_end(name)
        return _predict(evidence)

    def learn(self, name: bytes, *, ratio: float, seconds: float, now: float) -> None:
        """A reader was watched for `seconds` of reading and was `ratio` times as fast as the average.

        Ratios beyond `MAX_RATIO` are taken as that. A new reader may take the place of the one not seen for
        longest.
        """
        assert ratio > 0
        assert seconds >= 0
        evidence = self._readers.get(name)
        if evidence is None:
            evidence = self._readers[name] = _Evidence(0.0, 0.0, 0.0, now)
            if len(self._readers) > self._capacity:
                self._readers.popitem(last=False)
        self._readers.move_to_end(name)
        evidence.age(now)
        texts = seconds / _TEXT_S
        if texts > 0:
            most = math.log(MAX_RATIO)
            evidence.add(min(max(math.log(ratio), -most), most), texts)

    def evidence(self, name: bytes) -> tuple[float, float, float, float] | None:
        """What is known of a reader, to be told elsewhere: weight, mean, variance, and when that was true."""
        found = self._readers.get(name)
        return None if found is None else (found.texts, found.mean, found.variance, found.at)

    def remember(self, name: bytes, *, texts: float, mean: float, variance: float, at: float) -> None:
        """What `evidence` has told elsewhere, unless something later is known here."""
        known = self._readers.get(name)
        if known is not None and known.at >= at:
            return
        self._readers[name] = _Evidence(texts, mean, variance, at)
        self._readers.move_to_end(name)
        if len(self._readers) > self._capacity:
            self._readers.popitem(last=False)


def _predict(evidence: _Evidence) -> Habit:
    """The next text's ratio, from a normal prior of all readers and what this one has shown.

    With nothing shown it is the prior itself: the average, with the band of most adults.
    """
    texts = evidence.texts
    own = (_WITHIN_TEXTS * _WITHIN + texts * evidence.variance) / (_WITHIN_TEXTS + texts)
    within = max(_WITHIN, own)
    trust = texts / (texts + within / _BETWEEN)
    mean = trust * evidence.mean
    spread = _BAND_SIGMAS * math.sqrt((1 - trust) * _BETWEEN + within)
    return Habit(math.exp(mean), math.exp(mean - spread), math.exp(mean + spread))
