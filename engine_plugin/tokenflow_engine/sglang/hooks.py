"""The functions that SGLang calls, and where. Each is guarded: it fails into the engine's own behaviour."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.schedule_batch import NextBatchPlan
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from tokenflow_engine.control.orders import STOCK
from tokenflow_engine.control.rids import name_parts, name_sample
from tokenflow_engine.policy.base import Phase, Reason
from tokenflow_engine.sglang import cpu_hicache
from tokenflow_engine.sglang.admission import Admission
from tokenflow_engine.sglang.attach import attach
from tokenflow_engine.sglang.attachment import Attachment, TokenFlowLinkReq
from tokenflow_engine.sglang.costs import MeasuredCosts
from tokenflow_engine.sglang.executor import Executor
from tokenflow_engine.sglang.guard import guarded
from tokenflow_engine.sglang.host import offload_manager
from tokenflow_engine.sglang.store import create_store
from tokenflow_engine.sglang.view import SchedulerView

__all__ = ["register_all"]

_logger = logging.getLogger(__name__)

_MAX_FAILURES_IN_A_ROW = 20

_IO = "sglang.srt.managers.io_struct.GenerateReqInput."
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache."
_PARTS = "sglang.srt.managers.scheduler_components."

_HELD_SLEEP_MS = 2


@dataclass(slots=True)
class _Engine:
    """What carries out plans in this process, where it is a scheduler; on every rank."""

    executor: Executor
    admission: Admission
    costs: MeasuredCosts
    farewell: TokenFlowLinkReq | None = None
    """What is still to be told to all ranks after the link was closed."""


_engine: _Engine | None = None
_attachment: Attachment | None = None
"""This process's, where it is the scheduler that receives requests and its link is up."""


def register_all() -> None:
    """Register every hook; SGLang applies them when all plugins have registered."""
    from sglang.srt.managers import io_struct

    io_struct.hook_custom_types(TokenFlowLinkReq)
    for target, hook, kind in (
        (_IO + "_normalize_rid", _name_parts, HookType.AROUND),
        (_IO + "regenerate_rid", _name_sample, HookType.AROUND),
        (_SCHEDULER + "init_request_dispatcher", _attach, HookType.AFTER),
        (_SCHEDULER + "_add_request_to_queue", _queued, HookType.BEFORE),
        (_SCHEDULER + "get_next_batch_to_run", _scheduled, HookType.AFTER),
        (_SCHEDULER + "get_new_batch_prefill", _prefill, HookType.AROUND),
        (_SCHEDULER + "run_batch", _launching, HookType.BEFORE),
        (_SCHEDULER + "run_batch", _launched, HookType.AFTER),
        (_SCHEDULER + "is_fully_idle", _is_idle, HookType.AFTER),
        (_SCHEDULER + "_collect_inflight_batches", _in_flight, HookType.AFTER),
        (_SCHEDULER + "pause_generation", _pausing, HookType.BEFORE),
        (_SCHEDULER + "on_idle", _idled, HookType.AFTER),
        ("sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority", _sort, HookType.AROUND),
        (
            _PARTS + "invariant_checker.SchedulerInvariantChecker._requests_owning_rows",
            _owners,
            HookType.AFTER,
        ),
        (_SCHEDULER + "send_abort_output", _dropped, HookType.BEFORE),
        (_SCHEDULER + "maybe_sleep_on_idle", _about_to_sleep, HookType.BEFORE),
        ("torch.distributed.rendezvous._create_c10d_store", create_store, HookType.AROUND),
        (_TREE + "init_hicache", _hicache, HookType.BEFORE),
        (_PARTS + "request_receiver.SchedulerRequestReceiver._pull_raw_reqs", _pulled, HookType.AFTER),
        (_PARTS + "output_streamer.SchedulerOutputStreamer.stream_output", _streamed, HookType.BEFORE),
    ):
        HookRegistry.register(target, hook, kind)


# ---- in the HTTP process: names that lead back to the stream ---------------------------------------


def _name_parts(original: Callable[..., None], request: Any, total: int) -> None:
    stream = request.rid
    original(request, total)
    _set_part_names(request, stream, total)


def _name_sample(original: Callable[..., Any], request: Any) -> Any:
    part = request.rid
    fresh = original(request)
    return _set_sample_name(request, part, fresh) or fresh


@guarded("rid")
def _set_part_names(request: Any, stream: Any, total: int) -> None:
    if isinstance(stream, str):
        request.rid = name_parts(stream, total=total)


