"""``tokenflow engines``: what a running gateway knows of its engines, and which are to get nothing new."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import click

__all__ = ["engines"]

_WITHIN_S = 10.0

_gateway = click.option(
    "--gateway",
    default="http://127.0.0.1:8080",
    show_default=True,
    metavar="URL",
    help="The gateway, or any one of a fleet.",
)
_token = click.option(
    "--token", envvar="TOKENFLOW_ADMIN_TOKEN", show_envvar=True, help="The admin token, or an admin key."
)


@click.group()
def engines() -> None:
    """Look at the engines of a running gateway, and take one out of service.

    \b
    Examples:
      tokenflow engines list
      tokenflow engines drain gpu1:30000
      tokenflow engines resume gpu1:30000 --gateway https://gateway.example
    """  # noqa: D301  # \b keeps click from filling a paragraph


@engines.command("list")
@_gateway
@_token
@click.option("--json", "as_json", is_flag=True, help="As the gateway gives it.")
def list_engines(*, gateway: str, token: str | None, as_json: bool) -> None:
    """Show all engines, and what they are doing."""
    found = _ask(gateway, token, "/admin/engines")["engines"]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for engine in found:
        reason = engine["reason"] or ""
        click.echo(f"{engine['id']:<24} {_state(engine):<12} {engine['streams']:>4} streams  {reason}")


@engines.command()
@click.argument("name")
@_gateway
@_token
def drain(*, name: str, gateway: str, token: str | None) -> None:
    """Send an engine nothing new; what it has goes on. So do all gateways of a fleet."""
    _set(gateway, token, name, draining=True)
    click.echo(f"{name} gets nothing new; `tokenflow engines list` says how many streams it still has")


@engines.command()
@click.argument("name")
@_gateway
@_token
def resume(*, name: str, gateway: str, token: str | None) -> None:
    """Ask an engine again that was draining."""
    _set(gateway, token, name, draining=False)
    click.echo(f"{name} takes requests again")


def _state(engine: dict[str, Any]) -> str:
    if not engine["healthy"]:
        return "down"
    if engine["draining"]:
        return "draining"
    return "failing" if engine["breaker"] != "closed" else "up"


def _set(gateway: str, token: str | None, name: str, *, draining: bool) -> None:
    path = f"/admin/engines/{urllib.parse.quote(name, safe='')}/draining"
    _ask(gateway, token, path, {"draining": draining})


def _ask(gateway: str, token: str | None, path: str, body: dict[str, Any] | None = None) -> Any:
    """What the gateway answers. Raises `ClickException` with one line that says what is wrong."""
    if urllib.parse.urlsplit(gateway).scheme not in {"http", "https"}:
        raise click.ClickException(f"{gateway!r} is not an http(s) URL")
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(gateway.rstrip("/") + path, data=data, headers=headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_WITHIN_S) as answer:  # noqa: S310 - checked above
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise click.ClickException(_said(error)) from error
    except (OSError, ValueError) as error:
        raise click.ClickException(f"no gateway answers at {gateway}: {error}") from error


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the gateway answered {error.code}"
