"""API keys in the store of a gateway under test."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tokenflow_gateway.store.keys import KEYS_FILE, KeyStore
from tokenflow_gateway.tenants.keys import KeyRecord, NewKey, new_key

__all__ = ["make_key", "revoke_key"]


def make_key(state: Path, tenant: str = "acme", **fields: Any) -> NewKey:
    """A key that a gateway with this `state_dir` knows, or soon will."""
    made = new_key()
    kept = KeyRecord(id=made.key.id, hash=made.key.hash, tenant=tenant, created_at=time.time(), **fields)
    with KeyStore(state / KEYS_FILE) as store:
        store.add(kept)
    return made


def revoke_key(state: Path, made: NewKey) -> None:
    """As `tokenflow keys revoke` does."""
    with KeyStore(state / KEYS_FILE) as store:
        store.revoke(made.key.id, at=time.time())
