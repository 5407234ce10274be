"""The functions that SGLang calls, and where. Each is guarded: it fails into the engine's own behaviour."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from tokenflow_engine.control.rids import name_parts, name_sample
from tokenflow_engine.sglang.attach import attach
from tokenflow_engine.sglang.attachment import Attachment, TokenFlowLinkReq
from tokenflow_engine.sglang.guard import guarded
from tokenflow_engine.sglang.store import create_store
from tokenflow_engine.sglang.view import SchedulerView

__all__ = ["register_all"]

_logger = logging.getLogger(__name__)

_MAX_FAILURES_IN_A_ROW = 20

_IO = "sglang.srt.managers.io_struct.GenerateReqInput."
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_PARTS = "sglang.srt.managers.scheduler_components."

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
        (_SCHEDULER + "send_abort_output", _dropped, HookType.BEFORE),
        (_SCHEDULER + "maybe_sleep_on_idle", _about_to_sleep, HookType.BEFORE),
        ("torch.distributed.rendezvous._create_c10d_store", create_store, HookType.AROUND),
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


# ---- in the scheduler's process --------------------------------------------------------------------


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
    global _attachment
    from sglang.utils import TypeBasedDispatcher

    view = SchedulerView(scheduler)

    @guarded("control", on_failure=_failed)
    def obey(request: TokenFlowLinkReq) -> None:
        for rid in request.aborts:
            view.abort(rid)

    scheduler._request_dispatcher += TypeBasedDispatcher([(TokenFlowLinkReq, obey)])
    _attachment = attach(scheduler, view)


@guarded("pull", on_failure=_pull_failed)
def _pulled(received: list[Any] | None, _receiver: Any) -> list[Any] | None:
    if _attachment is None or received is None:
        return None
    request = _attachment.exchange(received)
    return None if request is None else [*received, request]


@guarded("state", on_failure=_failed)
def _queued(_scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    if _attachment is not None and is_retracted:
        _attachment.moved([req], "waiting")


@guarded("state", on_failure=_failed)
def _scheduled(plan: Any, *_args: Any, **_kwargs: Any) -> None:
    batch = plan.batch_to_run
    if _attachment is not None and batch is not None and batch.forward_mode.is_extend():
        _attachment.moved(batch.reqs, "running")


@guarded("count", on_failure=_failed)
def _streamed(_streamer: Any, reqs: list[Any], return_logprob: bool, skip_req: Any = None) -> None:
    if _attachment is not None:
        _attachment.count(reqs, skip_req)


@guarded("end", on_failure=_failed)
def _dropped(_scheduler: Any, _abort_req: Any, req: Any) -> None:
    if _attachment is not None:
        _attachment.dropped(req)


@guarded("idle", on_failure=_failed)
def _about_to_sleep(scheduler: Any) -> None:
    if _attachment is not None and scheduler.idle_sleeper is not None:
        _attachment.refresh_stats(time.monotonic())
