"""What a request asks for against what it gets: polarity of every alias, and rights that bound them all."""

from __future__ import annotations

import msgspec
import pytest

from tokenflow_gateway.relay.errors import BadRequest, Forbidden
from tokenflow_gateway.tenants.grants import grant, grant_headers
from tokenflow_gateway.tenants.keys import KeyRecord
from tokenflow_gateway.tenants.model import Grant, Principal
from tokenflow_gateway.tenants.roster import Roster
from tokenflow_gateway.tenants.settings import ClassSettings, TenantSettings
from tokenflow_gateway.tenants.wishes import Wishes, read_wishes

ROSTER = Roster(
    {
        "gold": ClassSettings(weight=8, max_weight=16, ttft_ms=500, may_park=False, engine_priority=10),
        "silver": ClassSettings(weight=4, ttft_ms=1000, rate_floor=6, max_rate=20),
        "bronze": ClassSettings(weight=1, max_weight=2, ttft_ms=4000, max_rate=10),
    },
    {
        "low": TenantSettings(classes=("bronze",)),
        "mid": TenantSettings(classes=("bronze", "silver"), engines=("e1", "e2")),
        "all": TenantSettings(classes=("gold", "silver", "bronze"), default_class="silver"),
    },
)


def key(tenant: str, **fields: object) -> KeyRecord:
    return KeyRecord(id="k", hash=b"", tenant=tenant, **fields)  # type: ignore[arg-type]


def holder(tenant: str, **fields: object) -> Principal:
    return ROSTER.holder(key(tenant, **fields))


def wishes(body_priority: object = None, **headers: str) -> Wishes:
    """Headers by their names with underscores."""
    raw = None if body_priority is None else msgspec.Raw(msgspec.json.encode(body_priority))
    return read_wishes([(n.replace("_", "-").encode(), v.encode()) for n, v in headers.items()], raw)


def granted(tenant: str, body_priority: object = None, rate: float | None = None, **headers: str) -> Grant:
    asked = wishes(body_priority, **headers)
    return grant(ROSTER, holder(tenant), asked, reader="human", rate=rate)


# ---- classes ----------------------------------------------------------------------------------------


def test_who_asks_for_nothing_gets_the_default_class_as_it_is() -> None:
    got = granted("all")
    assert (got.sla.name, got.weight, got.ttft_s, got.may_park, got.reduced) == ("silver", 4, 1.0, True, ())
    assert granted("low").sla.name == "bronze"


def test_a_class_of_the_tenant_is_granted() -> None:
    got = granted("all", x_tokenflow_sla="gold")
    assert (got.sla.name, got.weight, got.may_park, got.engine_priority) == ("gold", 8, False, 10)
    assert got.reduced == ()


@pytest.mark.parametrize(("tenant", "gets"), [("low", "bronze"), ("mid", "silver")])
def test_a_class_beyond_the_tenants_is_its_largest_that_is_no_larger_and_is_said_so(
    tenant: str, gets: str
) -> None:
    got = granted(tenant, x_tokenflow_sla="gold")
    assert (got.sla.name, got.reduced) == (gets, ("sla",))
    assert (b"x-tokenflow-reduced", b"sla") in grant_headers(got, tells_class=True)
    assert (b"x-tokenflow-sla", gets.encode()) in grant_headers(got, tells_class=True)


def test_a_class_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(BadRequest, match="may be one of bronze, silver"):
        granted("mid", x_tokenflow_sla="platinum")


def test_where_no_class_is_configured_any_name_is_the_default_one() -> None:
    """Clients may name classes before anybody has configured them; the answer says that it did nothing."""
    plain = Roster({}, {})
    got = grant(plain, plain.anonymous(), wishes(x_tokenflow_sla="gold"), reader="human", rate=None)
    assert (got.sla.name, got.weight, got.reduced) == ("default", 1, ("sla",))
    assert grant_headers(got, tells_class=plain.tells_class) == [(b"x-tokenflow-reduced", b"sla")]


def test_a_key_may_have_less_than_its_tenant_and_never_more() -> None:
    narrow = holder("all", classes=("bronze", "gold"), engines=frozenset({"e1"}))
    assert (narrow.classes, narrow.default_class) == (("gold", "bronze"), "gold")
    assert narrow.engines == {"e1"}
    assert holder("low", classes=("gold", "bronze")).classes == ("bronze",)
    assert holder("mid", engines=frozenset({"e2", "e3"})).engines == {"e2"}
    for fields in ({"classes": ("gold",)}, {"classes": ()}):
        with pytest.raises(Forbidden):
            holder("low", **fields)
    with pytest.raises(Forbidden):
        holder("mid", engines=frozenset({"e3"}))


def test_a_tenant_that_is_not_configured_gets_the_default_class_only() -> None:
    assert holder("stranger").classes == ("default",)


# ---- targets ----------------------------------------------------------------------------------------


def test_more_time_may_be_asked_for_but_not_less() -> None:
    assert granted("low", x_tokenflow_ttft_ms="9000").ttft_s == 9.0
    got = granted("low", x_tokenflow_ttft_ms="1")
    assert (got.ttft_s, got.reduced) == (4.0, ("ttft",))


