"""Service classes: who counts for how much, and what was promised."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["ONE_CLASS", "Sla", "parse_sla"]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_YES_NO = {"yes": True, "no": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sla:
    """One class of a mix."""

    name: str
    share: float = 1.0
    """Of the requests; shares are taken relative to their sum."""
    weight: float = 1.0
    """What a token of this class is worth to a policy."""
    ttft_target_s: float = 1.0
    """Within which the first token of a good stream comes."""
    rate: float | None = None
    """Tokens a second that all of its readers read; None: as the workload draws them."""
    may_park: bool = True
    """Its streams may be preempted."""

    def __post_init__(self) -> None:
        """Raises `ValueError` for what cannot be."""
        for name in ("share", "weight", "ttft_target_s", "rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"class {self.name!r}: {name} must be more than 0, not {value:g}")


ONE_CLASS = Sla(name="all")
"""Where there are no classes."""


def parse_sla(text: str) -> Sla:
    """``name:share[,weight=..][,ttft=seconds][,rate=tokens/s][,park=yes|no]``. Raises `ValueError`."""
    name, _, rest = text.partition(":")
    share, *options = rest.split(",")
    given: dict[str, str] = {}
    for option in options:
        key, has_value, value = option.partition("=")
        if not has_value or key not in {"weight", "ttft", "rate", "park"}:
            raise ValueError(f"{text!r}: {option!r} is none of weight=, ttft=, rate=, park=")
        given[key] = value
    park = given.get("park", "yes")
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{text!r}: a class needs a name of letters, digits, '-' and '_'")
    if park not in _YES_NO:
        raise ValueError(f"{text!r}: park is yes or no")
    try:
        return Sla(
            name=name,
            share=float(share),
            weight=float(given.get("weight", "1")),
            ttft_target_s=float(given.get("ttft", "1")),
            rate=float(given["rate"]) if "rate" in given else None,
            may_park=_YES_NO[park],
        )
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from error
