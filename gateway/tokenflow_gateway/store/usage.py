"""The embedded record of usage: one row for each stream, in one SQLite file."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec

from tokenflow_gateway.store.sqlite import explained, make_database, open_database

__all__ = ["GROUPS", "TOTALS", "USAGE_FILE", "ReadOn", "UsageRecord", "UsageStore", "summed"]

USAGE_FILE: Final = "usage.sqlite3"
"""Name of the file in the directory of the gateway's state."""


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one stream has used. The table has a column for each field, and one for who wrote it."""

    rid: str
    request_id: str
    at: float
    """Arrival, Unix seconds."""
    tenant: str
    key_id: str | None
    sla: str
    route: str
    model: str
    engine: str
    end: str
    prompt: int
    """Tokens. 0 where the engine did not say, as of requests that ended before their answer."""
    generated: int
    delivered: int
    consumed: float
    """Tokens read, as far as they are known or estimated."""
    parked_s: float
    stalls: int
    stall_s: float
    ttft_s: float | None
    duration_s: float
    """From the arrival to the end for the client."""


class ReadOn(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader has read after the end of the answer, in all."""

    rid: str
    consumed: float


_FIELDS = UsageRecord.__struct_fields__
_VERSION = 2
_SCHEMA = """
CREATE TABLE streams (
    rid TEXT PRIMARY KEY,
    request_id TEXT NOT NULL,
    at REAL NOT NULL,
    tenant TEXT NOT NULL,
    key_id TEXT,
    sla TEXT NOT NULL,
    route TEXT NOT NULL,
    model TEXT NOT NULL,
    engine TEXT NOT NULL,
    end TEXT NOT NULL,
    prompt INTEGER NOT NULL,
    generated INTEGER NOT NULL,
    delivered INTEGER NOT NULL,
    consumed REAL NOT NULL,
    parked_s REAL NOT NULL,
    stalls INTEGER NOT NULL,
    stall_s REAL NOT NULL,
    ttft_s REAL,
    duration_s REAL NOT NULL,
    writer TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX by_time ON streams (at);
CREATE INDEX by_tenant ON streams (tenant, at)
"""
_UPGRADES = {1: f"ALTER TABLE streams ADD COLUMN writer TEXT NOT NULL DEFAULT 'before-{uuid.uuid4().hex}'"}
"""The default, which is another one in each file, names those who wrote it before."""
_INSERT = f"INSERT OR REPLACE INTO streams ({', '.join(_FIELDS)}, writer) VALUES "  # noqa: S608
_ROW = f"({', '.join('?' * len(_FIELDS))}, ?)"
_ROWS = 100
"""In one statement: a thread that writes takes turns with the rest of the process at each."""
_READ_ON = "UPDATE streams SET consumed = max(consumed, ?) WHERE rid = ?"

GROUPS: Final[Mapping[str, str]] = {
    "day": "date(at, 'unixepoch')",
    "month": "strftime('%Y-%m', at, 'unixepoch')",
    "tenant": "tenant",
    "key": "coalesce(key_id, '')",
    "class": "sla",
    "model": "model",
    "engine": "engine",
    "end": "end",
}
"""What usage can be summed by, as SQL. Days and months are of UTC."""

TOTALS: Final[Mapping[str, str]] = {
    "streams": "count(*)",
    "finished": "coalesce(sum(end = 'finished'), 0)",
    "prompt": "coalesce(sum(prompt), 0)",
    "generated": "coalesce(sum(generated), 0)",
    "delivered": "coalesce(sum(delivered), 0)",
    "consumed": "coalesce(round(sum(consumed), 1), 0)",
    "parked_s": "coalesce(round(sum(parked_s), 3), 0)",
    "stalls": "coalesce(sum(stalls), 0)",
    "stall_s": "coalesce(round(sum(stall_s), 3), 0)",
    "mean_ttft_s": "round(avg(ttft_s), 4)",
}
"""The sums, as SQL."""


class UsageStore:
    """Writes and reads records. Blocks for as long as the disk, or another writer, takes."""

    def __init__(self, path: Path, *, writer: str = "") -> None:
        """Creates the file where there is none. `writer`: the name of this process. Raises `StoreError`."""
        make_database(path, schema=_SCHEMA, version=_VERSION, upgrades=_UPGRADES)
        self._path = path
        self._writer = writer
        self._connection = open_database(path)

    def close(self) -> None:
        self._connection.close()

    def write(self, entries: Iterable[UsageRecord | ReadOn]) -> None:
        """In one transaction, records first. Raises `StoreError`, and has then written nothing."""
        records, read_on = [], []
        for entry in entries:
            if isinstance(entry, UsageRecord):
                records.append((*msgspec.structs.astuple(entry), self._writer))
            else:
                read_on.append((entry.consumed, entry.rid))
        with explained(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                for at in range(0, len(records), _ROWS):
                    rows = records[at : at + _ROWS]
                    values = list(chain.from_iterable(rows))
                    self._connection.execute(_INSERT + ", ".join([_ROW] * len(rows)), values)
                self._connection.executemany(_READ_ON, read_on)
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def forget_before(self, at: float) -> int:
        """Delete older records; returns how many."""
        with explained(self._path):
            return self._connection.execute("DELETE FROM streams WHERE at < ?", (at,)).rowcount

    def spent(self, *, since: float, tenant: str | None = None, key_id: str | None = None) -> dict[str, int]:
        """Prompt and output tokens of a tenant or a key, by the process that wrote them.

        Of streams that began at `since` or later.
        """
        where, values = _where(since=since, tenant=tenant, key_id=key_id)
        with explained(self._path):
            return dict(
                self._connection.execute(
                    f"SELECT writer, sum(prompt + generated) FROM streams WHERE {where} GROUP BY writer",  # noqa: S608
                    values,
                ).fetchall()
            )


def summed(
    path: Path,
    *,
    by: Sequence[str],
    since: float = 0.0,
    until: float | None = None,
    tenant: str | None = None,
) -> list[dict[str, Any]]:
    """Usage of streams that began from `since` until before `until`, summed by some of `GROUPS`.

    Without `by` one row for all. Raises `StoreError`.
    """
    where, values = _where(since=since, until=until, tenant=tenant)
    columns = {**{name: GROUPS[name] for name in by}, **TOTALS}
    selected = ", ".join(f'{sql} AS "{name}"' for name, sql in columns.items())
    grouped = f" GROUP BY {numbers} ORDER BY {numbers}" if (numbers := _numbers(len(by))) else ""
    with closing(open_database(path, read_only=True)) as connection, explained(path):
        connection.row_factory = sqlite3.Row
        rows = connection.execute(f"SELECT {selected} FROM streams WHERE {where}{grouped}", values)  # noqa: S608
        return [dict(row) for row in rows]


def _numbers(count: int) -> str:
    """Columns by their place, as GROUP BY takes them."""
    return ", ".join(str(index + 1) for index in range(count))


def _where(*, since: float, until: float | None = None, **equal: str | None) -> tuple[str, list[Any]]:
    parts, values = ["at >= ?"], [since]
    if until is not None:
        parts.append("at < ?")
        values.append(until)
    for name, value in equal.items():
        if value is not None:
            parts.append(f"{name} = ?")
            values.append(value)  # type: ignore[arg-type]
    return " AND ".join(parts), values
