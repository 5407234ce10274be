"""One run: continuous batching pass by pass, a policy that is asked on events, readers that read.

A pass is a decode step over the running batch, a prefill of one or more prompts in chunks, or both (`mixed`,
SGLang's `--enable-mixed-chunk`). Left out: sampling, prefix caching, the time a plan takes (measured by
`bench_policy.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from tokenflow_bench.costs import Machine
from tokenflow_bench.simulator.device import Device, Event, Events
from tokenflow_bench.simulator.stock import Reserve
from tokenflow_bench.simulator.streams import DONE, Rows, Streams
from tokenflow_bench.workload import Workload
from tokenflow_engine.policy.base import EngineView, Phase, Plan, Policy
from tokenflow_engine.policy.lengths import expected_output
from tokenflow_engine.policy.rows import paged

__all__ = ["Outcome", "simulate"]

_MOST_PREFILL = 16384
"""SGLang's `--max-prefill-tokens`."""
_IDLE_S = 0.001


@dataclass(slots=True)
class Outcome:
    """What happened: the streams' columns, and what it took."""

    streams: Streams
    duration_s: float
    bytes_moved: int
    plans: int
    passes: int
    retractions: int
    """Streams whose KV was dropped and computed again."""
    emergencies: int
    """Decode steps for which a policy other than the stock one had left no memory."""


def simulate(
    machine: Machine,
    workload: Workload,
    policy: Policy,
    *,
    mixed: bool = True,
    max_resident: int | None = None,
    mean_output: float | None = None,
    until_s: float = float("inf"),
) -> Outcome:
    """Run `workload` until all have finished, or until `until_s`.

    `mean_output`: what history says of lengths (by default the truth). `max_resident`: rows of the engine's
    request table (by default as many as `max_running`, as SGLang has it).
    """
    expected = float(workload.output.mean()) if mean_output is None else mean_output
    return _Run(machine, workload, policy, mixed, max_resident or machine.max_running, expected).run(until_s)


@dataclass(slots=True)
class _Pass:
    decode: Rows
    chunks: list[tuple[int, int]] = field(default_factory=list)
    seconds: float = 0.0


