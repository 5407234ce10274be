"""What steps cost on this engine, learnt as it runs."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from tokenflow_engine.sglang.regression import Line

__all__ = ["MeasuredCosts"]

_PRIOR_STEP_S = 0.03
_PRIOR_TURN_S = 2e-3
_PRIOR_TURN_SHARE = 0.15
"""Of a decode step of the largest batch, what turns cost until enough were seen. Two models on a CPU: 0.17
and 0.22. With less, the first burst that an engine sees is let in too far, and its readers run dry."""
_KNOWN_TURNS = 64
"""Steps with KV on the move."""
_PRIOR_PREFILL_S = 2e-4
_MAX_STEP_S = 10.0
_MOST_MOVING = 0.5
_LEAST_S = 1e-6


class Copies(Protocol):
    """Seconds that copies of so many tokens take, behind what is queued; None without host memory."""

    def load_s(self, tokens: float) -> float | None: ...

    def evict_s(self, tokens: float) -> float | None: ...


class _Step(NamedTuple):
    at: float
    is_prefill: bool
    streams: int
    tokens: int
    """Computed by a prefill, or in the contexts that a decode step reads."""
    moving_share: float | None
    """Of device memory, what belongs to streams on their way out or in; None if none is out of the batch."""

    @classmethod
    def of(cls, batch: Any, now: float, *, moving_share: float | None) -> _Step:
        is_prefill = bool(batch.forward_mode.is_extend())
        tokens = batch.extend_num_tokens if is_prefill else sum(batch.seq_lens_cpu.tolist())
        return cls(now, is_prefill, len(batch.reqs), int(tokens or 0), moving_share)


class MeasuredCosts:
    """See `Costs`. Seconds and tokens; `copies` answers for loads and evictions."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._decode = Line((_PRIOR_STEP_S, 0.0, 0.0, _PRIOR_TURN_S), (1.0, 32.0, 32768.0, 1.0))
        self._prefill = Line((_PRIOR_STEP_S, _PRIOR_PREFILL_S), (1.0, 1024.0))
        self._turns = 0
        self._most = (1, 0.0)
        """The batch with the most streams that was seen, and its tokens."""
        self._last: _Step | None = None
        self.step_s = _PRIOR_STEP_S
        """The last decode step's."""

    def launching(self, batch: Any | None, now: float, *, moving_share: float | None = None) -> None:
        """The scheduler is about to launch this pass, or has none: the last one took until now.

        Memory of streams on the move decodes nothing: a step counts as that much longer.
        """
        last = self._last
        self._last = None if batch is None else _Step.of(batch, now, moving_share=moving_share)
        if last is None or not 0 < now - last.at < _MAX_STEP_S:
            return
        if last.is_prefill:
            self._prefill.see((1.0, last.tokens), now - last.at)
        else:
            self.step_s = now - last.at
            turns, moving = float(last.moving_share is not None), last.moving_share or 0.0
            self._turns += moving > 0
            self._most = max(self._most, (last.streams, last.tokens))
            full_s = self.step_s / (1.0 - min(moving, _MOST_MOVING))
            self._decode.see((1.0, last.streams, last.tokens, turns), full_s)

    @property
    def turn_s(self) -> float:
        seen_s = self._decode.at((0.0, 0.0, 0.0, 1.0))
        if self._turns >= _KNOWN_TURNS:
            return seen_s
        return max(seen_s, _PRIOR_TURN_SHARE * self.decode_s(*self._most))

    def decode_s(self, batch: int, context_tokens: float) -> float:
        return max(_LEAST_S, self._decode.at((1.0, batch, context_tokens, 0.0)))

    def prefill_s(self, tokens: float) -> float:
        return max(_LEAST_S, self._prefill.at((1.0, tokens)))

    def load_s(self, tokens: float) -> float:
        seconds = self._copies.load_s(tokens)
        return self.prefill_s(tokens) if seconds is None else seconds

    def evict_s(self, tokens: float) -> float:
        return self._copies.evict_s(tokens) or 0.0
