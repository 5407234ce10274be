"""One run: continuous batching pass by pass, a policy that is asked on events, readers that read.

A pass is a decode step over the running batch, a prefill of one or more prompts in chunks, or both (`mixed`,
SGLang's `--enable-mixed-chunk`). Left out: sampling, prefix caching, the time a plan takes (measured by
`bench_policy.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenflow_bench.costs import Machine
from tokenflow_bench.simulator.device import Device, Event, Events, Step
from tokenflow_bench.simulator.stock import Reserve
from tokenflow_bench.simulator.streams import DONE, Rows, Streams
from tokenflow_bench.workload import Workload
from tokenflow_engine.policy.base import EngineView, Phase, Plan, Policy
from tokenflow_engine.policy.lengths import expected_output
from tokenflow_engine.policy.rows import paged

__all__ = ["Outcome", "Part", "Sample", "simulate"]

# Plain numbers: looking up a member of an enumeration costs as much as a small array operation.
_WAITING, _RUNNING, _PREFILLING, _PARKED, _LOADING = (
    int(phase) for phase in (Phase.WAITING, Phase.RUNNING, Phase.PREFILLING, Phase.PARKED, Phase.LOADING)
)

_CONSTANT = ("arrived", "max_output", "machine", "weight", "ttft_target", "may_park")
_MOST_PREFILL = 16384
"""SGLang's `--max-prefill-tokens`."""
_IDLE_S = 0.001


class Part(StrEnum):
    """What a run can be without."""

    OFFLOAD = "offload"
    """The host tier: who leaves loses its KV, and its context is prefilled again."""
    WRITES = "writes"
    """Write-through: KV goes to the host when its stream leaves, all of it, and not before."""
    OVERLAP = "overlap"
    """Copies beside each other and beside passes: loads and evictions wait for one another, and the next pass
    for all of them."""
    REPORTS = "reports"
    """Knowledge of readers: pauses and changes of pace go unnoticed, everybody counts as reading at its rate.
    """


@dataclass(frozen=True, slots=True)
class Sample:
    """The engine at one time: streams by place, and the share of KV memory that is taken."""

    at_s: float
    running: int
    waiting: int
    """Newcomers and whose KV was dropped."""
    preempted: int
    """Parked, in host memory, or on the way back."""
    kv_share: float


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
    samples: list[Sample] = field(default_factory=list)


def simulate(
    machine: Machine,
    workload: Workload,
    policy: Policy,
    *,
    mixed: bool = True,
    without: Collection[Part] = (),
    max_resident: int | None = None,
    mean_output: float | None = None,
    until_s: float = float("inf"),
    sample_s: float = float("inf"),
) -> Outcome:
    """Run `workload` until all have finished, or until `until_s`.

    `mean_output`: what history says of lengths (by default the truth). `max_resident`: rows of the engine's
    request table (by default as many as `max_running`, as SGLang has it). `sample_s`: keep a sample about so
    often.
    """
    if Part.OFFLOAD in without:
        machine = replace(machine, host_tokens=0)
    expected = float(workload.output.mean()) if mean_output is None else mean_output
    resident = max_resident or machine.max_running
    run = _Run(machine, workload, policy, mixed, frozenset(without), resident, expected, sample_s)
    return run.run(until_s)