class _Run:
    def __init__(
        self,
        machine: Machine,
        workload: Workload,
        policy: Policy,
        mixed: bool,
        max_resident: int,
        mean_output: float,
    ) -> None:
        # As SGLang does on arrival: nobody may ask for more than an empty pool could hold.
        longest = machine.kv_tokens - workload.prompt - 2 * machine.page_tokens
        workload = replace(workload, max_output=np.minimum(workload.max_output, longest))
        self.machine, self.workload, self.policy = machine, workload, policy
        self.mixed, self.max_resident, self.mean_output = mixed, max_resident, mean_output
        self.streams = Streams(workload)
        self.events = Events()
        self.device = Device(machine, self.streams, self.events)
        self.reserve = Reserve()
        self.plan = Plan(stock=True)
        self.queue: list[int] = []
        """Waiting rows in the engine's own order."""
        self.writing: list[int] = []
        self.now = 0.0
        self.finished = self.plans = self.passes = self.emergencies = 0
        self.last_was_prefill = False
        self.changed = True
        for row, at in enumerate(workload.arrived.tolist()):
            self.events.add(at, Event.ARRIVED, row)

    # What policies ask of the engine's costs, at `now`.

    turn_s = 0.0

    def decode_s(self, batch: int, context_tokens: float) -> float:
        return self.machine.decode_s(batch, context_tokens)

    def prefill_s(self, tokens: float) -> float:
        return self.machine.prefill_s(tokens)

    def load_s(self, tokens: float) -> float:
        return self.device.copies.load_s(tokens, now=self.now)

    def evict_s(self, tokens: float) -> float:
        return self.device.copies.evict_s(tokens, now=self.now)

    def run(self, until_s: float) -> Outcome:
        while self.finished < len(self.workload) and self.now < until_s:
            self._happen()
            if self.changed or self.now >= self.plan.next_at or self._memory_is_short():
                self._decide()
            work = self._next_pass()
            if work.seconds:
                self._execute(work)
            else:
                self.reserve.reset()
                later = min(self.events.next_at(), self.plan.next_at)
                assert later < float("inf"), "somebody waits, and nothing is ever to happen"
                self.now = max(later, self.now + _IDLE_S)
        self.device.check_integrity()
        return Outcome(
            streams=self.streams,
            duration_s=self.now,
            bytes_moved=self.device.copies.bytes_moved,
            plans=self.plans,
            passes=self.passes,
            retractions=self.device.retractions,
            emergencies=self.emergencies,
        )

    def _memory_is_short(self) -> bool:
        """The plan in force leaves no memory for the next step: plan again, before the engine retracts."""
        return not self.plan.stock and self.device.growth(self.streams.rows(Phase.RUNNING)) > self.device.free

    def _happen(self) -> None:
        """All that was due by now."""
        streams = self.streams
        while self.events.next_at() <= self.now:
            event, row, tokens = self.events.pop()
            if event is Event.ARRIVED:
                streams.to_prefill[row] = self.workload.prompt[row]
                streams.move(row, Phase.WAITING, now=self.now)
                self.queue.append(row)
                self.changed = True
            elif event is Event.EVICTED:
                self.device.evicted(row, tokens)
            elif event is Event.LOADED:
                streams.move(row, Phase.RUNNING, now=self.now)
            else:
                streams.read(np.array([row]), now=self.now)
                streams.paused[row] = event is Event.PAUSED
                self.changed = True

    def _decide(self) -> None:
        streams = self.streams
        live = streams.live()
        streams.read(live, now=self.now)
        names = [str(row) for row in live.tolist()]
        self.plan = self.policy.plan(self._view(live), names)
        self.plans += 1
        self.changed = False
        self.device.apply(self.plan, live, now=self.now)
        self.writing = live[self.plan.write].tolist()
        waiting = set(streams.rows(Phase.WAITING).tolist())
        known = set(self.queue)
        self.queue = [row for row in self.queue if row in waiting]
        self.queue += [row for row in sorted(waiting) if row not in known]

    def _view(self, live: Rows) -> EngineView:
        streams, work, machine = self.streams, self.workload, self.machine
        phase = streams.phase[live]
        context = streams.context(live)
        here = (phase == Phase.RUNNING) | (phase == Phase.PARKED)
        rate = work.rate[live]
        ended = work.output[streams.phase == DONE]
        return EngineView(
            now=self.now,
            kv_tokens=machine.kv_tokens,
            kv_free=self.device.free,
            kv_freeing=self.device.freeing,
            max_running=machine.max_running,
            max_resident=self.max_resident,
            page_tokens=machine.page_tokens,
            mixed=self.mixed,
            host_free=self.device.host_free,
            costs=self,
            mean_output=expected_output(
                streams.generated[live],
                ended_tokens=float(ended.sum()),
                ended=len(ended),
                prior_tokens=self.mean_output,
            ),
            phase=phase,
            arrived=work.arrived[live],
            prefill=streams.to_prefill[live],
            context=context,
            owned=np.where(here, streams.held[live], 0),
            synced=np.where(here, np.minimum(streams.synced[live], context), 0),
            generated=streams.generated[live],
            max_output=work.max_output[live],
            buffered=streams.generated[live] - streams.consumed[live],
            rate=rate,
            rate_low=rate,
            rate_high=rate,
            paused=streams.paused[live],
            machine=work.machine[live],
            weight=work.weight[live],
            ttft_target=work.ttft_target[live],
            may_park=np.ones(len(live), dtype=bool),
            since=streams.since[live],
            preemptions=streams.preemptions[live],
        )

    # Passes.

    def _next_pass(self) -> _Pass:
        running = self.streams.rows(Phase.RUNNING)
        decoded_last = not self.last_was_prefill
        # Without mixed passes the engine prefills whenever it can; under a plan a decode step goes between.
        may_prefill = self.mixed or self.plan.stock or decoded_last or not len(running)
        work = _Pass(decode=running[:0])
        if may_prefill:
            work.chunks = self._chunks(running)
        if self.mixed or not work.chunks:
            work.decode = self._decodable(running, reserved=0)
        if len(work.decode):
            context = float(self.streams.context(work.decode).sum())
            work.seconds += self.machine.decode_s(len(work.decode), context)
        if work.chunks:
            prefill_s = self.machine.prefill_s(sum(tokens for _, tokens in work.chunks))
            # One pass has one base: a mixed one adds only its tokens to the decode step.
            work.seconds += prefill_s - (self.machine.prefill_base_s if len(work.decode) else 0.0)
        self.last_was_prefill = bool(work.chunks)
        return work

    def _decodable(self, running: Rows, *, reserved: int) -> Rows:
        """The running batch, less whom the engine has to retract for memory."""
        retracted = False
        while len(running) and self.device.growth(running) > self.device.free:
            if not self.plan.stock and not retracted:
                self.emergencies += 1
            row = int(Reserve.retraction_order(self.streams, running)[0])
            self.device.retract(row, now=self.now)
            self.queue.append(row)
            running = running[running != row]
            retracted = self.changed = True
        if retracted and len(running):
            self.reserve.retracted(self.streams, running)
        elif len(running):
            self.reserve.decoded()
        return running

    def _chunks(self, running: Rows) -> list[tuple[int, int]]:
        """Which prompts to prefill, and how many tokens of each; their pages are taken."""
        chunk = self.machine.chunk_tokens - (len(running) if self.mixed else 0)
        if not self.plan.stock and self.plan.prefill_tokens is not None:
            chunk = min(chunk, self.plan.prefill_tokens)
        keep = self.device.growth(running) if self.mixed else 0
        chunks: list[tuple[int, int]] = []
        for row in self.streams.rows(Phase.PREFILLING).tolist():
            tokens = min(int(self.streams.to_prefill[row]), chunk, self.device.free - keep - 1)
            if tokens > 0:
                chunk -= self._take(row, tokens, chunks)
        admit = self._stock_admission if self.plan.stock else self._planned_admission
        admit(running, chunk, keep, chunks)
        return chunks

    def _stock_admission(self, running: Rows, chunk: int, keep: int, chunks: list[tuple[int, int]]) -> None:
        """The engine's own: in order of its queue until one does not fit."""
        streams, page = self.streams, self.machine.page_tokens
        room = self.reserve.room(streams, running, free=self.device.free) - keep
        room -= sum(Reserve.most_output(streams, row) + page for row, _ in chunks)
        batch = len(running) + len(chunks) + len(streams.rows(Phase.LOADING))
        most = _MOST_PREFILL
        for row in list(self.queue):
            extend = int(streams.to_prefill[row])
            total = extend + Reserve.most_output(streams, row) + page
            if batch >= self.machine.max_running or min(chunk, most) <= 0 or total >= room:
                return
            tokens = min(extend, chunk)
            self.queue.remove(row)
            batch += 1
            room -= total if tokens == extend else tokens + page
            most -= tokens
            chunk -= self._take(row, tokens, chunks)

    def _planned_admission(self, running: Rows, chunk: int, keep: int, chunks: list[tuple[int, int]]) -> None:
        """The plan's: in its order, as far as the pass and memory allow."""
        streams = self.streams
        batch = len(running) + len(streams.rows(Phase.PREFILLING)) + len(streams.rows(Phase.LOADING))
        resident = batch + len(streams.rows(Phase.PARKED))
        while self.device.granted and chunk > 0:
            row = self.device.granted[0]
            extend = int(streams.to_prefill[row])
            fits = paged(extend + 1, self.machine.page_tokens) + keep <= self.device.free
            if not fits or batch >= self.machine.max_running or resident >= self.max_resident:
                return
            self.device.granted.pop(0)
            self.queue.remove(row)
            batch, resident = batch + 1, resident + 1
            chunk -= self._take(row, min(extend, chunk), chunks)

    def _take(self, row: int, tokens: int, chunks: list[tuple[int, int]]) -> int:
        if self.streams.phase[row] == Phase.WAITING:
            self.streams.move(row, Phase.PREFILLING, now=self.now)
        context = int(self.streams.work.prompt[row] + self.streams.generated[row])
        self.device.grow(row, context - int(self.streams.to_prefill[row]) + tokens)
        self.streams.to_prefill[row] -= tokens
        chunks.append((row, tokens))
        return tokens

    def _execute(self, work: _Pass) -> None:
        streams, device = self.streams, self.device
        until = self.now + work.seconds
        self.passes += 1
        device.grow_by_one(work.decode)
        prefilled = np.array([row for row, _ in work.chunks if not streams.to_prefill[row]], dtype=np.int64)
        device.write_ahead(self.writing, now=self.now, until=until)
        self.now = until
        streams.generate(work.decode, now=until)
        for row in prefilled.tolist():
            self._first_token(row)
        for row in work.decode[streams.generated[work.decode] >= self.workload.output[work.decode]].tolist():
            device.finish(row, now=until)
            self.finished += 1
            self.changed = True

    def _first_token(self, row: int) -> None:
        """A prefill is done: it gives one token, the first or the next after its KV was dropped."""
        streams = self.streams
        if not streams.generated[row] and self.workload.pauses:
            for begin, end in self.workload.pauses[row]:
                self.events.add(self.now + begin, Event.PAUSED, row)
                self.events.add(self.now + end, Event.RESUMED, row)
        streams.generate(np.array([row]), now=self.now)
        streams.move(row, Phase.RUNNING, now=self.now)
        if streams.generated[row] >= self.workload.output[row]:
            self.device.finish(row, now=self.now)
            self.finished += 1
            self.changed = True
