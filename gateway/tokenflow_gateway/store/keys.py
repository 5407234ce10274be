"""The embedded store of API keys: one SQLite file, written by `tokenflow keys`, read by gateways."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Self

from tokenflow_gateway.store.sqlite import StoreError, explained, make_database, open_database
from tokenflow_gateway.tenants.keys import KeyRecord
from tokenflow_gateway.tenants.model import UNLIMITED, Limits

__all__ = ["KEYS_FILE", "KeyStore", "UnknownKey"]

KEYS_FILE: Final = "keys.sqlite3"
"""Name of the file in the directory of the gateway's state."""

_VERSION = 1
_SCHEMA = """
CREATE TABLE keys (
    id TEXT PRIMARY KEY,
    hash BLOB NOT NULL,
    tenant TEXT NOT NULL,
    kind TEXT NOT NULL,
    label TEXT NOT NULL,
    classes TEXT,
    engines TEXT,
    limits TEXT,
    created_at REAL NOT NULL,
    expires_at REAL,
    revoked_at REAL,
    replaces TEXT
) STRICT
"""
_COLUMNS = (
    "id",
    "hash",
    "tenant",
    "kind",
    "label",
    "classes",
    "engines",
    "limits",
    "created_at",
    "expires_at",
    "revoked_at",
    "replaces",
)
_INSERT = f"INSERT INTO keys ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"  # noqa: S608
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM keys ORDER BY created_at, id"  # noqa: S608


class UnknownKey(StoreError):
    """There is no key of this id."""


class KeyStore:
    """Reads and writes keys. Blocks for as long as the disk, or another writer, takes.

    `changed` and `records` are for one thread at a time.
    """

    def __init__(self, path: Path) -> None:
        """Creates the file where there is none. Raises `StoreError`."""
        make_database(path, schema=_SCHEMA, version=_VERSION)
        self._path = path
        self._connection = open_database(path)
        self._file = _identity(path)
        self._seen: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    # ---- reading -----------------------------------------------------------------------------------

    def changed(self) -> bool:
        """Whether anything has changed since this was last asked; True at first. Raises `StoreError`.

        SQLite counts the commits of other connections: no table is read. A file that was put in the place of
        this one is opened anew; one that is gone is not made again.
        """
        file = _identity(self._path)
        if file is None:
            raise StoreError(f"{self._path} is gone")
        if file != self._file:
            self._connection.close()
            self._connection = open_database(self._path)
            self._file, self._seen = file, None
        with explained(self._path):
            (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        before, self._seen = self._seen, version
        return bool(version != before)

    def records(self) -> list[KeyRecord]:
        """All keys, revoked and expired ones too, oldest first. Raises `StoreError`."""
        with explained(self._path):
            rows = self._connection.execute(_SELECT).fetchall()
        try:
            return [_record(row) for row in rows]
        except (TypeError, ValueError) as error:
            raise StoreError(f"{self._path} has a key that cannot be read: {error}") from error

    # ---- writing -----------------------------------------------------------------------------------

    def add(self, record: KeyRecord) -> None:
        with self._writing() as connection:
            connection.execute(_INSERT, _row(record))

    def revoke(self, key_id: str, *, at: float) -> KeyRecord:
        """From `at` on (Unix seconds) the key is refused; an earlier revocation stays.

        Raises `UnknownKey`.
        """
        with self._writing() as connection:
            connection.execute(
                "UPDATE keys SET revoked_at = min(coalesce(revoked_at, ?1), ?1) WHERE id = ?2", (at, key_id)
            )
        return self.get(key_id)

    def replace(self, record: KeyRecord, *, old_expires_at: float) -> None:
        """Add `record`, and have the key that it replaces end at the latest then."""
        with self._writing() as connection:
            connection.execute(_INSERT, _row(record))
            connection.execute(
                "UPDATE keys SET expires_at = min(coalesce(expires_at, ?1), ?1) WHERE id = ?2",
                (old_expires_at, record.replaces),
            )

    def get(self, key_id: str) -> KeyRecord:
        """Raises `UnknownKey`."""
        found = next((record for record in self.records() if record.id == key_id), None)
        if found is None:
            raise UnknownKey(f"there is no key {key_id!r}: `tokenflow keys list` shows all")
        return found

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it or nothing."""
        with explained(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file this is; None if there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _row(record: KeyRecord) -> tuple[Any, ...]:
    return (
        record.id,
        record.hash,
        record.tenant,
        record.kind,
        record.label,
        None if record.classes is None else json.dumps(record.classes),
        None if record.engines is None else json.dumps(sorted(record.engines)),
        None if record.limits == UNLIMITED else json.dumps(asdict(record.limits)),
        record.created_at,
        record.expires_at,
        record.revoked_at,
        record.replaces,
    )


def _record(row: tuple[Any, ...]) -> KeyRecord:
    given = dict(zip(_COLUMNS, row, strict=True))
    classes, engines, limits = given.pop("classes"), given.pop("engines"), given.pop("limits")
    return KeyRecord(
        **given,
        classes=None if classes is None else tuple(json.loads(classes)),
        engines=None if engines is None else frozenset(json.loads(engines)),
        limits=UNLIMITED if limits is None else Limits(**json.loads(limits)),
    )
