"""`tokenflow calibrate`: costs are found again in the tokens of an engine whose costs are known."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tokenflow_bench.burst.machine import costs_if_any
from tokenflow_bench.calibrate import runs
from tokenflow_bench.calibrate.fit import Costs, fit, fit_passes, mean_costs
from tokenflow_bench.calibrate.machine import calibrated, engine_facts, toml_entry
from tokenflow_bench.calibrate.passes import Pass, passes_of
from tokenflow_bench.costs import MACHINES, Machine, read_machines
from tokenflow_bench.load.driver import Client, Drive
from tokenflow_bench.load.log import StreamLog
from tokenflow_bench.load.overhead import Overhead
from tokenflow_bench.reading import Person
from tokenflow_bench.simulator import simulate
from tokenflow_engine.policy.registry import policy_named

KNOWN = replace(
    MACHINES["laptop-tiny"],
    step_base_s=0.020,
    step_per_stream_s=1.5e-3,
    step_per_context_token_s=1.2e-5,
    prefill_base_s=0.015,
    prefill_per_token_s=0.4e-3,
)


def logs_of(machine: Machine, *, seed: int, jitter_s: float, lost_s: float = 0.0) -> list[StreamLog]:
    """What a client sees of a ramp on `machine`; each token up to `jitter_s` late, some `lost_s` more."""
    rng = np.random.default_rng(seed)
    step_s = machine.decode_s(1, 50)
    work = runs.ramp(12, 32 if seed % 2 else 96, 128 if seed % 2 else 64, step_s=step_s, seed=seed)
    outcome = simulate(machine, work, policy_named("fcfs"), mixed=False)
    logs = []
    for row in range(len(work)):
        times = outcome.streams.token_s(row) + rng.uniform(0, jitter_s, int(work.output[row]))
        times += lost_s * (rng.random(len(times)) < 0.01)
        logs.append(
            StreamLog(
                index=row,
                due_s=float(work.arrived[row]),
                person=Person(float("inf")),
                output_tokens=int(work.output[row]),
                token_s=np.maximum.accumulate(times).tolist(),
                prompt_tokens=int(work.prompt[row]),
            )
        )
    return logs


def delayed(logs: list[StreamLog]) -> list[StreamLog]:
    """As if each pass's tokens were sent when the next pass is over."""
    ends = sorted({at for log in logs for at in log.token_s})
    later = dict(zip(ends, [*ends[1:], ends[-1] + 0.03], strict=True))
    return [replace(log, token_s=[later[at] for at in log.token_s]) for log in logs]


def held_back(logs: list[StreamLog], *, share: float) -> list[StreamLog]:
    """As if some tokens ended within a character: each comes with the next one, or the one after that."""
    rng = np.random.default_rng(3)
    seen = []
    for log in logs:
        times = list(log.token_s)
        for index in np.flatnonzero(rng.random(len(times) - 2) < share).tolist():
            times[index] = times[index + 1]
        seen.append(replace(log, token_s=np.maximum.accumulate(times).tolist()))
    return seen


def assert_known(costs: Costs, *, within: float) -> None:
    """In what a pass costs; single terms may trade off against each other."""
    found = calibrated(KNOWN, costs, name="found", source="", facts={})
    for batch, context in ((1, 60), (4, 500), (12, 1500)):
        assert found.decode_s(batch, context) == pytest.approx(KNOWN.decode_s(batch, context), rel=within)
    for tokens in (20, 100, 160):
        assert found.prefill_s(tokens) == pytest.approx(KNOWN.prefill_s(tokens), rel=within)


def test_known_costs_are_found() -> None:
    costs = fit([logs_of(KNOWN, seed=seed, jitter_s=0.0) for seed in (1, 2)])
    assert_known(costs, within=0.005)
    assert costs.step_per_stream_s == pytest.approx(KNOWN.step_per_stream_s, rel=0.02)
    assert costs.step_per_context_token_s == pytest.approx(KNOWN.step_per_context_token_s, rel=0.02)
    assert not costs.is_late
    assert costs.error < 0.01
    assert costs.prefills == 2 * 4  # not the first of a run, before which the engine was idle


def test_noise_and_hiccups_do_not_matter_much() -> None:
    seen = [logs_of(KNOWN, seed=seed, jitter_s=0.002, lost_s=0.05) for seed in (1, 2, 3, 4)]
    assert_known(fit(seen), within=0.1)


def test_tokens_that_come_a_pass_late_are_recognized() -> None:
    seen = [delayed(logs_of(KNOWN, seed=seed, jitter_s=0.0)) for seed in (1, 2)]
    costs = fit(seen)
    assert costs.is_late
    assert_known(costs, within=0.02)
    punctual = fit_passes([one for logs in seen for one in passes_of(logs, late=False)])
    assert punctual.error > 3 * costs.error  # so it is told by the error


