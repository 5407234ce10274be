"""What has been spent of budgets before this process began, by the record of usage."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from tokenflow_gateway.store.usage import UsageStore
from tokenflow_gateway.tenants.keys import KeyRecord
from tokenflow_gateway.tenants.limits import LocalLimits, Subject, period_start
from tokenflow_gateway.tenants.roster import Roster

__all__ = ["remember_spent", "spenders"]


def spenders(roster: Roster, keys: Iterable[KeyRecord]) -> list[Subject]:
    """All who have limits."""
    tenants = [Subject(f"tenant:{name}", tenant.limits) for name, tenant in roster.tenants.items()]
    return [*tenants, *(Subject(f"key:{key.id}", key.limits) for key in keys)]


def remember_spent(limits: LocalLimits, subjects: Iterable[Subject], usage: Path) -> None:
    """Tell `limits` of those who have a budget. Blocks; raises `StoreError`."""
    with_budget = [subject for subject in subjects if subject.limits.budget_tokens is not None]
    if not with_budget or not usage.exists():
        return
    now = time.time()
    with closing(UsageStore(usage)) as store:
        for subject in with_budget:
            kind, _, name = subject.name.partition(":")
            period, since = period_start(subject.limits.budget_period, now)
            if kind == "tenant":
                spent = store.spent(since=since, tenant=name)
            else:
                spent = store.spent(since=since, key_id=name)
            limits.remember(subject.name, period, spent)
