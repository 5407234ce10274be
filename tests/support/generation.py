"""Many requests at once to an engine's native API, whose answers name every token."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from support.raw_link import RawLink
from support.real_engine import RealEngine
from tokenflow_engine.protocol import EngineStats, SetPolicy

__all__ = ["Answer", "Ask", "asks", "flush", "generate", "generate_all", "post", "use_policy"]

_TIMEOUT_S = 110.0
_TIMEOUT_EACH_S = 2.0
"""More for each request of a crowd."""
_SHARED = "the quick brown fox jumps over the lazy dog and runs away from everything " * 8


@dataclass(frozen=True)
class Ask:
    """One request."""

    text: str
    tokens: int
    top_logprobs: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came back."""

    tokens: list[int]
    finish: dict[str, Any]
    logprobs: list[tuple[float, int]]


def asks(count: int, *, seed: int) -> list[Ask]:
    """Requests of different lengths. Every second one shares a long prefix, every third wants logprobs."""
    dice = random.Random(seed)  # noqa: S311 - a test\'s dice
    return [
        Ask(
            text=(_SHARED if i % 2 else "") + f"request {i} says " + "import os " * dice.randint(1, 60),
            tokens=dice.randint(20, 110),
            top_logprobs=None if i % 3 else 2,
        )
        for i in range(count)
    ]


def post(
    engine: RealEngine, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = _TIMEOUT_S
) -> str:
    """One request to the engine's own API; its answer's text. HTTP errors are raised."""
    request = urllib.request.Request(  # noqa: S310
        engine.base_url + path,
        json.dumps(body or {}).encode(),
        {"Content-Type": "application/json"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
        text: str = answer.read().decode()
        return text


def generate(engine: RealEngine, rid: str, ask: Ask, *, timeout_s: float = _TIMEOUT_S) -> Answer:
    """Run one request to its end."""
    body: dict[str, Any] = {
        "rid": rid,
        "text": ask.text,
        "sampling_params": {
            "max_new_tokens": ask.tokens,
            "temperature": 0,
            "ignore_eos": True,
            **ask.sampling,
        },
    }
    if ask.top_logprobs is not None:
        body |= {"return_logprob": True, "top_logprobs_num": ask.top_logprobs}
    answer = json.loads(post(engine, "/generate", body, timeout_s=timeout_s))
    about = answer["meta_info"]
    pairs = [(value or 0.0, token) for value, token, _ in about.get("output_token_logprobs") or ()]
    return Answer(answer["output_ids"], about["finish_reason"], pairs)


def generate_all(
    engine: RealEngine, link: RawLink, wanted: Sequence[Ask], *, tag: str, announce: bool = False
) -> list[Answer]:
    """All of them at once, with the link kept alive; `announce` opens a stream for each."""
    timeout_s = _TIMEOUT_S + _TIMEOUT_EACH_S * len(wanted)
    with ThreadPoolExecutor(len(wanted)) as pool:
        rids = [f"{tag}-{i}" for i in range(len(wanted))]
        for rid in rids if announce else ():
            link.open(rid)
        futures = [
            pool.submit(generate, engine, rid, ask, timeout_s=timeout_s)
            for rid, ask in zip(rids, wanted, strict=True)
        ]
        link.listen_until(
            lambda: all(future.done() for future in futures), timeout_s=timeout_s, what=f"{tag} is done"
        )
        return [future.result() for future in futures]


def flush(engine: RealEngine) -> None:
    """Empty the prefix cache, so that nothing is answered from a run before."""
    post(engine, "/flush_cache")


def use_policy(link: RawLink, name: str) -> None:
    """Have the engine schedule by this policy, and wait until it does."""
    link.send(SetPolicy(policy=name))
    link.wait(lambda m: isinstance(m, EngineStats) and m.policy == name, what=f"policy {name}")
