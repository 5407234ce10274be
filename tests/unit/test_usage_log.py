"""The queue of usage records: bounded, counted where it overflows, patient with a store that fails."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from tokenflow_gateway.store.usage import USAGE_FILE, ReadOn, UsageRecord, UsageStore, summed
from tokenflow_gateway.tenants.commands import usage
from tokenflow_gateway.tenants.settings import UsageSettings
from tokenflow_gateway.tenants.usage import UsageLog

DAY = 86_400.0


def record(rid: str = "tf-1", **fields: object) -> UsageRecord:
    base: dict[str, object] = {
        "rid": rid,
        "request_id": "req",
        "at": 1000.0,
        "tenant": "acme",
        "key_id": None,
        "sla": "gold",
        "route": "/v1/chat/completions",
        "model": "m",
        "engine": "e",
        "end": "finished",
        "prompt": 10,
        "generated": 20,
        "delivered": 20,
        "consumed": 5.5,
        "parked_s": 1.5,
        "stalls": 1,
        "stall_s": 0.25,
        "ttft_s": 0.5,
        "duration_s": 3.0,
    }
    return UsageRecord(**{**base, **fields})  # type: ignore[arg-type]


class Dropped:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, count: int) -> None:
        self.count += count


def log_to(state: Path, dropped: Dropped, **options: int) -> UsageLog:
    return UsageLog(state, UsageSettings(), on_dropped=dropped, **options)


async def test_what_was_put_before_the_end_is_written(tmp_path: Path) -> None:
    dropped = Dropped()
    log = log_to(tmp_path, dropped)
    log.start()
    for number in range(1234):
        log._put(record(f"tf-{number}", at=time.time()))
    await log.aclose()
    (total,) = summed(tmp_path / USAGE_FILE, by=())
    assert (total["streams"], dropped.count) == (1234, 0)


async def test_what_does_not_fit_is_dropped_and_counted(tmp_path: Path) -> None:
    """Nothing is lost in silence: written and dropped are all there were."""
    dropped = Dropped()
    log = log_to(tmp_path, dropped, most_waiting=10)
    for number in range(15):  # nobody writes yet
        log._put(record(f"tf-{number}", at=time.time()))
    assert dropped.count == 5
    log.start()
    await log.aclose()
    (total,) = summed(tmp_path / USAGE_FILE, by=())
    assert total["streams"] + dropped.count == 15


async def test_a_store_that_cannot_be_opened_costs_the_records_only(tmp_path: Path) -> None:
    dropped = Dropped()
    (tmp_path / "taken").write_text("a file where the directory should be")
    log = log_to(tmp_path / "taken", dropped)
    log.start()
    log._put(record())
    await log.aclose()
    assert dropped.count == 1


async def test_old_records_are_forgotten(tmp_path: Path) -> None:
    log = log_to(tmp_path, Dropped())
    log.start()
    log._put(record("old", at=time.time() - 401 * DAY))
    log._put(record("new", at=time.time() - 399 * DAY))
    await log.aclose()
    assert [row["streams"] for row in summed(tmp_path / USAGE_FILE, by=[])] == [1]


def test_records_are_summed_by_what_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / USAGE_FILE
    store = UsageStore(path, writer="one")
    store.write(
        [
            record("a"),
            record("b", tenant="low", sla="bronze", at=1000 + DAY, ttft_s=None, end="client_gone"),
            record("c", key_id="k"),
            ReadOn(rid="a", consumed=20.0),
            ReadOn(rid="b", consumed=1.0),
            ReadOn(rid="nobody", consumed=1.0),
        ]
    )
    by_tenant = {row["tenant"]: row for row in summed(path, by=["tenant"])}
    acme, low = by_tenant["acme"], by_tenant["low"]
    assert (acme["streams"], acme["finished"], acme["prompt"], acme["generated"]) == (2, 2, 20, 40)
    assert (acme["consumed"], acme["parked_s"], acme["stalls"], acme["stall_s"]) == (25.5, 3.0, 2, 0.5)
    assert (low["finished"], low["consumed"], low["mean_ttft_s"]) == (0, 5.5, None)
    assert [row["day"] for row in summed(path, by=["day"])] == ["1970-01-01", "1970-01-02"]
    assert [row["streams"] for row in summed(path, by=[], since=1000 + DAY)] == [1]
    assert [row["streams"] for row in summed(path, by=[], until=1000 + DAY, tenant="acme")] == [2]
    assert summed(path, by=["class", "key"], tenant="nobody") == []
    store.close()
    store = UsageStore(path, writer="another")
    store.write([record("d")])
    assert store.spent(since=0, tenant="acme") == {"one": 60, "another": 30}
    assert store.spent(since=0, key_id="k") == {"one": 30}
    assert store.spent(since=1001, tenant="acme") == {}
    assert store.forget_before(1001.0) == 3
    store.close()


def test_a_record_from_before_processes_had_names_goes_on(tmp_path: Path) -> None:
    path = tmp_path / USAGE_FILE
    UsageStore(path).close()
    with closing(sqlite3.connect(path)) as older:
        older.execute("ALTER TABLE streams DROP COLUMN writer")
        row = msgspec.structs.astuple(record("old"))
        older.execute(f"INSERT INTO streams VALUES ({', '.join('?' * len(row))})", row)  # noqa: S608
        older.execute("PRAGMA user_version = 1")
        older.commit()
    for number in range(2):  # once is enough
        store = UsageStore(path, writer="now")
        store.write([record(f"new-{number}")])
        spent = store.spent(since=0, tenant="acme")
        store.close()
    assert spent.pop("now") == 60
    ((before, tokens),) = spent.items()
    assert before.startswith("before-")
    assert tokens == 30


def test_a_tenants_name_is_no_sql(tmp_path: Path) -> None:
    path = tmp_path / USAGE_FILE
    store = UsageStore(path)
    store.write([record()])
    assert store.spent(since=0, tenant="' OR 1=1 --") == {}
    store.close()


@pytest.mark.parametrize("form", ["table", "csv", "json"])
def test_the_command_prints_what_machines_and_people_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    store = UsageStore(tmp_path / USAGE_FILE)
    store.write([record(at=time.time() - 60), record("b", at=time.time() - 40 * DAY)])
    store.close()
    monkeypatch.setenv("TOKENFLOW_STATE_DIR", str(tmp_path))
    shown = CliRunner().invoke(usage, ["--by", "class", "--since", "7d", "--format", form])
    assert shown.exit_code == 0, shown.output
    if form == "json":
        (row,) = json.loads(shown.stdout)
    elif form == "csv":
        (row,) = csv.DictReader(io.StringIO(shown.stdout))
    else:
        head, line = shown.stdout.splitlines()
        row = dict(zip(head.split(), line.split(), strict=True))
    assert (row["class"], str(row["streams"]), str(row["generated"])) == ("gold", "1", "20")


def test_a_time_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENFLOW_STATE_DIR", str(tmp_path))
    refused = CliRunner().invoke(usage, ["--since", "yesterday"])
    assert refused.exit_code == 2
    assert "neither a duration" in refused.output
