"""A policy and its options as one word: `adaptive`, `adaptive:write_s=0,least_s=1`."""

from __future__ import annotations

__all__ = ["spelled"]


def spelled(text: str) -> tuple[str, dict[str, float]]:
    """Name and options. Raises `ValueError` for an option that is no number."""
    name, _, given = text.partition(":")
    return name, dict(_option(pair) for pair in given.split(",") if pair)


def _option(pair: str) -> tuple[str, float]:
    option, _, value = pair.partition("=")
    try:
        return option.strip(), _number(value)
    except ValueError:
        raise ValueError(f"{pair.strip()!r} is not an option and its value, such as write_s=0.5") from None


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() and "." not in text else value
