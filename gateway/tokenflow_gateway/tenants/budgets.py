"""What has been spent of budgets, by the record of usage."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from tokenflow_gateway.store.usage import UsageStore
from tokenflow_gateway.tenants.keyring import Keyring
from tokenflow_gateway.tenants.limits import Subject, period_start
from tokenflow_gateway.tenants.roster import Roster

__all__ = ["Spender", "Spent", "spenders", "spent_on_record"]


class Spent(NamedTuple):
    """Tokens of a budget that one process has spent in the current period."""

    subject: str
    period: str
    process: str
    tokens: int


class Spender(NamedTuple):
    """Who has limits, and whose streams in the record of usage they are for: a tenant's, or one key's."""

    subject: Subject
    tenant: str | None = None
    key_id: str | None = None


def spenders(roster: Roster, keyring: Keyring) -> list[Spender]:
    """All who have limits. A key and those that it replaces are several of one subject."""
    tenants = [
        Spender(Subject(f"tenant:{name}", tenant.limits), tenant=name)
        for name, tenant in roster.tenants.items()
    ]
    keys = [Spender(Subject(f"key:{keyring.origin(key.id)}", key.limits), key_id=key.id) for key in keyring]
    return [*tenants, *keys]


def spent_on_record(spenders: Iterable[Spender], usage: Path) -> list[Spent]:
    """By those who have a budget. Blocks; raises `StoreError`."""
    with_budget = [spender for spender in spenders if spender.subject.limits.budget_tokens is not None]
    if not with_budget or not usage.exists():
        return []
    now = time.time()
    found: Counter[tuple[str, str, str]] = Counter()
    with closing(UsageStore(usage)) as store:
        for (name, limits), tenant, key_id in with_budget:
            period, since = period_start(limits.budget_period, now)
            for process, tokens in store.spent(since=since, tenant=tenant, key_id=key_id).items():
                found[name, period, process] += tokens
    return [Spent(*whose, tokens) for whose, tokens in found.items()]
