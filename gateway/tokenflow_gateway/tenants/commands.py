"""``tokenflow keys``, ``tokenflow usage`` and ``tokenflow check-config``: for who runs a gateway."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from tokenflow_gateway.config import ConfigError, load_settings
from tokenflow_gateway.local.errors import SetupError
from tokenflow_gateway.local.home import Home
from tokenflow_gateway.schema import config_schema
from tokenflow_gateway.store.keys import KEYS_FILE, KeyStore
from tokenflow_gateway.store.sqlite import StoreError
from tokenflow_gateway.store.usage import GROUPS, TOTALS, USAGE_FILE, summed
from tokenflow_gateway.tenants.keyring import Keyring
from tokenflow_gateway.tenants.keys import KeyRecord, new_key
from tokenflow_gateway.tenants.model import KeyKind, Limits
from tokenflow_gateway.tenants.rules import Rules

__all__ = ["check_config", "keys", "usage"]

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_TIME = re.compile(r"(\d{1,9})([smhd])")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _OneLineErrors(click.Group):
    """Shows what a person has to put right as one line."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. Raises `click.ClickException`."""
        with _in_one_line():
            return super().invoke(ctx)


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except (StoreError, ConfigError) as error:
        raise click.ClickException(str(error)) from error


class _Duration(click.ParamType[float]):
    """``90s``, ``15m``, ``24h`` or ``30d``, as seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        match = _TIME.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is no duration such as 90s, 15m, 24h or 30d", param, ctx)
        return float(int(match[1]) * _UNITS_S[match[2]])


class _Since(click.ParamType[float]):
    """A duration back from now, or a date (of UTC), as Unix seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        if _TIME.fullmatch(str(value)):
            return time.time() - _Duration().convert(value, param, ctx)
        try:
            when = datetime.fromisoformat(str(value))
        except ValueError:
            self.fail(f"{value!r} is neither a duration such as 7d nor a date such as 2026-11-01", param, ctx)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _config_option(command: _Command) -> _Command:
    return click.option(
        "--config",
        "config_file",
        envvar="TOKENFLOW_CONFIG",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        show_envvar=True,
        help="The gateway's configuration (YAML), for its `state_dir`.",
    )(command)


def _json_option(command: _Command) -> _Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def _state(config_file: Path | None) -> Path:
    """Where the gateway of this configuration keeps its state. Raises `ConfigError`."""
    if config_file is not None:
        return load_settings(config_file).state
    given = os.environ.get("TOKENFLOW_STATE_DIR")
    return Path(given) if given else Home.from_environ(os.environ).root / "gateway"


