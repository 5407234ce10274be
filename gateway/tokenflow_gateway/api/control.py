"""The control side of the gateway: models, health, metrics, admin views and the dashboard."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import RedirectResponse

from tokenflow_engine.protocol import SetPolicy
from tokenflow_gateway.config import Settings, is_loopback
from tokenflow_gateway.dashboard import dashboard_routes
from tokenflow_gateway.engines.registry import EngineRegistry
from tokenflow_gateway.metrics import Metrics
from tokenflow_gateway.relay.errors import error_body
from tokenflow_gateway.relay.stream import StreamTable

__all__ = ["control_app"]

LISTED_STREAMS = 500
"""Longest list ``/admin/streams`` answers with; `total` counts them all."""


class PolicyChoice(BaseModel):
    """The name of a scheduling policy."""

    policy: str


def control_app(
    settings: Settings,
    registry: EngineRegistry,
    streams: StreamTable,
    metrics: Metrics,
    stopping: Callable[[], bool],
) -> FastAPI:
    """The FastAPI application for everything that is not relayed."""
    app = FastAPI(title="TokenFlow gateway", docs_url=None, redoc_url=None)
    app.include_router(_models(registry))
    app.include_router(_health(registry, stopping))
    app.include_router(_admin(settings, registry, streams))
    app.routes.extend(dashboard_routes())

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse("/dashboard")

    @app.get("/metrics", tags=["metrics"])
    async def prometheus() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    return app


def _models(registry: EngineRegistry) -> APIRouter:
    router = APIRouter(prefix="/v1/models", tags=["models"])

    @router.get("")
    async def list_models() -> dict[str, Any]:
        """The models of all healthy engines."""
        return {"object": "list", "data": registry.models()}

    @router.get("/{model:path}")
    async def one_model(model: str) -> dict[str, Any]:
        """One model."""
        for entry in registry.models():
            if entry.get("id") == model:
                return entry
        raise HTTPException(404, f"no engine serves the model {model!r}")

    return router


def _health(registry: EngineRegistry, stopping: Callable[[], bool]) -> APIRouter:
    router = APIRouter(prefix="/health", tags=["health"])

    @router.api_route("/live", methods=["GET", "HEAD"])
    async def live() -> dict[str, str]:
        """The gateway's process answers."""
        return {"status": "ok"}

    @router.api_route("/ready", methods=["GET", "HEAD"])
    async def ready(response: Response) -> dict[str, str]:
        """Requests can be served: at least one engine is healthy, and the gateway is not shutting down."""
        if stopping():
            response.status_code = 503
            return {"status": "shutting down"}
        if not registry.ready():
            response.status_code = 503
            return {"status": "no healthy engine"}
        return {"status": "ok"}

    return router


def _admin(settings: Settings, registry: EngineRegistry, streams: StreamTable) -> APIRouter:
    router = APIRouter(prefix="/admin", tags=["admin"], dependencies=[Depends(_admin_guard(settings))])

    @router.get("/engines")
    async def engines() -> dict[str, Any]:
        """Every engine with its health, its link and its load; null where the engine does not tell."""
        return {"at": time.time(), "engines": [engine.view() for engine in registry]}

    @router.post("/engines/{name}/policy", status_code=202)
    async def set_policy(name: str, wanted: PolicyChoice) -> PolicyChoice:
        """Have an engine schedule by another policy; ``/admin/engines`` says which is in force.

        Options may follow its name (``adaptive:write_s=0``). The engine knows them, this gateway does not:
        with one that does not exist, the old policy stays in force.
        """
        engine = next((engine for engine in registry if engine.name == name), None)
        if engine is None:
            raise HTTPException(404, f"no engine is called {name!r}")
        if engine.welcome is None:
            raise HTTPException(409, f"engine {name!r} is not linked: {engine.link_reason}")
        if wanted.policy.partition(":")[0] not in engine.welcome.policies:
            known = ", ".join(engine.welcome.policies)
            raise HTTPException(400, f"engine {name!r} has no policy {wanted.policy!r}; it has: {known}")
        if not engine.tell(SetPolicy(policy=wanted.policy)):
            raise HTTPException(503, f"engine {name!r} does not take messages now")
        return wanted

    @router.get("/streams")
    async def list_streams() -> dict[str, Any]:
        """The open streams, oldest first."""
        now = time.monotonic()
        listed = sorted(streams, key=lambda stream: stream.started)[:LISTED_STREAMS]
        return {"at": time.time(), "total": len(streams), "streams": [stream.view(now) for stream in listed]}

    return router


def _admin_guard(settings: Settings) -> Callable[..., None]:
    """Who may see the admin views: holders of the token, or, without one, this machine's own users."""

    def check(authorization: Annotated[str, Header()] = "") -> None:
        if settings.admin_token is not None:
            expected = f"Bearer {settings.admin_token.get_secret_value()}"
            scheme, _, token = authorization.partition(" ")
            given = f"{scheme.capitalize()} {token}"
            if not hmac.compare_digest(given.encode(), expected.encode()):
                raise HTTPException(401, "the admin views need the admin token as bearer token")
        elif not is_loopback(settings.host):
            raise HTTPException(403, "set TOKENFLOW_ADMIN_TOKEN to open the admin views beyond loopback")

    return check


async def _http_error(request: Request, error: Exception) -> Response:
    """Errors of this application in OpenAI's shape, like those of the relay."""
    assert isinstance(error, StarletteHTTPException)
    message = (
        f"no such route: {request.method} {request.url.path}" if error.detail == "Not Found" else error.detail
    )
    body = error_body(message, status=error.status_code)
    return Response(body, error.status_code, headers=error.headers, media_type="application/json")


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return Response(error_body(str(error), status=422), 422, media_type="application/json")