@pytest.mark.parametrize("late", [False, True])
def test_tokens_that_are_held_back_belong_to_the_passes_before(late: bool) -> None:
    """A pass is not two because one of its tokens came with the next one's."""
    seen = [logs_of(KNOWN, seed=seed, jitter_s=0.0) for seed in (1, 2)]
    seen = [held_back(delayed(logs) if late else logs, share=0.03) for logs in seen]
    costs = fit(seen)
    assert costs.is_late == late
    assert costs.error < 0.02
    assert_known(costs, within=0.02)


def test_passes_with_a_held_token_by_hand() -> None:
    """The second stream's token of the second step comes with that of the third."""
    one = log(0, [0.0, 1.0, 2.0, 3.0, 4.0], prompt=10)
    two = log(1, [0.0, 1.0, 3.0, 3.0, 4.0], prompt=7)
    assert passes_of([one, two], late=False) == [
        Pass(pytest.approx(1.0), 2, 17 + 2 * index, 0) for index in (1, 2, 3, 4)
    ]


def test_passes_of_two_streams_by_hand() -> None:
    """One stream runs; another's prompt is prefilled between two of its tokens."""
    one = log(0, [0.0, 1.0, 2.0, 4.5, 5.6], prompt=10)
    two = log(1, [3.4, 4.51, 5.61], prompt=7)
    assert passes_of([one, two], late=False) == [
        Pass(pytest.approx(1.0), 1, 11, 0),
        Pass(pytest.approx(1.0), 1, 12, 0),
        Pass(pytest.approx(1.4), 0, 0, 7),
        Pass(pytest.approx(1.1), 2, 13 + 8, 0),
        Pass(pytest.approx(1.1), 2, 14 + 9, 0),
    ]


def test_between_two_fits_is_their_mean() -> None:
    """One that has it wrong whether tokens come late, which fits worse, does not count."""
    known = {"step_base_s": 1.0, "step_per_stream_s": 0.1, "step_per_context_token_s": 0.01}
    one = Costs(
        **known, prefill_base_s=2.0, prefill_per_token_s=0.2, error=0.1, passes=5, prefills=1, is_late=True
    )
    other = replace(one, step_base_s=3.0, error=0.2, passes=7)
    wrong = replace(one, step_base_s=99.0, error=0.3, is_late=False)
    found = mean_costs([one, other, wrong])
    assert (found.step_base_s, found.step_per_stream_s, found.passes) == (2.0, pytest.approx(0.1), 12)
    assert found.is_late
    assert mean_costs([one]) == one


def test_what_is_not_measurable_is_said() -> None:
    with pytest.raises(ValueError, match="how long prompts are"):
        passes_of([replace(log(0, [0.0, 1.0], prompt=1), prompt_tokens=None)], late=False)
    with pytest.raises(ValueError, match="no answer has two tokens"):
        passes_of([log(0, [0.0], prompt=1)], late=False)
    with pytest.raises(ValueError, match="too few"):
        fit_passes([Pass(1.0, 1, 1, 0)] * 100)


def test_costs_are_never_negative() -> None:
    passes = [Pass(1.0 - 1e-4 * number, 1 + number % 5, 100 * number, 0) for number in range(50)]
    costs = fit_passes([*passes, Pass(1.0, 0, 0, 10)])
    assert min(costs.step_base_s, costs.step_per_stream_s, costs.step_per_context_token_s) >= 0


def test_the_entry_is_a_machine(tmp_path: Path) -> None:
    costs = fit([logs_of(KNOWN, seed=seed, jitter_s=0.0) for seed in (1, 2)])
    machine = calibrated(
        MACHINES["4090"], costs, name='my "box"', source="tokenflow calibrate", facts={"kv_tokens": 4000}
    )
    path = tmp_path / "machines.toml"
    path.write_text(toml_entry(machine))
    read = read_machines(path)['my "box"']
    assert read.kv_tokens == 4000
    assert read.to_host_bytes_s == MACHINES["4090"].to_host_bytes_s
    assert read.decode_s(3, 300) == pytest.approx(machine.decode_s(3, 300), rel=1e-4)
    assert read.late_tokens is False
    late = calibrated(MACHINES["4090"], replace(costs, is_late=True), name="late", source="", facts={})
    path.write_text(toml_entry(late))
    assert read_machines(path)["late"].late_tokens is True


def test_an_engine_says_what_memory_it_has() -> None:
    info = {"page_size": 16, "max_total_tokens": None, "internal_states": [{"max_running_requests": 48}]}
    info["max_total_num_tokens"] = 5120
    with served({"/server_info": info}) as url:
        assert engine_facts(url) == {"kv_tokens": 5120, "page_tokens": 16, "max_running": 48}
    with served({"/admin/engines": {"engines": [{"kv_tokens": 1056}, {"kv_tokens": None}]}}) as url:
        assert engine_facts(url) == {"kv_tokens": 1056}
    with served({}) as url:
        assert engine_facts(url) == {}


