"""The control side of the gateway: models, health, metrics, admin views and the dashboard."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import RedirectResponse

from tokenflow_engine.protocol import SetPolicy
from tokenflow_gateway.api.edge import ControlEdge
from tokenflow_gateway.api.openapi import document
from tokenflow_gateway.api.shapes import Engines, Health, Model, Models, PolicyChoice, Streams, errors
from tokenflow_gateway.config import Settings, is_loopback
from tokenflow_gateway.dashboard import dashboard_routes
from tokenflow_gateway.engines.registry import EngineRegistry
from tokenflow_gateway.relay.errors import error_body
from tokenflow_gateway.workers.views import READY, Views

__all__ = ["control_app"]

_DESCRIPTION = """\
A gateway for streamed text that knows its readers. Errors have OpenAI's shape; on a gateway that listens on
loopback, requests under another host name are refused with 403."""
_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Samples.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


def control_app(
    settings: Settings,
    registry: EngineRegistry,
    views: Views,
) -> ControlEdge:
    """The application for everything that is not relayed; `views` are of all workers."""
    app = FastAPI(
        title="TokenFlow gateway",
        version=version("tokenflow-serving"),
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=errors(403),
    )
    app.include_router(_models(registry))
    app.include_router(_health(views))
    app.include_router(_admin(settings, registry, views))
    app.routes.extend(dashboard_routes())

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse("/dashboard")

    @app.get("/metrics", tags=["metrics"], response_class=Response, responses=_METRICS)
    async def prometheus() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(await views.metrics(), media_type=CONTENT_TYPE_LATEST)

    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]  # FastAPI's own way to change it
    return ControlEdge(app)


_BY_TOKEN: dict[str, Any] = {"security": [{}, {"admin": []}]}
"""Without a token only where the gateway listens on loopback."""


def _models(registry: EngineRegistry) -> APIRouter:
    router = APIRouter(prefix="/v1/models", tags=["models"])

    @router.get("", response_model=None, responses={200: {"model": Models}})
    async def list_models() -> dict[str, Any]:
        """The models of all healthy engines."""
        return {"object": "list", "data": registry.models()}

    @router.get("/{model:path}", response_model=None, responses={200: {"model": Model}, **errors(404)})
    async def one_model(model: str) -> dict[str, Any]:
        """One model."""
        for entry in registry.models():
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


def _admin(settings: Settings, registry: EngineRegistry, views: Views) -> APIRouter:
    router = APIRouter(
        prefix="/admin",
        tags=["admin"],
        dependencies=[Depends(_admin_guard(settings))],
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
        if wanted.policy.partition(":")[0] not in engine.welcome.policies:
            known = ", ".join(engine.welcome.policies)
            raise HTTPException(400, f"engine {name!r} has no policy {wanted.policy!r}; it has: {known}")
        if not engine.tell(SetPolicy(policy=wanted.policy)):
            raise HTTPException(503, f"engine {name!r} does not take messages now")
        return wanted

    @router.get("/streams", response_model=None, responses={200: {"model": Streams}}, openapi_extra=_BY_TOKEN)
    async def list_streams() -> dict[str, Any]:
        """The open streams, oldest first."""
        total, listed = await views.streams()
        return {"at": time.time(), "total": total, "streams": listed}

    return router


def _admin_guard(settings: Settings) -> Callable[..., None]:
    """Who may see the admin views: holders of the token, or, without one, this machine's own users."""

    def check(authorization: Annotated[str, Header(include_in_schema=False)] = "") -> None:
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
