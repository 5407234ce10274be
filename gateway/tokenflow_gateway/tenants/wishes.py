"""What a request asks for: TokenFlow's own headers, and those of other gateways that mean the same.

Each alias keeps the polarity that it has where it comes from; docs/tenants.md has the table:

``x-smg-priority`` (sgl-model-gateway): ``system``, ``interactive``, ``default``, ``bulk``, first to last.
``x-dynamo-request-priority`` (NVIDIA Dynamo): an i32, higher first; what is below 0 counts as 0.
``priority`` in the body (SGLang): an integer, higher first. vLLM's field of this name goes the other way.
``x-llm-d-slo-ttft-ms``, ``x-llm-d-slo-tpot-ms`` (llm-d): milliseconds, lower is stricter.
``x-llm-d-inference-fairness-id`` (llm-d): whom to be fair to; no order.

As in those gateways, an alias that cannot be read counts as absent; TokenFlow's own headers are refused then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from tokenflow_gateway.relay.errors import BadRequest

__all__ = ["Wishes", "priority_factor", "read_wishes"]

_MS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_INT32 = re.compile(r"-?[0-9]{1,10}")
_MOST_INT32: Final = 2**31 - 1
_NAME_CHARS: Final = 64
_ID_CHARS: Final = 256
_MOST_TTFT_S: Final = 3600.0
_RATES: Final = (0.05, 1000.0)

_SMG: Final[Mapping[str, int]] = {"system": 3, "interactive": 1, "default": 0, "bulk": -1}
"""As steps of the same scale as the numbers of others."""
_MOST_FACTOR: Final = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a request asks for, before it is known what it may have."""

    sla: str | None = None
    ttft_s: float | None = None
    rate: float | None = None
    """Tokens per second, from an alias: the reader's own header goes before it."""
    priority: int = 0
    """Above 0: more urgent than others of its class; below: less."""
    fairness_id: str | None = None

    @property
    def asks(self) -> bool:
        """Whether anything was asked for."""
        return self != _NONE


_NONE: Final = Wishes()


def priority_factor(priority: int) -> float:
    """What a priority does to a weight: times 2 at 1, 4 at 3, 8 at 7 and beyond; below 0 the inverse."""
    factor = min(_MOST_FACTOR, 1.0 + abs(priority))
    return factor if priority >= 0 else 1.0 / factor


def read_wishes(headers: Iterable[tuple[bytes, bytes]], body_priority: msgspec.Raw | None = None) -> Wishes:
    """Raises `BadRequest` for a header of TokenFlow's that means nothing.

    Of several that say the same, TokenFlow's own wins, then the header over the body.
    """
    given = {name: value.decode("latin-1").strip() for name, value in headers if name in _READ}
    if not given and body_priority is None:
        return _NONE
    return Wishes(
        sla=_sla(given.get(b"x-tokenflow-sla")),
        ttft_s=_ttft(given),
        rate=_rate(given.get(b"x-llm-d-slo-tpot-ms")),
        priority=_priority(given, body_priority),
        fairness_id=given.get(b"x-llm-d-inference-fairness-id", "")[:_ID_CHARS] or None,
    )


_READ: Final = frozenset(
    {
        b"x-tokenflow-sla",
        b"x-tokenflow-ttft-ms",
        b"x-smg-priority",
        b"x-dynamo-request-priority",
        b"x-llm-d-slo-ttft-ms",
        b"x-llm-d-slo-tpot-ms",
        b"x-llm-d-inference-fairness-id",
    }
)


def _sla(name: str | None) -> str | None:
    if name is not None and not (0 < len(name) <= _NAME_CHARS and name.isprintable()):
        raise BadRequest(f"X-TokenFlow-SLA must be the name of a class, of at most {_NAME_CHARS} characters")
    return name


def _ttft(given: Mapping[bytes, str]) -> float | None:
    own = given.get(b"x-tokenflow-ttft-ms")
    if own is None:
        return _seconds(given.get(b"x-llm-d-slo-ttft-ms", ""))
    seconds = _seconds(own)
    if seconds is None:
        raise BadRequest(
            f"X-TokenFlow-TTFT-Ms must be milliseconds, from 1 to {_MOST_TTFT_S * 1000:.0f}, not {own!r}"
        )
    return seconds


def _seconds(text: str) -> float | None:
    """Milliseconds as seconds; None for what is no time that anybody means."""
    seconds = float(text) / 1000 if _MS.fullmatch(text) else 0.0
    return seconds if 0.001 <= seconds <= _MOST_TTFT_S else None


def _rate(tpot_ms: str | None) -> float | None:
    """Tokens per second, of milliseconds for each."""
    seconds = _seconds(tpot_ms or "")
    return None if seconds is None else min(_RATES[1], max(_RATES[0], 1.0 / seconds))


def _priority(given: Mapping[bytes, str], body: msgspec.Raw | None) -> int:
    smg = _SMG.get(given.get(b"x-smg-priority", "").lower())
    if smg is not None:
        return smg
    dynamo = given.get(b"x-dynamo-request-priority", "")
    if _INT32.fullmatch(dynamo) and abs(int(dynamo)) <= _MOST_INT32:
        return max(0, int(dynamo))
    return _body_priority(body)


def _body_priority(raw: msgspec.Raw | None) -> int:
    """0 for what is no integer: the field is not sent on as it came, so nobody else judges it."""
    if raw is None:
        return 0
    try:
        number = msgspec.json.decode(raw, type=float)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0
    return int(max(-_MOST_INT32, min(_MOST_INT32, number))) if math.isfinite(number) else 0