@dataclass(slots=True)
class _Pass:
    decode: Step
    chunks: list[tuple[int, int]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Known:
    """What a view says of the live streams that never changes, gathered when one comes or goes."""

    live: Rows
    names: list[str]
    prompt: Rows
    rate: NDArray[np.float64]
    columns: dict[str, NDArray[Any]]
    """Those that policies get as they are, by their names in the view."""

    @classmethod
    def of(cls, live: Rows, work: Workload, names: NDArray[np.object_]) -> _Known:
        """`names`: of all rows."""
        columns = {name: getattr(work, name)[live] for name in _CONSTANT}
        columns["lead_cap"] = np.full(len(live), np.inf)
        for column in columns.values():
            column.flags.writeable = False
        return cls(live, names[live].tolist(), work.prompt[live], work.rate[live], columns)


class _Run:
    def __init__(
        self,
        machine: Machine,
        workload: Workload,
        policy: Policy,
        mixed: bool,
        without: frozenset[Part],
        max_resident: int,
        mean_output: float,
        sample_s: float,
    ) -> None:
        # As SGLang does on arrival: nobody may ask for more than an empty pool could hold.
        longest = machine.kv_tokens - workload.prompt - 2 * machine.page_tokens
        workload = replace(workload, max_output=np.minimum(workload.max_output, longest))
        self.machine, self.workload, self.policy = machine, workload, policy
        self.mixed, self.max_resident, self.mean_output = mixed, max_resident, mean_output
        self.streams = Streams(workload)
        self.without, self.sample_s = without, sample_s
        self.samples: list[Sample] = []
        self.sample_at = 0.0
        self.spans: list[tuple[float, float]] = []
        """When each pass began and ended."""
        self.events = Events()
        self.device = Device(machine, self.streams, self.events, overlap=Part.OVERLAP not in without)
        self.reserve = Reserve()
        self.plan = Plan(stock=True)
        self.paces: list[tuple[float, int, float]] = []
        """A heap of what started readers will do: when, row, factor of their rate from then on."""
        self.queue: list[int] = []
        """Waiting rows in the engine's own order."""
        self.writing = nobody = self.streams.live()
        self.no_step = self.device.step(nobody)
        self.names = np.array([str(row) for row in range(len(workload))], dtype=object)
        self.known = _Known.of(nobody, workload, self.names)
        self.now = 0.0
        self.finished = self.plans = self.passes = self.emergencies = 0
        self.last_was_prefill = False
        self.is_full = False
        """SGLang's `batch_is_full`: a newcomer did not fit, and nobody has left the batch since."""
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
            step = self._step()
            if self.changed or self.now >= self.plan.next_at or self._is_short_of(step):
                self._decide()
                step = self._step()
            work = self._next_pass(step)
            if work.seconds:
                self._execute(work)
            else:
                self.reserve.reset()
                pace_at = self.paces[0][0] if self.paces else float("inf")
                later = min(self.events.next_at(), self.plan.next_at, pace_at)
                assert later < float("inf"), "somebody waits, and nothing is ever to happen"
                self.now = max(later, self.now + _IDLE_S)
                self._change_paces()
        self.device.check_integrity()
        if self.machine.late_tokens and self.spans:
            begins, ends = np.array(self.spans).T
            self.streams.send_late(begins, ends)
        return Outcome(
            streams=self.streams,
            duration_s=self.now,
            bytes_moved=self.device.copies.bytes_moved,
            plans=self.plans,
            passes=self.passes,
            retractions=self.device.retractions,
            emergencies=self.emergencies,
            samples=self.samples,
        )

    def _step(self) -> Step:
        """A decode step of the whole batch."""
        return self.device.step(self.streams.rows(_RUNNING))

    def _is_short_of(self, step: Step) -> bool:
        """The plan in force leaves no memory for it: plan again, before the engine retracts."""
        return not self.plan.stock and step.tokens > self.device.free

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
            else:
                streams.move(row, Phase.RUNNING, now=self.now)

    def _change_paces(self) -> None:
        """Readers who pause, go on, read faster or more slowly by now."""
        while self.paces and self.paces[0][0] <= self.now:
            at, row, factor = heapq.heappop(self.paces)
            if self.streams.phase[row] != DONE:
                self.streams.set_factor(row, factor, now=at)
                self.changed = True

    def _decide(self) -> None:
        streams = self.streams
        live = streams.live()
        if self.known.live is not live:
            self.known = _Known.of(live, self.workload, self.names)
        self.plan = self.policy.plan(self._view(self.known), self.known.names)
        self.plans += 1
        self.changed = False
        self.device.apply(self.plan, live, now=self.now)
        self.writing = live[self.plan.write] if Part.WRITES not in self.without else live[:0]
        if Part.OVERLAP in self.without:
            self.now = max(self.now, self.device.copies.idle_at)
        waiting = streams.rows(_WAITING).tolist()
        if waiting != self.queue:
            held, known = set(waiting), set(self.queue)
            self.queue = [row for row in self.queue if row in held]
            self.queue += [row for row in waiting if row not in known]

    def _view(self, known: _Known) -> EngineView:
        streams, machine, live = self.streams, self.machine, known.live
        phase = streams.phase[live]
        generated = streams.generated[live]
        context = known.prompt + generated
        here = (phase == _RUNNING) | (phase == _PARKED)
        factor = streams.factor[live]
        rate = known.rate * np.where(factor > 0, factor, 1.0)
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
            mean_output=expected_output(generated, streams.ended, prior_tokens=self.mean_output),
            phase=phase,
            prefill=streams.to_prefill[live],
            context=context,
            owned=np.where(here, streams.held[live], 0),
            synced=np.where(here, np.minimum(streams.synced[live], context), 0),
            generated=generated,
            buffered=streams.unread(live, now=self.now),
            rate=rate,
            rate_low=rate,
            rate_high=rate,
            paused=factor == 0,
            since=streams.since[live],
            preemptions=streams.preemptions[live],
            **known.columns,
        )

    # Passes.

    def _next_pass(self, step: Step) -> _Pass:
        """`step`: of all that run."""
        decoded_last = not self.last_was_prefill
        # Without mixed passes the engine prefills whenever it can; under a plan a decode step goes between.
        may_prefill = self.mixed or self.plan.stock or decoded_last or not len(step.rows)
        work = _Pass(decode=self.no_step)
        if may_prefill:
            work.chunks = self._chunks(step)
        if self.mixed or not work.chunks:
            work.decode = self._decodable(step)
        if len(work.decode.rows):
            work.seconds += self.machine.decode_s(len(work.decode.rows), float(work.decode.context))
        if work.chunks:
            prefill_s = self.machine.prefill_s(sum(tokens for _, tokens in work.chunks))
            # One pass has one base: a mixed one adds only its tokens to the decode step.
            work.seconds += prefill_s - (self.machine.prefill_base_s if len(work.decode.rows) else 0.0)
        self.last_was_prefill = bool(work.chunks)
        return work

    def _decodable(self, step: Step) -> Step:
        """The running batch, less whom the engine has to retract for memory."""
        retracted = False
        while step.tokens > self.device.free:
            if not self.plan.stock and not retracted:
                self.emergencies += 1
            row = int(Reserve.retraction_order(self.streams, step.rows)[0])
            self.device.retract(row, now=self.now)
            self.queue.append(row)
            step = self.device.step(step.rows[step.rows != row])
            retracted = self.changed = True
            self.is_full = False
        if retracted and len(step.rows):
            self.reserve.retracted(self.streams, step.rows)
        elif len(step.rows):
            self.reserve.decoded()
        return step

    def _chunks(self, step: Step) -> list[tuple[int, int]]:
        """Which prompts to prefill, and how many tokens of each; their pages are taken."""
        running = step.rows
        chunk = self.machine.chunk_tokens - (len(running) if self.mixed else 0)
        if not self.plan.stock and self.plan.prefill_tokens is not None:
            chunk = min(chunk, self.plan.prefill_tokens)
        keep = step.tokens if self.mixed else 0
        chunks: list[tuple[int, int]] = []
        for row in self.streams.rows(_PREFILLING).tolist():
            tokens = min(self.streams.to_prefill.item(row), chunk, self.device.free - keep - 1)
            if tokens > 0:
                chunk -= self._take(row, tokens, chunks)
        admit = self._stock_admission if self.plan.stock else self._planned_admission
        admit(running, chunk, keep, chunks)
        return chunks

    def _stock_admission(self, running: Rows, chunk: int, keep: int, chunks: list[tuple[int, int]]) -> None:
        """The engine's own: in order of its queue until one does not fit; then not before somebody leaves."""
        streams, page = self.streams, self.machine.page_tokens
        room = self.reserve.room(streams, running, free=self.device.free) - keep
        room -= sum(Reserve.most_output(streams, row) + page for row, _ in chunks)
        batch = len(running) + len(chunks) + len(streams.rows(_LOADING))
        if self.is_full and batch:
            return
        most = _MOST_PREFILL
        for row in list(self.queue):
            extend = int(streams.to_prefill[row])
            total = extend + Reserve.most_output(streams, row) + page
            if min(chunk, most) <= 0:
                return
            if batch >= self.machine.max_running or total >= room:
                self.is_full = batch > 0
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
        batch = len(running) + len(streams.rows(_PREFILLING)) + len(streams.rows(_LOADING))
        resident = batch + len(streams.rows(_PARKED))
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
        self.spans.append((self.now, until))
        if self.now >= self.sample_at:
            self._sample()
        device.take(work.decode)
        prefilled = [row for row, _ in work.chunks if not streams.to_prefill[row]]
        if len(self.writing):
            device.write_ahead(self.writing, now=self.now, until=until)
        self.now = until
        self._change_paces()
        whole = streams.generate(work.decode.rows, now=until).tolist()
        for row in prefilled:
            whole += self._first_token(row)
        for row in whole:
            device.finish(row, now=until)
            self.finished += 1
            self.changed = True
            self.is_full = False

    def _first_token(self, row: int) -> list[int]:
        """A prefill is done: it gives one token, the first or the next after its KV was dropped.

        The row, if that was its last.
        """
        streams = self.streams
        if not streams.generated[row] and self.workload.spans and Part.REPORTS not in self.without:
            for after_s, factor in self.workload.person(row).changes():
                heapq.heappush(self.paces, (self.now + after_s, row, factor))
        whole: list[int] = streams.generate(np.array([row]), now=self.now).tolist()
        streams.move(row, Phase.RUNNING, now=self.now)
        return whole

    def _sample(self) -> None:
        streams, device = self.streams, self.device
        running, waiting = len(streams.rows(_RUNNING)), len(streams.rows(_WAITING))
        prefilling = len(streams.rows(_PREFILLING))
        self.samples.append(
            Sample(
                self.now,
                running + prefilling,
                waiting,
                len(streams.live()) - running - prefilling - waiting,
                1.0 - device.free / device.free_at_most,
            )
        )
        self.sample_at = self.now + self.sample_s
