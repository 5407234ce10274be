"""SQLite databases of the gateway: private to its user, written by several processes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

__all__ = ["StoreError", "explained", "make_database", "open_database"]

_BUSY_S = 5.0
"""How long a writer waits for another one."""


class StoreError(Exception):
    """A database cannot be used; the message says which and why."""


def make_database(
    path: Path, *, schema: str, version: int, upgrades: Mapping[int, str] | None = None
) -> None:
    """Create the database, or check that it is one of this `version`. Raises `StoreError`.

    `upgrades`: the statement that makes the next version of each earlier one that can be kept.

    The directory is made with mode 0700 and the file with 0600, before anything is in it; what SQLite puts
    beside a file has the mode of the file.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
    except OSError as error:
        raise StoreError(f"cannot open {path}: {error.strerror}") from error
    with closing(open_database(path)) as connection, explained(path):
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        if found == 0:
            for statement in filter(str.strip, schema.split(";")):
                connection.execute(statement)
            found = version
        while upgrade := (upgrades or {}).get(found):
            connection.execute(upgrade)
            found += 1
        connection.execute(f"PRAGMA user_version = {found}")
        connection.execute("COMMIT")
        if found != version:
            raise StoreError(f"{path} is of another version of tokenflow ({found}, not {version})")


def open_database(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection in autocommit mode, which any one thread at a time may use. Raises `StoreError`."""
    mode = "ro" if read_only else "rw"
    with explained(path):
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=_BUSY_S,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            connection.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            connection.close()
            raise
        return connection


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raises what goes wrong in a database as a `StoreError` that names it."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"cannot use {path}: {error}") from error
