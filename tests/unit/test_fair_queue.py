"""Who goes first of those who wait."""

from __future__ import annotations

import gc
from collections import Counter
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from tokenflow_gateway.tenants import fair_queue
from tokenflow_gateway.tenants.fair_queue import FairQueue, Waiting


def waiting(
    tenant: str = "a",
    sla: str = "x",
    *,
    weight: float = 1.0,
    tenant_weight: float = 1.0,
    user: str = "",
    cost: float = 100.0,
    deadline: float = 0.0,
    pool: str = "m",
) -> Waiting:
    return Waiting(
        tenant=tenant,
        sla=sla,
        weight=weight,
        tenant_weight=tenant_weight,
        user=user,
        cost=cost,
        deadline=deadline,
        pool=pool,
    )


def everybody(_waiting: Waiting) -> bool:
    return True


def taken(queue: FairQueue, count: int) -> list[Waiting]:
    out = [queue.take(everybody) for _ in range(count)]
    return [one for one in out if one is not None]


def test_a_tenant_that_floods_does_not_hold_up_another() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.push(waiting("flood"))
    queue.push(waiting("modest"))
    assert "modest" in [one.tenant for one in taken(queue, 2)]


def test_one_queue_would_have_held_it_up() -> None:
    """The negative control: as one tenant's, the last to come is the last to go."""
    queue = FairQueue()
    for _ in range(100):
        queue.push(waiting("flood"))
    queue.push(waiting("flood", cost=7.0))
    assert [one.cost for one in taken(queue, 101)].index(7.0) == 100


def test_shares_of_tenants_are_by_weight_and_by_tokens() -> None:
    queue = FairQueue()
    for _ in range(300):
        queue.push(waiting("two", tenant_weight=2.0))
        queue.push(waiting("one", cost=50.0))
    served = Counter()
    for one in taken(queue, 150):
        served[one.tenant] += one.cost
    assert 1.8 < served["two"] / served["one"] < 2.2


def test_classes_share_by_weight_and_none_starves() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.push(waiting("b", "bronze"))
        queue.push(waiting("g", "gold", weight=9.0))
    served = Counter(one.sla for one in taken(queue, 50))
    assert served["gold"] == 45
    assert served["bronze"] == 5


def test_of_two_whose_turn_it_is_the_heavier_one_goes() -> None:
    queue = FairQueue()
    queue.push(waiting("b", "bronze"))
    queue.push(waiting("g", "gold", weight=9.0))
    assert [one.sla for one in taken(queue, 2)] == ["gold", "bronze"]


def test_of_one_pool_only_the_first_is_asked_for() -> None:
    queue, asked = FairQueue(), []

    def nothing_fits(one: Waiting) -> bool:
        asked.append(one)
        return False

    for user in range(50):
        queue.push(waiting(user=str(user)))
        queue.push(waiting(user=str(user), pool="other"))
    assert queue.take(nothing_fits) is None
    assert [one.pool for one in asked] == ["m", "other"]


def test_users_of_a_tenant_take_turns_within_its_share() -> None:
    queue = FairQueue()
    for _ in range(20):
        queue.push(waiting("a", user="busy"))
    queue.push(waiting("a", user="other"))
    for _ in range(20):
        queue.push(waiting("b"))
    served = taken(queue, 6)
    assert Counter(one.tenant for one in served) == {"a": 3, "b": 3}
    assert "other" in [one.user for one in served]


def test_a_tenants_giant_sets_itself_back_and_not_the_others_of_its_class() -> None:
    queue = FairQueue()
    queue.push(waiting("giant", "gold", weight=8.0, cost=500_000.0))
    queue.push(waiting("giant", "gold", weight=8.0))
    for _ in range(10):
        queue.push(waiting("other", "gold", weight=8.0))
    for _ in range(50):
        queue.push(waiting("b", "bronze", cost=1000.0))
    served = [one.tenant for one in taken(queue, 62)]
    assert served[0] == "giant"
    assert served.index("other") < 5, "as its class was charged for it, all of bronze would have gone first"
    own = [tenant for tenant in served if tenant != "b"]
    assert own == ["giant", *["other"] * 10, "giant"]


def test_no_row_of_new_names_keeps_a_user_waiting() -> None:
    """Though one of the tenant's waits for something else all the while."""
    queue = FairQueue()
    queue.push(waiting(user="elsewhere", pool="full"))
    queue.push(waiting(user="regular"))
    served = []
    for number in range(10):
        queue.push(waiting(user=f"new {number}"))
        one = queue.take(lambda one: one.pool != "full")
        assert one is not None
        served.append(one.user)
        if one.user == "regular":
            queue.push(waiting(user="regular"))
    assert served.count("regular") > 2


