"""API keys: what one is, what is kept of it, and when it opens nothing any more."""

from __future__ import annotations

import asyncio
import hmac
import os
import sqlite3
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.gateway import eventually
from tokenflow_gateway.relay.errors import Unauthorized
from tokenflow_gateway.store.keys import KeyStore, UnknownKey
from tokenflow_gateway.store.sqlite import StoreError
from tokenflow_gateway.tenants.keyring import Keyring, KeyWatch
from tokenflow_gateway.tenants.keys import ApiKey, KeyRecord, new_key, parse_key
from tokenflow_gateway.tenants.model import Limits

NOW = 1000.0


def record(key: ApiKey, **fields: object) -> KeyRecord:
    return KeyRecord(**{"id": key.id, "hash": key.hash, "tenant": "acme", "created_at": NOW, **fields})  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "keys.sqlite3"


@pytest.fixture
def store(path: Path) -> Iterator[KeyStore]:
    with KeyStore(path) as store:
        yield store


# ---- a key ------------------------------------------------------------------------------------------


def test_a_key_is_read_back_as_it_was_made() -> None:
    made = new_key()
    assert parse_key(made.text) == made.key
    assert made.text.startswith(f"tf-{made.key.id}-")


def test_no_two_keys_are_alike_and_each_has_at_least_128_random_bits() -> None:
    made = [new_key().key for _ in range(200)]
    assert len({key.secret for key in made}) == len({key.id for key in made}) == 200
    letters = set("".join(key.secret for key in made))
    assert len(letters) == 62  # 43 of them: 256 bits
    assert {len(key.secret) for key in made} == {43}


@pytest.mark.parametrize(
    "text", ["", "tf-", "any", "sk-abc", "tf-short-secret", "TF-{}", " {}", "{}x", "{}\n", "Bearer {}"]
)
def test_anything_else_is_no_key(text: str) -> None:
    assert parse_key(text.format(new_key().text)) is None


def test_a_key_shows_no_secret_where_it_is_printed() -> None:
    made = new_key()
    kept = record(made.key)
    assert made.key.id in repr(made)
    assert made.key.secret not in repr(made) + str(made) + repr(made.key) + repr(kept)


def test_a_rotated_key_goes_back_to_the_first_of_its_line() -> None:
    first, second, third, other = (new_key().key for _ in range(4))
    keyring = Keyring(
        [record(first), record(second, replaces=first.id), record(third, replaces=second.id), record(other)]
    )
    assert [keyring.origin(key.id) for key in (first, second, third)] == [first.id] * 3
    assert keyring.origin(other.id) == other.id
    without_the_first = Keyring([record(second, replaces=first.id)])
    assert without_the_first.origin(second.id) == first.id
    circle = Keyring([record(first, replaces=second.id), record(second, replaces=first.id)])
    assert circle.origin(first.id) in {first.id, second.id}


# ---- what is valid ----------------------------------------------------------------------------------


def test_a_valid_key_is_found() -> None:
    key = new_key().key
    assert Keyring([record(key)]).find(key).tenant == "acme"


@pytest.mark.parametrize("wrong", ["secret", "id"])
def test_unknown_id_and_wrong_secret_are_told_the_same(wrong: str) -> None:
    key, other = new_key().key, new_key().key
    tried = ApiKey(key.id, other.secret) if wrong == "secret" else ApiKey(other.id, key.secret)
    with pytest.raises(Unauthorized, match=r"^this API key is not known here$"):
        Keyring([record(key)]).find(tried)


@pytest.mark.parametrize(
    ("fields", "at", "message"),
    [
        ({"expires_at": NOW}, NOW, "expired"),
        ({"expires_at": NOW}, NOW - 1, None),
        ({"revoked_at": NOW}, NOW, "revoked"),
        ({"revoked_at": NOW, "expires_at": NOW}, NOW, "revoked"),
    ],
)
def test_a_key_ends(fields: dict[str, object], at: float, message: str | None) -> None:
    key = new_key().key
    keyring = Keyring([record(key, **fields)], clock=lambda: at)
    if message is None:
        assert keyring.find(key).id == key.id
        return
    with pytest.raises(Unauthorized, match=message):
        keyring.find(key)
    with pytest.raises(Unauthorized, match="not known here"):  # who has not the secret is told nothing
        keyring.find(ApiKey(key.id, new_key().key.secret))


