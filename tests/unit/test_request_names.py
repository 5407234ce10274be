"""Names of requests: whose they are can be told by who has the key, and by nobody else."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow_gateway.relay.request_names import RequestNames

NAMES = RequestNames(b"k" * 32)


def test_a_name_is_its_tenants_alone() -> None:
    name = NAMES.new("resp_", "acme", "e1")
    assert re.fullmatch(r"resp_[0-9a-f]{56}", name)
    assert NAMES.is_of(name, "acme")
    assert not NAMES.is_of(name, "low")
    assert NAMES.new("resp_", "acme", "e1") != name


def test_a_name_tells_its_engine() -> None:
    names = {engine: NAMES.new("resp_", "acme", engine) for engine in ("e1", "e2")}
    for engine, name in names.items():
        assert NAMES.engine_of(name, ["e0", "e2", "e1"]) == engine
        assert NAMES.engine_of(name, ["e0"]) is None


def test_all_who_have_the_key_agree_and_no_others() -> None:
    name = NAMES.new("tf-", "acme", "e1")
    assert RequestNames(b"k" * 32).is_of(name, "acme")
    assert RequestNames(b"k" * 32).engine_of(name, ["e1"]) == "e1"
    assert not RequestNames(b"other").is_of(name, "acme")
    assert RequestNames(b"other").engine_of(name, ["e1"]) is None


@pytest.mark.parametrize("at", [0, 5, 20, -24, -17, -16, -1])
def test_a_name_that_was_changed_is_nobodys(at: int) -> None:
    name = NAMES.new("resp_", "acme", "e1")
    other = "0" if name[at] != "0" else "1"
    changed = name[:at] + other + (name[at + 1 :] if at != -1 else "")
    assert len(changed) == len(name)
    assert not NAMES.is_of(changed, "acme")


@given(st.text(max_size=80), st.text(max_size=20))
def test_what_anybody_makes_up_is_nobodys(name: str, tenant: str) -> None:
    assert not NAMES.is_of(name, tenant)
    assert NAMES.engine_of(name, [tenant]) is None


def test_what_is_no_text_is_nobodys() -> None:
    assert not NAMES.is_of("resp_" + 20 * "\ud800", "acme")
    assert NAMES.engine_of("resp_" + 20 * "\ud800", ["e1"]) is None
