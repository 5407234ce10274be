"""The dashboard at ``/dashboard``: one page of engines and live streams, static files and nothing else.

The page reads ``/admin/engines`` and ``/admin/streams`` itself, with the visitor's admin token where one
is required, so these routes hold no data and need no protection.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

__all__ = ["dashboard_routes"]

_PAGE = "index.html"
_MEDIA_TYPES = {
    _PAGE: "text/html",
    "style.css": "text/css",
    "app.js": "text/javascript",
    "dom.js": "text/javascript",
    "engines.js": "text/javascript",
    "format.js": "text/javascript",
    "gateway.js": "text/javascript",
    "groups.js": "text/javascript",
    "place.js": "text/javascript",
    "sparkline.js": "text/javascript",
    "streams.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def dashboard_routes() -> list[BaseRoute]:
    """Routes of the page and of each of its files, which are read once, now."""
    page = _route("/dashboard", _PAGE)
    return [page, *(_route(f"/dashboard/{name}", name) for name in _MEDIA_TYPES if name != _PAGE)]


def _route(path: str, name: str) -> Route:
    content = files(__package__).joinpath(name).read_bytes()

    async def endpoint(_: Request) -> Response:
        return Response(content, media_type=_MEDIA_TYPES[name], headers=_HEADERS)

    return Route(path, endpoint, name=f"dashboard:{name}")