@guarded("rid")
def _set_sample_name(request: Any, part: Any, fresh: Any) -> str | None:
    if not (isinstance(part, str) and isinstance(fresh, str)):
        return None
    name: str = name_sample(part, unique=fresh)
    request.rid = name
    return name


# ---- in the scheduler's process: what SGLang lacks on a CPU ------------------------------------------


@guarded("hicache")
def _hicache(tree: Any, *_args: Any, **_kwargs: Any) -> None:
    if str(tree.token_to_kv_pool_allocator.device) == "cpu":
        cpu_hicache.provide()


# ---- in the scheduler's process: the link -----------------------------------------------------------


def _failed(hook: str, in_a_row: int) -> None:
    """A hook that fails each time makes the link a lie: take the plugin out of this process."""
    global _attachment
    if _attachment is None or in_a_row < _MAX_FAILURES_IN_A_ROW:
        return
    attachment, _attachment = _attachment, None
    _logger.error(
        "TokenFlow: hook %r has failed %d times in a row: the link is closed, and the engine serves as "
        "without the plugin until it is started again",
        hook,
        in_a_row,
    )
    if _engine is not None:
        _engine.farewell = TokenFlowLinkReq(aborts=[], orders=STOCK)
    try:
        attachment.detach()
    except Exception:
        _logger.exception("TokenFlow: the link could not be closed")


def _pull_failed(hook: str, in_a_row: int) -> None:
    if _attachment is not None:
        _attachment.hush()
    _failed(hook, in_a_row)


@guarded("init")
def _attach(_result: None, scheduler: Any) -> None:
    global _attachment, _engine
    from sglang.utils import TypeBasedDispatcher

    executor = Executor(scheduler, new_host=partial(offload_manager, scheduler))
    _engine = _Engine(executor, Admission(scheduler), MeasuredCosts(executor.host))
    view = SchedulerView(scheduler, executor)

    @guarded("control", on_failure=_failed)
    def obey(request: TokenFlowLinkReq) -> None:
        if request.open_host:
            executor.host.open()
        if request.orders is not None:
            executor.order(request.orders)
        for rid in request.aborts:
            view.abort(rid)

    scheduler._request_dispatcher += TypeBasedDispatcher([(TokenFlowLinkReq, obey)])
    executor.listen(_moved)
    _attachment = attach(scheduler, view, executor, _engine.costs)


@guarded("pull", on_failure=_pull_failed)
def _pulled(received: list[Any] | None, _receiver: Any) -> list[Any] | None:
    if received is None:
        return None
    if _attachment is None:
        request = None if _engine is None else _engine.farewell
        if _engine is not None:
            _engine.farewell = None
    else:
        request = _attachment.exchange(received)
    return None if request is None else [*received, request]


