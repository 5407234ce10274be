"""The control side of the gateway: models, health, metrics, admin views and the dashboard."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import RedirectResponse

from tokenflow_engine.protocol import SetPolicy
from tokenflow_gateway.api.edge import ControlEdge
from tokenflow_gateway.api.openapi import document
from tokenflow_gateway.api.shapes import (
    DrainingChoice,
    Engines,
    Health,
    Model,
    Models,
    PolicyChoice,
    Streams,
    errors,
)
from tokenflow_gateway.dashboard import dashboard_routes
from tokenflow_gateway.engines.draining import Draining
from tokenflow_gateway.engines.registry import EngineRegistry
from tokenflow_gateway.relay.errors import RelayError, error_body
from tokenflow_gateway.tenants.access import Access
from tokenflow_gateway.workers.views import READY, Views

__all__ = ["control_app"]

_DESCRIPTION = """\
A gateway for streamed text that knows its readers. Errors have OpenAI's shape; on a gateway that listens on
loopback, requests under another host name are refused with 403."""
_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Samples.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


def control_app(
    access: Callable[[], Access],
    registry: EngineRegistry,
    views: Views,
    draining: Draining,
) -> ControlEdge:
    """The application for everything that is not relayed; `views` and `draining` are of all workers.

    `access` is the one in force now: it changes with the configuration.
    """
    app = FastAPI(
        title="TokenFlow gateway",
        version=version("tokenflow-serving"),
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=errors(403),
    )
    app.include_router(_models(access, registry))
    app.include_router(_health(views))
    app.include_router(_admin(access, registry, views, draining))
    app.routes.extend(dashboard_routes())

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse("/dashboard")

    @app.get("/metrics", tags=["metrics"], response_class=Response, responses={**_METRICS, **errors(401)})
    async def prometheus(request: Request) -> Response:
        """Metrics in Prometheus' text format. Where requests need keys, for keys of kind monitor or admin."""
        access().monitor(request.headers.raw)
        return Response(await views.metrics(), media_type=CONTENT_TYPE_LATEST)

    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(RelayError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]  # FastAPI's own way to change it
    return ControlEdge(app)


_BY_TOKEN: dict[str, Any] = {"security": [{}, {"admin": []}]}
"""Without a token only where the gateway listens on loopback."""


def _models(access: Callable[[], Access], registry: EngineRegistry) -> APIRouter:
    router = APIRouter(prefix="/v1/models", tags=["models"], responses=errors(401))

    @router.get("", response_model=None, responses={200: {"model": Models}})
    async def list_models(request: Request) -> dict[str, Any]:
        """The models of all healthy engines that the caller may use."""
        engines = access().client(request.headers.raw).engines
        return {"object": "list", "data": registry.models(among=engines)}

    @router.get("/{model:path}", response_model=None, responses={200: {"model": Model}, **errors(404)})
    async def one_model(model: str, request: Request) -> dict[str, Any]:
        """One model."""
        for entry in registry.models(among=access().client(request.headers.raw).engines):
            if entry.get("id") == model:
                return entry
        raise HTTPException(404, f"no engine serves the model {model!r}")

    return router


def _health(views: Views) -> APIRouter:
    router = APIRouter(prefix="/health", tags=["health"])

    @router.get("/live", response_model=Health)
    async def live() -> dict[str, str]:
        """The gateway's process answers."""
        return {"status": "ok"}

    @router.get("/ready", response_model=Health, responses={503: {"model": Health}})
    async def ready(response: Response) -> dict[str, str]:
        """Requests can be served: at least one engine is healthy, and the gateway is not shutting down.

        So of all workers, where there are several.
        """
        status = await views.status()
        if status != READY:
            response.status_code = 503
        return {"status": status}

    return router


def _admin(
    access: Callable[[], Access], registry: EngineRegistry, views: Views, draining: Draining
) -> APIRouter:
    router = APIRouter(
        prefix="/admin",
        tags=["admin"],
        dependencies=[Depends(_admin_guard(access))],
        responses=errors(401, 403),
    )

    @router.get("/engines", response_model=None, responses={200: {"model": Engines}}, openapi_extra=_BY_TOKEN)
    async def engines() -> dict[str, Any]:
        """Every engine with its health, its link and its load; null where the engine does not tell."""
        return {"at": time.time(), "engines": await views.engines()}

    @router.post(
        "/engines/{name}/policy",
        status_code=202,
        responses=errors(400, 404, 409, 413, 503),
        openapi_extra=_BY_TOKEN,
    )
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
        if not wanted.policy.isprintable() or wanted.policy.partition(":")[0] not in engine.welcome.policies:
            known = ", ".join(engine.welcome.policies)
            raise HTTPException(400, f"engine {name!r} has no policy {wanted.policy!r}; it has: {known}")
        if not engine.tell(SetPolicy(policy=wanted.policy)):
            raise HTTPException(503, f"engine {name!r} does not take messages now")
        return wanted

    @router.post("/engines/{name}/draining", responses=errors(400, 404, 413), openapi_extra=_BY_TOKEN)
    async def set_draining(name: str, wanted: DrainingChoice) -> DrainingChoice:
        """Send an engine nothing new, or ask it again. What it has goes on. So do all gateways of a fleet."""
        if registry.get(name) is None:
            raise HTTPException(404, f"no engine is called {name!r}")
        await draining.set(name, draining=wanted.draining)
        return wanted

    @router.get("/streams", response_model=None, responses={200: {"model": Streams}}, openapi_extra=_BY_TOKEN)
    async def list_streams() -> dict[str, Any]:
        """The open streams, oldest first."""
        total, listed = await views.streams()
        return {"at": time.time(), "total": total, "streams": listed}

    return router


def _admin_guard(access: Callable[[], Access]) -> Callable[..., None]:
    def check(request: Request) -> None:
        access().admin(request.headers.raw)

    return check


async def _refused(request: Request, error: Exception) -> Response:
    """A failure that the relay knows, too: a key that is missing or not for this."""
    assert isinstance(error, RelayError)
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), error.status, headers=headers, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """Errors of this application in OpenAI's shape, like those of the relay."""
    assert isinstance(error, StarletteHTTPException)
    message = (
        f"no such route: {request.method} {request.url.path}" if error.detail == "Not Found" else error.detail
    )
    body = error_body(message, status=error.status_code)
    return Response(body, error.status_code, headers=error.headers, media_type="application/json")


async def _invalid(request: Request, error: Exception) -> Response:
    """A body that cannot be used, by the first fault that was found in it."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    if first["type"] == "json_invalid":
        message, param = f"the request body is not valid JSON: {first['ctx']['error']} at byte {where}", None
    else:
        message, param = f"{where or 'the request body'}: {first['msg']}", where or None
    body = error_body(message, status=400, code="invalid_request", param=param)
    return Response(body, 400, media_type="application/json")