class FakeEngine:
    """Streams words to all requests pass by pass, a prefill before a decode step, in known times."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, asyncio.Queue[int]]] = []
        self.running: list[asyncio.Queue[int]] = []

    async def passes(self) -> None:
        while True:
            if self.waiting:
                prompts, queues = zip(*self.waiting, strict=True)
                self.waiting = []
                await asyncio.sleep(0.02 + 1e-4 * sum(prompts))
                self.running += queues
                for queue in queues:
                    queue.put_nowait(1)
            if self.running:
                batch = list(self.running)
                await asyncio.sleep(0.012 + 0.001 * len(batch))
                for queue in batch:
                    queue.put_nowait(1)
            else:
                await asyncio.sleep(0.001)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["ignore_eos"]
        prompt = len(body["messages"][0]["content"].split())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        queue: asyncio.Queue[int] = asyncio.Queue()
        self.waiting.append((prompt, queue))
        for number in range(body["max_tokens"]):
            await queue.get()
            usage = {"prompt_tokens": prompt, "completion_tokens": number + 1}
            event = {"choices": [{"index": 0, "delta": {"content": "a "}}], "usage": usage}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        self.running.remove(queue)
        await response.write(b"data: [DONE]\n\n")
        return response


async def test_an_endpoint_is_calibrated_over_sockets() -> None:
    """Timers and a busy machine add to what passes take, so the bounds are wide."""
    engine, said = FakeEngine(), []
    app = web.Application()
    app.router.add_post("/v1/chat/completions", engine.answer)
    async with TestServer(app) as server:
        computing = asyncio.create_task(engine.passes())
        client = Client(url=str(server.make_url("")).rstrip("/"), model="m")
        costs = await runs.calibrate(
            client, kv_tokens=1056, max_running=48, seed=1, rounds=1, say=said.append, max_lag_ms=1000.0
        )
        computing.cancel()
    found = calibrated(KNOWN, costs, name="found", source="", facts={})
    assert 0.8 * 0.018 < found.decode_s(6, 300) < 2.0 * 0.018
    assert 0.7 * 0.03 < found.prefill_s(100) < 2.0 * 0.03
    assert costs.prefills >= 6
    assert "1 x 3 short runs" in said[0]


@pytest.mark.parametrize("late", [2, 3])
async def test_a_run_with_a_late_driver_is_done_again(monkeypatch: pytest.MonkeyPatch, late: int) -> None:
    """Twice late is no harm; the third time there is no calibration."""
    lags = iter([99.0] * late + [1.0] * 9)
    said: list[str] = []

    async def run(*_given: Any, **_named: Any) -> Drive:
        overhead = Overhead(lag_p50_ms=0, lag_p99_ms=next(lags), lag_max_ms=0, cpu_share=0, late_p99_ms=0)
        return Drive(logs=[], start_s=0.0, horizon_s=1.0, overhead=overhead, report_statuses={})

    async def probe(*_given: Any) -> float:
        return 0.01

    monkeypatch.setattr(runs, "_run", run)
    monkeypatch.setattr(runs, "_probe", probe)
    monkeypatch.setattr(runs, "fit", len)
    client = Client(url="http://127.0.0.1:1", model="m")
    calibrating = runs.calibrate(client, kv_tokens=1056, max_running=48, seed=1, rounds=1, say=said.append)
    if late < 3:
        assert await calibrating == 3
        assert sum("not to be used" in line for line in said) == 2
    else:
        with pytest.raises(RuntimeError, match="99 ms late"):
            await calibrating


def test_a_disturbed_calibration_is_done_again_and_then_given_up() -> None:
    costs = fit([logs_of(KNOWN, seed=seed, jitter_s=0.0) for seed in (1, 2)])
    said: list[str] = []
    answers: list[Costs | Exception] = [RuntimeError("others"), ValueError("few"), costs]

    def measure() -> Costs:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert costs_if_any(measure, say=said.append) == costs
    assert ["others; try 1 of 3" in said[0], "few; try 2 of 3" in said[1]] == [True, True]
    answers += [RuntimeError("others")] * 3
    assert costs_if_any(measure, say=said.append) is None
    answers += [OSError("the engine has gone")]
    with pytest.raises(OSError, match="gone"):
        costs_if_any(measure, say=said.append)


def log(index: int, times: list[float], *, prompt: int) -> StreamLog:
    return StreamLog(
        index=index,
        due_s=0.0,
        person=Person(1.0),
        output_tokens=len(times),
        token_s=times,
        prompt_tokens=prompt,
    )


@contextmanager
def served(pages: dict[str, Any]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = json.dumps(pages.get(self.path, {})).encode()
            self.send_response(200 if self.path in pages else 404)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
