"""Many cases on some cores, with a line now and then that says how far it is."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tokenflow_bench.cases import Case
from tokenflow_bench.kept import Kept

__all__ = ["run_all"]

_SAY_EACH_S = 15.0


def run_all(
    cases: Sequence[Case], *, jobs: int, say: Callable[[str], None], kept: Kept | None = None
) -> list[dict[str, Any]]:
    """The results in order of the cases, equal for any number of `jobs`; `kept` ones are not run again."""
    results = {case: kept.get(case) for case in cases} if kept else {}
    todo = [case for case in cases if results.get(case) is None]
    if len(todo) < len(cases):
        say(f"{len(cases) - len(todo)} of them are done already")
    began = said = time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        ran = pool.map(_run, todo) if jobs > 1 else map(_run, todo)
        for done, (case, result) in enumerate(zip(todo, ran, strict=True), start=1):
            results[case] = result
            if kept is not None:
                kept.add(case, result)
            now = time.monotonic()
            if now - said > _SAY_EACH_S:
                said = now
                left_s = (now - began) / done * (len(todo) - done)
                say(f"{done} of {len(todo)} runs, {left_s / 60:.1f} min to go at this pace")
    return [found for case in cases if (found := results[case]) is not None]


def _run(case: Case) -> dict[str, Any]:
    try:
        return case.run()
    except Exception as error:
        error.add_note(f"in {case}")
        raise
