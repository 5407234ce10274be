"""Is KV moved right, and how fast: checks of `tokenflow_engine.kv` on a GPU, or without one.

    python tests/gpu/check_kv.py                      # a GPU: needs torch, 16 GB on it and as much memory
    python tests/gpu/check_kv.py --device cpu         # the CPU's backend, small
    python tests/gpu/check_kv.py --device simulated   # the GPU's backend, on streams that are simulated

Every check that a wait is there runs without it too, and must then fail. Exits with 1 if anything did.
"""

# ruff: noqa: T201 - a table is what this prints

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "engine_plugin"))

from kv_bench import LLAMA_3_8B, LOAD, TINY, WRITE, Bench
from kv_faults import (
    corrupt_copy,
    failed_copy_is_not_saved,
    failing_copy,
    faulty_backend,
    proof,
    too_much_memory,
)
from kv_right import engine_like, one_kernel, round_trip
from kv_speed import rate, slowdown
from kv_waits import (
    loaded_while_read,
    many_loads,
    many_writes,
    plain_write,
    reused_while_read,
    slots_reused_too_early,
    slow_forward_then_load,
    slow_forward_then_write,
    wait_is_there,
)


def checks(device: str) -> list[tuple[str, Callable[[Bench], str]]]:
    def bind(function: Callable[..., str], **options: Any) -> Callable[[Bench], str]:
        return lambda bench: function(bench, **options)

    common = [
        ("round trip, device pages of 1", bind(round_trip, page=1)),
        ("round trip, device pages of 16", bind(round_trip, page=16)),
        ("engine-like loop, device pages of 1", bind(engine_like, page=1)),
        ("engine-like loop, device pages of 16", bind(engine_like, page=16)),
        ("a backend proves itself", proof),
        ("a faulty backend does not", faulty_backend),
        ("corrupt host copy is not loaded", corrupt_copy),
        ("failing write is reported", bind(failing_copy, direction=WRITE)),
        ("failing load is reported", bind(failing_copy, direction=LOAD)),
        ("failing write keeps its slots", failed_copy_is_not_saved),
        ("too little memory is said", too_much_memory),
    ]
    kernel = ("one kernel for all layers", one_kernel)
    speed = [
        ("rate, host pages of 16", bind(rate, host_page=16)),
        ("slowdown, link busy", bind(slowdown, budget=1.0)),
        ("slowdown, 10 % of the time", bind(slowdown, budget=0.1)),
    ]
    if device == "cpu":
        return [*common, kernel, ("slots are not reused too early", slots_reused_too_early), *speed]
    situations = [
        ("forward", slow_forward_then_write),
        ("forward", slow_forward_then_load),
        ("reuse", reused_while_read),
        ("reuse", loaded_while_read),
        ("staging", many_writes),
        ("staging", many_loads),
    ]
    if device == "simulated":  # a real one would read from slots that do not exist
        situations.append(("indices", plain_write))
    waits = [
        (f"wait '{omit}': {situation.__name__}", bind(wait_is_there, omit=omit, situation=situation))
        for omit, situation in situations
    ]
    if device == "simulated":
        return [*common, *waits]
    return [
        *common,
        kernel,
        ("round trip, layer by layer", bind(round_trip, page=1, fused=False)),
        *waits,
        *speed,
        ("rate, host pages of 64", bind(rate, host_page=64)),
        ("rate, layer by layer", bind(rate, host_page=64, fused=False)),
    ]


def run(device: str, *, rates: bool, as_json: bool) -> bool:
    bench = Bench(device, LLAMA_3_8B if device == "cuda" else TINY)
    sound = True
    for name, check in checks(device):
        if name.startswith(("rate", "slowdown")) and not rates:
            continue
        started = time.perf_counter()
        try:
            passed, said = True, check(bench)
        except Exception as error:  # noqa: BLE001 - the other checks go on
            passed, said = False, f"{type(error).__name__}: {error}"
            traceback.print_exc()
        sound &= passed
        seconds = time.perf_counter() - started
        if as_json:
            print(json.dumps({"check": name, "passed": passed, "said": said}), flush=True)
        else:
            print(f"{'ok  ' if passed else 'FAIL'}  {name:<42} {seconds:6.1f} s  {said}", flush=True)
    return sound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu", "simulated"], default="cuda")
    parser.add_argument("--no-rates", dest="rates", action="store_false", help="only whether all is right")
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here; --device cpu tries the script itself")
    sys.exit(0 if run(options.device, rates=options.rates, as_json=options.json) else 1)


if __name__ == "__main__":
    main()