def _when(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


# ---- keys -------------------------------------------------------------------------------------------


@click.group(cls=_OneLineErrors)
def keys() -> None:
    """API keys: who may use the gateway. A running gateway notices changes within a second.

    Only hashes are kept, so a key is shown once, when it is made.
    """


def _names(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """A comma-separated list."""
    if value is None:
        return None
    names = tuple(part.strip() for part in value.split(",") if part.strip())
    if not names:
        raise click.BadParameter("name at least one, or leave the option out for all")
    return names


def _tenant_name(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    if not _NAME.fullmatch(value):
        raise click.BadParameter(
            f"{value!r} is no name: letters, digits, dots, dashes and underscores, at most 64"
        )
    return value


@keys.command()
@click.option("--tenant", required=True, callback=_tenant_name, help="Whose key it is.")
@click.option(
    "--kind",
    type=click.Choice(["client", "admin", "monitor"]),
    default="client",
    show_default=True,
    help="client: text; admin: admin views and routes; monitor: metrics.",
)
@click.option("--label", default="", help="What people call it.")
@click.option("--classes", callback=_names, help="Of the tenant's classes only these, such as gold,bronze.")
@click.option("--engines", callback=_names, help="Of the tenant's engines only these.")
@click.option("--expires-in", type=_Duration(), help="Such as 30d.  [default: never]")
@click.option(
    "--requests-per-minute", type=click.IntRange(1), help="For this key, beside its tenant's limit."
)
@click.option("--tokens-per-minute", type=click.IntRange(1))
@click.option("--concurrent-streams", type=click.IntRange(1))
@click.option("--budget-tokens", type=click.IntRange(1), help="In each month, or see --budget-period.")
@click.option("--budget-period", type=click.Choice(["day", "month"]), default="month", show_default=True)
@_json_option
@_config_option
def create(
    *,
    tenant: str,
    kind: KeyKind,
    label: str,
    classes: tuple[str, ...] | None,
    engines: tuple[str, ...] | None,
    expires_in: float | None,
    as_json: bool,
    config_file: Path | None,
    **limits: Any,
) -> None:
    """Make a key and show it, once."""
    made, now = new_key(), time.time()
    record = KeyRecord(
        id=made.key.id,
        hash=made.key.hash,
        tenant=tenant,
        kind=kind,
        label=label,
        classes=classes,
        engines=None if engines is None else frozenset(engines),
        limits=Limits(**limits),
        created_at=now,
        expires_at=None if expires_in is None else now + expires_in,
    )
    with KeyStore(_state(config_file) / KEYS_FILE) as store:
        store.add(record)
    _show_new(made.text, record, as_json=as_json)


@keys.command("list")
@click.option("--tenant", help="Only this tenant's.")
@click.option("--all", "everything", is_flag=True, help="Revoked and expired ones, too.")
@_json_option
@_config_option
def list_keys(*, tenant: str | None, everything: bool, as_json: bool, config_file: Path | None) -> None:
    """List keys by id. Secrets are not kept, so there are none to show."""
    with KeyStore(_state(config_file) / KEYS_FILE) as store:
        records = store.records()
    now = time.time()
    shown = [
        _described(record, now)
        for record in records
        if tenant in {None, record.tenant} and (everything or record.state(now) == "active")
    ]
    if as_json:
        click.echo(json.dumps(shown, indent=2))
        return
    columns = ("id", "tenant", "kind", "label", "state", "created", "expires")
    rows = [[str(entry.get(name) or "") for name in columns] for entry in shown]
    click.echo(_table(columns, rows) if rows else "no keys")


@keys.command()
@click.argument("key_id")
@click.option(
    "--overlap",
    type=_Duration(),
    default="24h",
    show_default=True,
    help="How long the old key stays valid beside the new one; 0s for not at all.",
)
@_json_option
@_config_option
def rotate(*, key_id: str, overlap: float, as_json: bool, config_file: Path | None) -> None:
    """Make a key with the rights of another, which ends after the overlap."""
    made, now = new_key(), time.time()
    with KeyStore(_state(config_file) / KEYS_FILE) as store:
        old = store.get(key_id)
        if (state := old.state(now)) != "active":
            raise click.ClickException(
                f"key {key_id} is {state}: make another one with `tokenflow keys create`"
            )
        lifetime = None if old.expires_at is None else old.expires_at - old.created_at
        record = KeyRecord(
            id=made.key.id,
            hash=made.key.hash,
            tenant=old.tenant,
            kind=old.kind,
            label=old.label,
            classes=old.classes,
            engines=old.engines,
            limits=old.limits,
            created_at=now,
            expires_at=None if lifetime is None else now + lifetime,
            replaces=old.id,
        )
        store.replace(record, old_expires_at=now + overlap)
    _show_new(made.text, record, as_json=as_json)


@keys.command()
@click.argument("key_id")
@_json_option
@_config_option
def revoke(*, key_id: str, as_json: bool, config_file: Path | None) -> None:
    """Refuse a key from now on. Streams that run end by themselves."""
    now = time.time()
    with KeyStore(_state(config_file) / KEYS_FILE) as store:
        record = store.revoke(key_id, at=now)
    click.echo(
        json.dumps(_described(record, now), indent=2)
        if as_json
        else f"revoked {key_id} of {record.tenant}: gateways refuse it within a second"
    )


def _show_new(text: str, record: KeyRecord, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"key": text, **_described(record, record.created_at)}, indent=2))
        return
    click.echo(text)
    click.echo(f"{record.kind} key {record.id} of {record.tenant}; it is not shown again", err=True)


def _described(record: KeyRecord, now: float) -> dict[str, Any]:
    """A key without its hash."""
    return {
        "id": record.id,
        "tenant": record.tenant,
        "kind": record.kind,
        "label": record.label,
        "state": record.state(now),
        "classes": record.classes,
        "engines": None if record.engines is None else sorted(record.engines),
        "limits": None if record.limits.is_unlimited else asdict(record.limits),
        "created": _when(record.created_at),
        "expires": _when(record.expires_at) or None,
        "revoked": _when(record.revoked_at) or None,
        "replaces": record.replaces,
    }


# ---- usage ------------------------------------------------------------------------------------------


@click.command()
@click.option("--tenant", help="Only this tenant's.")
@click.option("--since", type=_Since(), default="30d", show_default=True, help="Such as 7d, or 2026-11-01.")
@click.option("--until", type=_Since(), help="The same; what began then or later is left out.")
@click.option(
    "--by",
    multiple=True,
    type=click.Choice(list(GROUPS)),
    help="Sum by this; may be given more than once.  [default: tenant]",
)
@click.option(
    "--format", "form", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True
)
@_config_option
def usage(
    *,
    tenant: str | None,
    since: float,
    until: float | None,
    by: tuple[str, ...],
    form: str,
    config_file: Path | None,
) -> None:
    """What streams have used: tokens, parked seconds, stalls. Days and months are of UTC.

    \b
    Examples:
      tokenflow usage --by day --tenant acme
      tokenflow usage --by month --by tenant --since 365d --format csv
    """  # noqa: D301  # \b keeps click from filling a paragraph
    groups = by or ("tenant",)
    with _in_one_line():
        path = _state(config_file) / USAGE_FILE
        if not path.exists():
            raise StoreError(f"nothing has been recorded at {path} yet")
        rows = summed(path, by=groups, since=since, until=until, tenant=tenant)
    click.echo(_formatted(rows, [*groups, *TOTALS], form), nl=form != "csv")


def _formatted(rows: Sequence[dict[str, Any]], columns: Sequence[str], form: str) -> str:
    if form == "json":
        return json.dumps(rows, indent=2)
    if form == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()
    return _table(
        columns, [["" if row[name] is None else str(row[name]) for name in columns] for row in rows]
    )


def _table(columns: Iterable[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(columns), *rows]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


# ---- the configuration ------------------------------------------------------------------------------


@click.command("check-config")
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--schema", is_flag=True, help="Print the JSON schema of the file instead.")
def check_config(*, file: Path | None, schema: bool) -> None:
    """Say whether a gateway would start with this file, with the environment as it is now.

    Exit code 1, and one line that names the fault, if not.
    """
    if schema:
        click.echo(json.dumps(config_schema(), indent=2))
        return
    if file is None:
        raise click.UsageError("name a file to check, or --schema")
    try:
        Rules(load_settings(file), Keyring())
    except ConfigError as error:
        raise SetupError(f"{file}: {error}") from error
    click.echo(f"{file} is valid")
