"""A response that its engine goes on with by itself, after its client's answer: asked for until it has ended.

So it counts as open for as long as it runs, and what it has used is recorded, as of all other requests.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final
from urllib.parse import quote

from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.relay.asking import Asking, Request
from tokenflow_gateway.relay.dialects import Document
from tokenflow_gateway.relay.errors import BadStream, EngineUnreachable, RelayError
from tokenflow_gateway.relay.stream import End
from tokenflow_gateway.relay.upstream import EngineRequest

__all__ = ["cancel", "end_of", "response_ended"]

_SHORTEST_S: Final = 0.2
_LONGEST_S: Final = 5.0
_SHARE: Final = 0.1
"""Of the time that it has run: so much later than it ends this is noticed, between the two above."""
_MOST_A_SECOND: Final = 100.0
"""Questions to one engine; where it has many such responses, each is asked for less often."""
_TRIES: Final = 5
"""In a row that the engine may leave without the answer, each a second later than the last."""
_ANSWER_WITHIN_S: Final = 10.0

_ENDS: Final[dict[str | None, End]] = {"cancelled": "client_gone", "failed": "engine_error"}


def end_of(document: Document) -> End:
    """How a response has ended, by its last status."""
    return _ENDS.get(document.status, "finished")


def cancel(asking: Asking, request: Request, engine: Engine, response_id: str) -> EngineRequest:
    """The request by which its engine gives up a response that it knows by a name of its own."""
    return _request(asking, request, engine, "POST", response_id, "/cancel")


async def response_ended(
    asking: Asking, request: Request, engine: Engine, response_id: str, *, max_bytes: int
) -> Document:
    """What the engine says of the response at its end. No client waits for this.

    Raises `TotalTimeout`, `BadStream` where the engine does not know it any more, or another `RelayError`
    where it cannot tell.
    """
    until = request.total.until
    engine.followed += 1
    try:
        async with asyncio.timeout_at(None if until == math.inf else until):
            return await _wait(asking, request, engine, response_id, max_bytes)
    except TimeoutError:
        raise request.total.expired() from None
    finally:
        engine.followed -= 1


async def _wait(
    asking: Asking, request: Request, engine: Engine, response_id: str, max_bytes: int
) -> Document:
    """Engines tell nobody when a response has ended: all that can be done is to ask now and then."""
    loop = asyncio.get_running_loop()
    begun, failures = loop.time(), 0
    while True:
        share_s = (loop.time() - begun) * _SHARE
        pause_s = min(max(_SHORTEST_S, share_s, failures), _LONGEST_S)
        await asyncio.sleep(max(pause_s, engine.followed / _MOST_A_SECOND))
        try:
            document = await _look(asking, request, engine, response_id, max_bytes)
        except RelayError:
            failures += 1
            if failures == _TRIES:
                raise
        else:
            if not document.is_pending:
                return document
            failures = 0


async def _look(
    asking: Asking, request: Request, engine: Engine, response_id: str, max_bytes: int
) -> Document:
    """Raises a `RelayError` unless the engine answers with a response."""
    asked = _request(asking, request, engine, "GET", response_id)
    body = bytearray()
    try:
        async with asyncio.timeout(_ANSWER_WITHIN_S), asked as answer:
            while data := await answer.content.readany():
                body += data
                if len(body) > max_bytes:
                    raise BadStream(f"a response is longer than {max_bytes} bytes (max_answer_bytes)")
    except TimeoutError as error:
        raise EngineUnreachable(f"the engine told nothing of a response in {_ANSWER_WITHIN_S:g} s") from error
    document = request.dialect.document(bytes(body))
    if answer.status != 200 or document.status is None:
        raise BadStream(f"the engine does not tell of a response: it answered {answer.status}")
    return document


def _request(
    asking: Asking, request: Request, engine: Engine, method: str, response_id: str, what: str = ""
) -> EngineRequest:
    """As its client would ask."""
    exchange = request.exchange
    return asking.upstream.request(
        engine,
        method,
        f"/v1/responses/{quote(response_id, safe='')}{what}",
        headers=request.head.passed,
        request_id=exchange.request_id,
        body=None,
        connect_s=request.timeouts.connect_s,
    )