def test_every_try_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a known id and of an unknown one alike: two digests of one length, by `hmac.compare_digest`."""
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    key = new_key().key
    keyring = Keyring([record(key)])
    for tried in (ApiKey(key.id, new_key().key.secret), new_key().key):
        with pytest.raises(Unauthorized):
            keyring.find(tried)
    assert compared == [(32, 32), (32, 32)]


def test_a_keyring_stays_in_use_when_its_last_key_is_gone() -> None:
    """Losing the keys is not to open the gateway."""
    keyring = Keyring([record(new_key().key)])
    keyring.replace([])
    assert keyring.in_use
    assert not Keyring().in_use


# ---- what is kept -----------------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was(store: KeyStore) -> None:
    key = new_key().key
    kept = record(
        key,
        kind="admin",
        label="ops",
        classes=("gold", "bronze"),
        engines=frozenset({"e1"}),
        limits=Limits(requests_per_minute=5),
        expires_at=2000.0,
    )
    store.add(kept)
    assert store.records() == [kept]


def test_neither_key_nor_secret_is_on_the_disk(store: KeyStore, path: Path) -> None:
    made = new_key()
    store.add(record(made.key))
    data = b"".join(file.read_bytes() for file in path.parent.iterdir())
    assert made.key.id.encode() in data
    assert made.key.hash in data
    assert made.key.secret.encode() not in data


def test_only_their_owner_may_read_the_files(store: KeyStore, path: Path) -> None:
    store.add(record(new_key().key))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert len(modes) == 3
    assert set(modes.values()) == {0o600}, modes


def test_a_file_that_others_could_read_is_closed_to_them(path: Path) -> None:
    KeyStore(path).close()
    path.chmod(0o644)
    KeyStore(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_change_by_another_is_seen_without_reading_the_keys(store: KeyStore, path: Path) -> None:
    assert store.changed()
    assert not store.changed()
    key = new_key().key
    with KeyStore(path) as other:
        other.add(record(key))
        assert store.changed()
        assert not store.changed()
        other.revoke(key.id, at=NOW)
    assert store.changed()
    assert store.records()[0].state(NOW) == "revoked"


def test_a_file_in_the_place_of_the_old_one_is_read(store: KeyStore, path: Path, tmp_path: Path) -> None:
    assert store.changed()
    key = new_key().key
    with KeyStore(tmp_path / "other.sqlite3") as other:
        other.add(record(key))
    os.replace(tmp_path / "other.sqlite3", path)
    assert store.changed()
    assert [kept.id for kept in store.records()] == [key.id]


def test_a_file_that_is_gone_is_a_failure_not_an_empty_store(store: KeyStore, path: Path) -> None:
    path.unlink()
    with pytest.raises(StoreError, match="is gone"):
        store.changed()
    assert not path.exists()


def test_a_first_revocation_stays(store: KeyStore) -> None:
    key = new_key().key
    store.add(record(key))
    assert store.revoke(key.id, at=10.0).revoked_at == 10.0
    assert store.revoke(key.id, at=20.0).revoked_at == 10.0
    with pytest.raises(UnknownKey):
        store.revoke("nobody", at=1.0)


def test_a_rotated_key_ends_after_the_overlap_and_never_later_than_it_would_have(store: KeyStore) -> None:
    old, short = new_key().key, new_key().key
    store.add(record(old))
    store.add(record(short, expires_at=NOW + 1))
    for key in (old, short):
        store.replace(replace(record(new_key().key), replaces=key.id), old_expires_at=NOW + 60)
    assert store.get(old.id).expires_at == NOW + 60
    assert store.get(short.id).expires_at == NOW + 1


def test_a_rotation_that_fails_changes_nothing(store: KeyStore) -> None:
    old = new_key().key
    store.add(record(old))
    with pytest.raises(StoreError):
        store.replace(replace(record(old), replaces=old.id), old_expires_at=NOW)  # the id is taken
    assert store.get(old.id).expires_at is None


def test_a_store_of_another_version_is_refused(path: Path) -> None:
    KeyStore(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(StoreError, match=r"another version of tokenflow \(9, not 1\)"):
        KeyStore(path)


def test_what_is_no_database_is_refused_in_words(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("not a database, but longer than its header would have to be " * 20)
    with pytest.raises(StoreError, match=r"keys\.sqlite3: file is not a database"):
        KeyStore(path)


async def test_the_store_is_not_closed_while_a_thread_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite does not survive that: the whole process would go down as the gateway ends."""
    reading, go_on = threading.Event(), threading.Event()
    done: list[str] = []
    whole = KeyStore.close

    def changed(_store: KeyStore) -> bool:
        reading.set()
        go_on.wait(10)
        done.append("read")
        return False

    def close(store: KeyStore) -> None:
        done.append("closed")
        whole(store)

    monkeypatch.setattr(KeyStore, "changed", changed)
    monkeypatch.setattr(KeyStore, "close", close)
    watching = asyncio.create_task(KeyWatch(Keyring(), tmp_path).run())
    assert await asyncio.to_thread(reading.wait, 10)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    go_on.set()
    await eventually(lambda: len(done) == 2, "read, and closed")
    assert done == ["read", "closed"]
