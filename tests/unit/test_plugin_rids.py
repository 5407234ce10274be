"""Names of the engine's requests lead back to the gateway's stream."""

from __future__ import annotations

import uuid

import pytest

from tokenflow_engine.control.rids import lineage, name_parts, name_sample


def test_a_plain_rid_is_its_own_stream_with_one_request():
    rid = uuid.uuid4().hex
    assert lineage(rid) == (rid, 1, False)


@pytest.mark.parametrize("rid", ["ab", "tf-0_1", "a_3of7", "x_0of2_0123456789abcdef"])
def test_parts_and_samples_lead_back_whatever_the_rid_looks_like(rid: str):
    parts = name_parts(rid, total=12)
    assert len(set(parts)) == 12
    assert [lineage(part) for part in parts] == [(rid, 12, False)] * 12
    sample = name_sample(parts[3], unique=uuid.uuid4().hex)
    assert lineage(sample) == (rid, 12, True)


def test_no_part_is_a_prefix_of_another_because_the_engine_aborts_by_prefix():
    parts = name_parts("rid", total=120)
    assert not [(a, b) for a in parts for b in parts if a != b and b.startswith(a)]


@pytest.mark.parametrize("rid", ["rid_2", "rid_of3", "rid_2of", "rid_2of3_xyz", "_2of3"])
def test_names_the_engine_or_a_client_made_up_are_taken_as_they_are(rid: str):
    assert lineage(rid) == (rid, 1, False)
