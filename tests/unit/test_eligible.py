from types import SimpleNamespace
from typing import Any

import pytest

from tokenflow_engine.sglang.eligible import why_engine_is_fixed


def scheduler(**changes: object) -> Any:
    """One of a plain engine, as far as it is asked."""
    args = {"enable_pdmux": False, "enable_two_batch_overlap": False}
    plain = {
        "server_args": SimpleNamespace(**args),
        "is_generation": True,
        "spec_algorithm": SimpleNamespace(is_none=lambda: True),
        "tree_cache": SimpleNamespace(supports_mamba=lambda: False),
        "is_hybrid_swa": False,
        "is_hybrid_ssm": False,
        "dllm_config": None,
        "enable_hisparse": False,
        "enable_hierarchical_cache": False,
        "enable_hicache_storage": False,
        "enable_lmcache": False,
        "enable_unified_cache_external_linker": False,
        "enable_unified_memory": False,
        "enable_priority_preemption": False,
        "disaggregation_mode": SimpleNamespace(value="null"),
        "decode_offload_manager": None,
        "kv_shard_widening": 1,
        "require_mlp_sync": False,
        "model_config": SimpleNamespace(is_encoder_decoder=False),
    }
    return SimpleNamespace(**(plain | changes))


def test_a_plain_engine_and_one_with_hicache_may_be_preempted():
    assert why_engine_is_fixed(scheduler()) is None
    assert why_engine_is_fixed(scheduler(enable_hierarchical_cache=True)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"enable_hierarchical_cache": True, "enable_hicache_storage": True},
            "HiCache's storage (leave out --hicache-storage-backend)",
        ),
        ({"enable_lmcache": True}, "LMCache"),
        (
            {"disaggregation_mode": SimpleNamespace(value="decode")},
            "prefill and decode on different engines",
        ),
    ],
)
def test_what_was_not_shown_to_be_safe_is_refused_in_words(changes: dict[str, object], reason: str):
    assert why_engine_is_fixed(scheduler(**changes)) == reason