@guarded("state", on_failure=_failed)
def _queued(_scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    if _engine is not None:
        _engine.executor.ended(req.rid)
    if _attachment is not None:
        _attachment.queued(req, again=is_retracted or len(req.output_ids) > 0)


@guarded("state", on_failure=_failed)
def _scheduled(plan: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    batch = plan.batch_to_run
    if _engine is not None:
        _engine.costs.launching(batch, time.monotonic(), moving_share=_engine.executor.moving_share)
    if _attachment is not None and batch is not None and batch.forward_mode.is_extend():
        _attachment.prefilled(batch.reqs, scheduler.chunked_req)


@guarded("moved", on_failure=_failed)
def _moved(req: Any, phase: Phase, reason: Reason | None) -> None:
    if _attachment is not None:
        _attachment.moved(req, phase, reason)


@guarded("count", on_failure=_failed)
def _streamed(_streamer: Any, reqs: list[Any], return_logprob: bool, skip_req: Any = None) -> None:
    if _attachment is not None:
        _attachment.count(reqs, skip_req)
    if _engine is not None:
        _engine.executor.finished(req for req in reqs if req.finished())


@guarded("end", on_failure=_failed)
def _dropped(_scheduler: Any, _abort_req: Any, req: Any) -> None:
    if _engine is not None:
        _engine.executor.ended(req.rid)
    if _attachment is not None:
        _attachment.dropped(req)


@guarded("idle", on_failure=_failed)
def _about_to_sleep(scheduler: Any) -> None:
    if _attachment is not None and scheduler.idle_sleeper is not None:
        _attachment.about_to_sleep()


# ---- in the scheduler's process: plans carried out --------------------------------------------------


def _prefill(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    """Preempted streams leave and return; then the engine's own prefill pass, for whom the plan admits."""
    engine = _engine
    if engine is None:
        return original(scheduler, running_batch)
    batch = _carry_out(engine, running_batch) or _recover(engine, running_batch) or running_batch
    if _is_decodes_turn(engine, scheduler, batch):
        return NextBatchPlan(batch_to_run=None, running_batch=batch)
    _open_pass(engine, scheduler, batch)
    try:
        return original(scheduler, batch)
    finally:
        _close_pass(engine)


def _orders_failed(hook: str, in_a_row: int) -> None:
    if _attachment is not None:
        _attachment.fall_back()
    _failed(hook, in_a_row)


@guarded("execute", on_failure=_orders_failed)
def _carry_out(engine: _Engine, batch: Any) -> Any:
    batch = engine.executor.step(batch)
    engine.executor.write_through(engine.costs.step_s)
    return batch


@guarded("recover", on_failure=_failed)
def _recover(engine: _Engine, batch: Any) -> Any:
    return engine.executor.recover(batch)


@guarded("admit", on_failure=_orders_failed)
def _is_decodes_turn(engine: _Engine, scheduler: Any, batch: Any) -> bool:
    """Under a plan, a decode step follows each prefill pass: else a burst's first readers would run dry."""
    last = scheduler.last_batch
    return bool(
        not engine.executor.orders.stock
        and not scheduler.is_mixed_chunk
        and not batch.is_empty()
        and last is not None
        and last.forward_mode.is_extend()
    )


@guarded("admit", on_failure=_orders_failed)
def _open_pass(engine: _Engine, scheduler: Any, batch: Any) -> None:
    orders, executor = engine.executor.orders, engine.executor
    if not executor.may_admit:
        engine.admission.shut(batch)
    elif not orders.stock:
        admit = [*executor.first_in_line(), *orders.admit]
        if admit or executor.holds or not batch.is_empty():  # an engine that has nothing else to do takes all
            engine.admission.open(admit, orders.prefill_tokens, batch)


@guarded("admit", on_failure=_orders_failed)
def _close_pass(engine: _Engine) -> None:
    engine.admission.close()


def _sort(original: Callable[..., None], policy: Any, queue: list[Any], *args: Any, **kwargs: Any) -> None:
    """The engine's order, unless the plan has given one."""
    if _engine is None or not _engine.admission.is_open:
        return original(policy, queue, *args, **kwargs)
    order = list(queue)
    original(policy, queue, *args, **kwargs)
    queue[:] = order
    return None


@guarded("launch", on_failure=_failed)
def _launching(_scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    if _engine is not None:
        _engine.executor.launching(batch)


@guarded("launch", on_failure=_failed)
def _launched(*_args: Any, **_kwargs: Any) -> None:
    if _engine is not None:
        _engine.executor.launched()


# ---- in the scheduler's process: who else has to know of held streams ----------------------------------


@guarded("held", on_failure=_failed)
def _is_idle(is_idle: bool, _scheduler: Any, *_args: Any, **_kwargs: Any) -> bool | None:
    """Not while streams are held: no leak check, no flush, no weight update that needs an idle engine."""
    return False if _engine is not None and _engine.executor.holds and is_idle else None


@guarded("held", on_failure=_failed)
def _in_flight(batches: list[Any], _scheduler: Any) -> list[Any] | None:
    """Aborts, time limits and changes of weights concern held streams as those that run."""
    if _engine is None or not _engine.executor.holds:
        return None
    return [*batches, SimpleNamespace(reqs=_engine.executor.held())]


@guarded("held", on_failure=_failed)
def _owners(owners: list[Any], _checker: Any) -> list[Any] | None:
    """The strict memory check counts rows by owner."""
    if _engine is None or not _engine.executor.holds:
        return None
    counted = set(owners)
    return [*owners, *(r for r in _engine.executor.held() if r.kv.holds_kv and r not in counted)]


@guarded("held", on_failure=_failed)
def _pausing(_scheduler: Any, request: Any) -> None:
    if _engine is not None and request.mode == "retract":
        _engine.executor.surrender()


@guarded("idle", on_failure=_failed)
def _idled(_result: None, scheduler: Any) -> None:
    """Nothing runs, but streams are held: wait a moment for what may happen instead of spinning."""
    if _engine is not None and _engine.executor.holds and scheduler.idle_sleeper is not None:
        scheduler.idle_sleeper.poller.poll(_HELD_SLEEP_MS)