def test_no_rate_above_that_of_the_class_and_none_below_its_floor() -> None:
    assert granted("low", rate=8.0).declared_rate == 8.0
    got = granted("low", rate=1000.0)
    assert (got.declared_rate, got.reduced) == (10.0, ("rate",))
    assert granted("mid", rate=2.0, x_tokenflow_sla="silver").declared_rate == 6.0
    assert granted("mid", x_tokenflow_sla="silver").declared_rate is None


def test_nothing_that_bronze_says_makes_it_more_than_bronze_may_be() -> None:
    """All headers and fields at once, each as greedy as it can be."""
    got = granted(
        "low",
        body_priority=2**40,
        rate=1000.0,
        x_tokenflow_sla="gold",
        x_tokenflow_ttft_ms="1",
        x_smg_priority="system",
        x_dynamo_request_priority="2147483647",
        x_llm_d_slo_ttft_ms="1",
        x_llm_d_slo_tpot_ms="1",
    )
    bronze = ROSTER.classes["bronze"]
    assert got.sla == bronze
    assert got.weight == bronze.max_weight
    assert got.ttft_s == bronze.ttft_s
    assert got.declared_rate == bronze.max_rate
    assert got.engine_priority is None
    assert set(got.reduced) == {"sla", "ttft", "rate", "priority"}


def test_without_a_max_weight_no_request_can_raise_its_own() -> None:
    got = granted("mid", x_tokenflow_sla="silver", x_smg_priority="interactive")
    assert (got.weight, got.reduced) == (4, ("priority",))


# ---- aliases: which way is more ---------------------------------------------------------------------


def test_smg_classes_go_from_system_to_bulk() -> None:
    order = ["system", "interactive", "default", "bulk"]
    priorities = [wishes(x_smg_priority=name).priority for name in order]
    assert priorities == sorted(priorities, reverse=True)
    assert len(set(priorities)) == 4
    assert wishes(x_smg_priority="default").priority == wishes(x_smg_priority="nonsense").priority == 0
    assert wishes(x_smg_priority="SYSTEM").priority == wishes(x_smg_priority="system").priority


def test_dynamos_numbers_are_higher_first_and_not_below_zero() -> None:
    numbers = ["-5", "0", "1", "7", "2147483647"]
    assert [wishes(x_dynamo_request_priority=n).priority for n in numbers] == [0, 0, 1, 7, 2**31 - 1]
    for nonsense in ("", "high", "1.5", "2147483648", "99999999999999"):
        assert wishes(x_dynamo_request_priority=nonsense).priority == 0


def test_the_bodys_priority_is_sglangs_higher_first() -> None:
    urgent, lazy = granted("all", 1, x_tokenflow_sla="gold"), granted("all", -1, x_tokenflow_sla="gold")
    assert (lazy.weight, urgent.weight) == (4, 16)
    assert lazy.reduced == urgent.reduced == ()
    for nonsense in ("high", [1], {"a": 1}):
        assert wishes(nonsense).priority == 0


def test_llm_ds_targets_are_milliseconds_lower_is_stricter() -> None:
    assert wishes(x_llm_d_slo_ttft_ms="2500").ttft_s == 2.5
    assert wishes(x_llm_d_slo_tpot_ms="50").rate == 20.0
    assert wishes(x_llm_d_slo_tpot_ms="200").rate == 5.0
    for nonsense in ("", "0", "-1", "fast", "1e3", "nan"):
        assert wishes(x_llm_d_slo_ttft_ms=nonsense, x_llm_d_slo_tpot_ms=nonsense) == Wishes()


def test_a_fairness_id_orders_nothing() -> None:
    got = granted("low", x_llm_d_inference_fairness_id="ann")
    assert got.fairness_id == "ann"
    assert (got.weight, got.sla.name, got.reduced, got.tenant) == (1, "bronze", (), "low")


def test_own_headers_go_before_aliases_and_headers_before_the_body() -> None:
    assert wishes(x_tokenflow_ttft_ms="100", x_llm_d_slo_ttft_ms="900").ttft_s == 0.1
    assert wishes(7, x_smg_priority="bulk", x_dynamo_request_priority="3").priority == -1
    assert wishes(7, x_dynamo_request_priority="3").priority == 3
    got = grant(ROSTER, holder("low"), wishes(x_llm_d_slo_tpot_ms="200"), reader="human", rate=2.0)
    assert got.declared_rate == 2.0


@pytest.mark.parametrize("value", ["", "0", "-1", "soon", "1e9", "3600001", "nan"])
def test_an_own_header_that_means_nothing_is_refused(value: str) -> None:
    with pytest.raises(BadRequest, match="X-TokenFlow-TTFT-Ms"):
        wishes(x_tokenflow_ttft_ms=value)


def test_who_asks_for_nothing_is_read_cheaply() -> None:
    assert not wishes(x_request_id="1").asks
    assert wishes(x_tokenflow_sla="gold").asks
