"""Setting up the link in the scheduler's process, once its model is loaded."""

from __future__ import annotations

import logging
import os
import secrets
import time
from typing import Any

import zmq
from sglang.srt.runtime_context import get_parallel
from sglang.version import __version__ as sglang_version

from tokenflow_engine.control.endpoint import EndpointError, default_endpoint, link_secret
from tokenflow_engine.control.server import LinkServer
from tokenflow_engine.protocol import PROTOCOL_VERSION, EngineStats, Welcome
from tokenflow_engine.sglang import policies
from tokenflow_engine.sglang.attachment import Attachment
from tokenflow_engine.sglang.costs import MeasuredCosts
from tokenflow_engine.sglang.executor import Executor
from tokenflow_engine.sglang.guard import errors_caught
from tokenflow_engine.sglang.view import SchedulerView

__all__ = ["attach"]

_logger = logging.getLogger(__name__)


def attach(
    scheduler: Any, view: SchedulerView, executor: Executor, costs: MeasuredCosts
) -> Attachment | None:
    """Bind the link and join it to this scheduler; None, with a line that says why, where there is none."""
    why_not = _reason_to_be_passive(scheduler)
    if why_not is not None:
        _logger.warning("TokenFlow: passive, the engine serves as without the plugin: %s", why_not)
        return None
    if not _receives_requests():
        return None
    try:
        endpoint = os.environ.get("TOKENFLOW_LINK") or default_endpoint(scheduler.server_args.port)
        server = _new_server(scheduler, endpoint)
        attachment = _joined(view=view, server=server, executor=executor, costs=costs)
        _start(server, view)
    except (EndpointError, OSError) as error:
        _logger.error("TokenFlow: no link, the engine serves as without the plugin: %s", error)
        return None
    except zmq.ZMQError as error:
        _logger.error(
            "TokenFlow: no link, the engine serves as without the plugin: cannot listen at %s (%s); "
            "name a free endpoint in TOKENFLOW_LINK",
            endpoint,
            error,
        )
        return None
    _logger.info("TokenFlow: listening for gateways at %s", server.endpoint)
    return attachment


def _reason_to_be_passive(scheduler: Any) -> str | None:
    args = scheduler.server_args
    if args.dp_size > 1 or args.pp_size > 1:
        return "data and pipeline parallelism (--dp-size, --pp-size above 1) are not supported yet"
    if scheduler.disaggregation_mode.value != "null":
        return "prefill/decode disaggregation is not supported yet"
    return None


def _receives_requests() -> bool:
    parallel = get_parallel()
    return bool(parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0)


def _joined(
    *, view: SchedulerView, server: LinkServer, executor: Executor, costs: MeasuredCosts
) -> Attachment:
    """All that a gateway is told of; it must be there before the first can connect."""
    try:
        attachment = Attachment(view=view, server=server, executor=executor, costs=costs)
        view.wake_for(server.for_scheduler)
    except BaseException:
        server.close()
        raise
    return attachment


def _start(server: LinkServer, view: SchedulerView) -> None:
    try:
        server.start()
    except BaseException:
        view.stop_waking_for(server.for_scheduler)
        raise


def _new_server(scheduler: Any, endpoint: str) -> LinkServer:
    return LinkServer(
        endpoint,
        secret=link_secret(),
        welcome=_welcome(scheduler),
        stats=_nothing_yet(scheduler),
        hook_errors=errors_caught,
    )


def _nothing_yet(scheduler: Any) -> EngineStats:
    return EngineStats(
        at=time.time(),
        running=0,
        waiting=0,
        parked=0,
        kv_used_tokens=0,
        kv_tokens=scheduler.max_total_num_tokens,
        tokens_per_s=0.0,
        generated_total=0,
    )


def _welcome(scheduler: Any) -> Welcome:
    args = scheduler.server_args
    return Welcome(
        version=PROTOCOL_VERSION,
        engine_id=secrets.token_hex(8),
        model=args.served_model_name or args.model_path,
        engine=f"sglang {sglang_version}",
        capabilities=["count", "abort", "buffer", "policy"],
        kv_tokens=scheduler.max_total_num_tokens,
        max_running=scheduler.max_running_requests,
        policies=policies.available(scheduler),
    )