def test_nothing_is_kept_of_a_name_that_has_nobody_waiting() -> None:
    queue = FairQueue()
    queue.push(waiting(user="elsewhere", pool="full"))
    before = objects()
    for number in range(1000):
        queue.push(waiting(user=f"name {number}"))
        assert queue.take(lambda one: one.pool != "full") is not None
    assert objects() <= before + 3


def objects() -> int:
    """Of the queue's own kinds, alive."""
    gc.collect()
    return sum(type(one).__module__ == fair_queue.__name__ for one in gc.get_objects())


def test_the_earliest_deadline_of_a_tenant_goes_first() -> None:
    queue = FairQueue()
    for deadline in (3.0, 1.0, 2.0):
        queue.push(waiting(deadline=deadline))
    assert [one.deadline for one in taken(queue, 3)] == [1.0, 2.0, 3.0]


def test_who_was_idle_gets_no_credit() -> None:
    queue = FairQueue()
    for _ in range(50):
        queue.push(waiting("busy"))
    taken(queue, 40)
    for _ in range(10):
        queue.push(waiting("back"))
    served = Counter(one.tenant for one in taken(queue, 10))
    assert served["back"] in {5, 6}


def test_one_that_fits_nowhere_holds_up_nobody_of_another_model() -> None:
    queue = FairQueue()
    full, free = waiting(pool="full"), waiting(pool="free", deadline=9.0)
    queue.push(full)
    queue.push(free)
    assert queue.take(lambda one: one.pool == "free") is free
    assert queue.take(lambda one: one.pool == "free") is None
    assert len(queue) == 1


def test_who_leaves_is_not_served() -> None:
    queue = FairQueue()
    first, second = waiting(), waiting("b")
    queue.push(first)
    queue.push(second)
    queue.remove(first)
    queue.remove(first)
    assert taken(queue, 2) == [second]
    assert len(queue) == 0
    assert queue.counts() == {"x": 0}


@given(st.lists(st.tuples(st.sampled_from("pqtr"), st.sampled_from("abc"), st.sampled_from("xyz"))))
def test_whatever_happens_all_are_served_once_or_gone(steps: list[tuple[str, str, str]]) -> None:
    queue, here, out = FairQueue(), [], []
    for what, tenant, sla in steps:
        if what == "p":
            here.append(waiting(tenant, sla, pool=tenant, weight=3.0 if sla == "x" else 1.0))
            queue.push(here[-1])
        elif what == "q" and here:
            out.append(here.pop(0))
            queue.remove(out[-1])
        elif (one := queue.take(everybody if what == "t" else lambda w, t=tenant: w.tenant == t)) is not None:
            here.remove(one)
            out.append(one)
        assert len(queue) == len(here)
    rest = taken(queue, len(here) + 1)
    assert sorted(map(id, rest)) == sorted(map(id, here))


_FLOWS = st.tuples(st.sampled_from("xy"), st.sampled_from("abc"), st.integers(1, 500))


@given(st.lists(_FLOWS, max_size=20), st.lists(_FLOWS, max_size=20))
def test_who_was_served_at_once_has_had_a_turn_like_others(
    before: list[tuple[str, str, int]], crowd: list[tuple[str, str, int]]
) -> None:
    waited, passed = FairQueue(), FairQueue()
    for sla, tenant, cost in before:
        waited.push(waiting(tenant, sla, cost=cost))
        assert waited.take(everybody) is not None
        assert passed.at_once(waiting(tenant, sla, cost=cost), everybody)
    orders = []
    for queue in (waited, passed):
        for sla, tenant, cost in crowd:
            queue.push(waiting(tenant, sla, cost=cost))
        orders.append([(one.sla, one.tenant, one.cost) for one in taken(queue, len(crowd))])
    assert orders[0] == orders[1]
    assert len(waited) == len(passed) == 0


@given(st.lists(st.tuples(st.sampled_from("pa"), st.integers(0, 9), st.integers(1, 500)), max_size=60))
def test_when_idle_tenants_are_forgotten_makes_no_difference(steps: list[tuple[str, int, int]]) -> None:
    orders = []
    for few in (0, 1000):
        with patch.object(fair_queue, "_FEW", few):
            queue, order = FairQueue(), []
            for what, tenant, cost in steps:
                one = waiting(str(tenant), cost=cost)
                if what == "a" and queue.at_once(one, everybody):
                    continue
                queue.push(one)
                if len(queue) > 3:
                    order += taken(queue, 2)
            orders.append([(one.tenant, one.cost) for one in (*order, *taken(queue, len(queue)))])
    assert orders[0] == orders[1]


def test_nobody_is_served_at_once_past_those_who_wait_or_without_room() -> None:
    queue = FairQueue()
    assert not queue.at_once(waiting(), lambda _waiting: False)
    queue.push(waiting("first"))
    assert not queue.at_once(waiting("second"), everybody)
    assert [one.tenant for one in taken(queue, 2)] == ["first"]
