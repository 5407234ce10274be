"""Health of one engine: asked every second, over HTTP, without making it generate anything."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import httpx
import structlog

from tokenflow_gateway.engines.engine import Engine

__all__ = ["PROBE_TIMEOUT_S", "HealthProbe"]

PROBE_TIMEOUT_S = 3.0
"""For all of one probe, however slowly its bytes drip."""

_CUT_OFF = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)

_log = structlog.stdlib.get_logger("tokenflow.engines")


class HealthProbe:
    """Keeps `engine.healthy`, its kind and its models up to date until cancelled."""

    def __init__(self, engine: Engine, client: httpx.AsyncClient, *, interval_s: float = 1.0) -> None:
        self._engine = engine
        self._client = client
        self._interval_s = interval_s
        self._wake = asyncio.Event()

    def suspect(self) -> None:
        """Probe again at once: a request has just failed on this engine."""
        self._wake.set()

    async def run(self) -> None:
        while True:
            self._wake.clear()
            await self.probe()
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def probe(self) -> None:
        """Ask once and write the outcome into the engine."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._ask_ready()
                self._engine.models = await self._ask_models()
        except (httpx.HTTPError, _NotReady, ValueError, RecursionError, TimeoutError) as error:
            self._set(healthy=False, reason=_describe(error))
        else:
            self._set(healthy=True, reason=None)

    async def _ask_ready(self) -> None:
        """SGLang has ``/ready``, which (unlike its ``/health``) generates nothing; others lack it."""
        response = await self._get("/ready")
        if response.status_code == httpx.codes.OK:
            self._engine.kind = "sglang" if await self._is_sglang() else "openai"
        elif response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise _NotReady("starting, or paused")
        else:
            self._engine.kind = "openai"

    async def _is_sglang(self) -> bool:
        if self._engine.healthy:
            return self._engine.kind == "sglang"
        return (await self._get("/model_info")).status_code == httpx.codes.OK

    async def _ask_models(self) -> tuple[dict[str, Any], ...]:
        response = await self._get("/v1/models")
        if response.status_code != httpx.codes.OK:
            raise _NotReady(f"GET /v1/models answered {response.status_code}")
        answer = response.json()
        entries = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(entries, list):
            raise _NotReady("GET /v1/models did not answer with a list of models")
        return tuple(entry for entry in entries if isinstance(entry, dict))

    async def _get(self, path: str) -> httpx.Response:
        """Asked again if the connection breaks: a busy engine may close a kept one as a question comes."""
        config = self._engine.config
        headers = {"Authorization": f"Bearer {config.api_key.get_secret_value()}"} if config.api_key else {}
        try:
            return await self._client.get(config.url + path, headers=headers)
        except _CUT_OFF:
            return await self._client.get(config.url + path, headers=headers)

    def _set(self, *, healthy: bool, reason: str | None) -> None:
        if (healthy, reason) != (self._engine.healthy, self._engine.health_reason):
            log = _log.info if healthy else _log.warning
            log("engine is up" if healthy else "engine is down", engine=self._engine.name, reason=reason)
        self._engine.healthy = healthy
        self._engine.health_reason = reason


class _NotReady(Exception):
    """The engine answered, but cannot serve."""


_CONNECT_FAILURES = {
    errno.ECONNREFUSED: "connection refused",
    errno.EHOSTUNREACH: "no route to its host",
    errno.ENETUNREACH: "no route to its network",
}


def _errno(error: BaseException | None) -> int | None:
    """The system's number for a failed connection, at the root of the library's own errors."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def _describe(error: Exception) -> str:
    if isinstance(error, httpx.ConnectError):
        return _CONNECT_FAILURES.get(_errno(error) or 0, f"cannot connect ({error})")
    if isinstance(error, (httpx.TimeoutException, TimeoutError)):
        return "no answer in time"
    return str(error) or type(error).__name__
