"""Many cases on some cores, with a line now and then that says how far it is."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tokenflow_bench.cases import Case

__all__ = ["run_all"]

_SAY_EACH_S = 15.0


def run_all(cases: Sequence[Case], *, jobs: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The results in the order of the cases, equal for any number of `jobs`."""
    began = said = time.monotonic()
    results: list[dict[str, Any]] = []
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for result in pool.map(_run, cases) if jobs > 1 else map(_run, cases):
            results.append(result)
            now = time.monotonic()
            if now - said > _SAY_EACH_S:
                said = now
                left_s = (now - began) / len(results) * (len(cases) - len(results))
                say(f"{len(results)} of {len(cases)} runs, {left_s / 60:.1f} min to go at this pace")
    return results


def _run(case: Case) -> dict[str, Any]:
    try:
        return case.run()
    except Exception as error:
        error.add_note(f"in {case}")
        raise
