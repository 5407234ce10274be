"""The keys as a gateway knows them: a copy in memory, renewed when the store has changed."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import structlog

from tokenflow_gateway.relay.errors import Unauthorized
from tokenflow_gateway.store.keys import KEYS_FILE, KeyStore
from tokenflow_gateway.store.sqlite import StoreError
from tokenflow_gateway.tenants.keys import ApiKey, KeyRecord

__all__ = ["LOOK_EVERY_S", "KeyWatch", "Keyring"]

_log = structlog.stdlib.get_logger("tokenflow.keys")

LOOK_EVERY_S: Final = 0.5
"""How often the store is asked whether it has changed: what a revocation takes, at most twice that."""

_NOBODY: Final = KeyRecord(id="", hash=bytes(32), tenant="")
"""Compared with keys whose id is unknown, so that these take as long as known ones."""

_REFUSED: Final = "this API key is not known here"


class Keyring:
    """Looks keys up in memory: no request waits for the store."""

    def __init__(self, records: Iterable[KeyRecord] = (), *, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix seconds, as in the records."""
        self._clock = clock
        self._sources: dict[str, dict[str, KeyRecord]] = {}
        self._records: dict[str, KeyRecord] = {}
        self._origins: dict[str, str] = {}
        self.version = 0
        """Another one whenever the keys may have changed."""
        self.in_use = False
        """There is a key, or was one: it does not end with the last key's revocation."""
        self.replace(records)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[KeyRecord]:
        return iter(self._records.values())

    def replace(self, records: Iterable[KeyRecord], *, source: str = "store") -> None:
        """From now on these are the keys that `source` knows.

        Of a key that several sources know, the earliest revocation and expiry hold.
        """
        self._sources[source] = {record.id: record for record in records}
        merged: dict[str, KeyRecord] = {}
        for known in self._sources.values():
            for name, record in known.items():
                merged[name] = record.merged(merged[name]) if name in merged else record
        self._records = merged
        self._origins = {name: _origin(name, merged) for name in merged}
        self.in_use |= bool(merged)
        self.version += 1

    @property
    def now(self) -> float:
        """Unix seconds."""
        return self._clock()

    def ends_at(self, key_id: str | None) -> float:
        """When this key is not valid any more, as far as is known now (Unix seconds)."""
        record = None if key_id is None else self._records.get(key_id)
        ends_at = None if record is None else record.ends_at
        return math.inf if ends_at is None else ends_at

    def origin(self, key_id: str) -> str:
        """The key that this one goes back to by rotations: what they use counts as one key's."""
        return self._origins.get(key_id, key_id)

    def find(self, key: ApiKey) -> KeyRecord:
        """The record of a valid key. Raises `Unauthorized`, which tells more only to who has the secret."""
        record = self._records.get(key.id, _NOBODY)
        if not record.matches(key) or record is _NOBODY:
            raise Unauthorized(_REFUSED)
        state = record.state(self._clock())
        if state == "revoked":
            raise Unauthorized("this API key has been revoked: ask for another one")
        if state == "expired":
            raise Unauthorized("this API key has expired: ask for another one")
        return record


def _origin(key_id: str, records: Mapping[str, KeyRecord]) -> str:
    line = [key_id]
    while (record := records.get(line[-1])) is not None and (before := record.replaces) is not None:
        if before in line:  # no rotation makes a circle, but who knows where a store has been
            break
        line.append(before)
    return line[-1]


class KeyWatch:
    """Keeps a keyring up to date with the embedded store."""

    def __init__(self, keyring: Keyring, state: Path) -> None:
        """`state`: the directory of the store."""
        self.keyring = keyring
        self._path = state / KEYS_FILE
        self._failing = False

    def load(self) -> None:
        """Read the keys now, blocking; nothing stays open. Raises `StoreError`."""
        with KeyStore(self._path) as store:
            self.keyring.replace(store.records())

    @property
    def failing(self) -> bool:
        """The last look failed: the keys are as they were before."""
        return self._failing

    async def run(self) -> None:
        """Until cancelled. While the store cannot be read the keys stay as they were, and the log says so."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="keys")
        opening = thread.submit(KeyStore, self._path)
        try:
            store = await asyncio.wrap_future(opening)
            while True:
                await self._look(store, thread)
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            thread.submit(_close, opening)  # behind a look that is under way: nobody waits for that any more
            thread.shutdown(wait=False)

    async def _look(self, store: KeyStore, thread: ThreadPoolExecutor) -> None:
        try:
            records = await asyncio.wrap_future(thread.submit(_news, store))
        except StoreError as error:
            if not self._failing:
                _log.error("API keys cannot be read: those known stay valid", reason=str(error))
            self._failing = True
            return
        if self._failing:
            _log.info("API keys can be read again")
        self._failing = False
        if records is not None:
            self.keyring.replace(records)


def _close(opening: Future[KeyStore]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _news(store: KeyStore) -> list[KeyRecord] | None:
    return store.records() if store.changed() else None
