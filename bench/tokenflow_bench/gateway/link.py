"""The engine's end of the link without an engine: takes streams and readings, tells their states, confirms.

python -m tokenflow_bench.gateway.link ENDPOINT
"""

from __future__ import annotations

import select
import sys
import time

from tokenflow_bench.gateway.events import MODEL
from tokenflow_engine.control.endpoint import link_secret
from tokenflow_engine.control.owners import Confirmation, Owner, Update
from tokenflow_engine.control.server import LinkServer
from tokenflow_engine.protocol import (
    PROTOCOL_VERSION,
    Aborted,
    EngineStats,
    StreamClosed,
    StreamOpened,
    Welcome,
)

_STATES_S = 0.1
"""Between two reports on all open streams, which is what an engine's outbox allows."""


def main(endpoint: str) -> None:
    """Serve until killed."""
    server = LinkServer(
        endpoint,
        secret=link_secret(),
        welcome=Welcome(
            version=PROTOCOL_VERSION,
            engine_id="bench",
            model=MODEL,
            engine="bench",
            capabilities=["count", "abort"],
            kv_tokens=1_000_000,
            max_running=1000,
        ),
        stats=EngineStats(
            at=time.time(),
            running=0,
            waiting=0,
            parked=0,
            kv_used_tokens=0,
            kv_tokens=1_000_000,
            tokens_per_s=0.0,
            generated_total=0,
        ),
    )
    server.start()
    owners: dict[str, Owner] = {}
    generated, due = 0, 0.0
    while True:
        select.select([server.for_scheduler], [], [], _STATES_S)
        for owner, message in server.receive(limit=10_000):
            if isinstance(message, StreamOpened):
                owners[message.rid] = owner
            elif isinstance(message, StreamClosed) and owners.pop(message.rid, owner):
                server.confirm(Confirmation(owner, Aborted(rid=message.rid, generated=0, was_live=False)))
        now = time.monotonic()
        if now >= due:
            due, generated = now + _STATES_S, generated + 5
            server.post(
                [Update(owner, rid, "running", generated) for rid, owner in owners.items()], is_urgent=False
            )


if __name__ == "__main__":
    main(sys.argv[1])
