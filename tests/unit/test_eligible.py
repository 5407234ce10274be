from types import SimpleNamespace
from typing import Any

import pytest

from tokenflow_engine.sglang.eligible import why_engine_is_fixed, why_request_is_fixed

PREFILL = SimpleNamespace(value="prefill")
SPECULATIVE = SimpleNamespace(is_none=lambda: False)
MAMBA = SimpleNamespace(supports_mamba=lambda: True)
ENCODER_DECODER = SimpleNamespace(is_encoder_decoder=True)


def arguments(**changes: object) -> Any:
    return SimpleNamespace(**({"enable_pdmux": False, "enable_two_batch_overlap": False} | changes))


def scheduler(**changes: object) -> Any:
    """One of a plain engine, as far as it is asked."""
    plain = {
        "server_args": arguments(),
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


def sampling(**changes: object) -> Any:
    plain = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    return SimpleNamespace(**(plain | changes))


def request(**changes: object) -> Any:
    """A plain one, as far as it is asked."""
    plain = {
        "sampling_params": sampling(),
        "origin_input_ids": [1, 2, 3],
        "grammar": None,
        "grammar_key": None,
        "beam_group": None,
        "session": None,
        "session_id": None,
        "lora_id": None,
        "multimodal_inputs": None,
        "input_embeds": None,
        "positional_embed_overrides": None,
        "custom_logit_processor": None,
        "return_hidden_states": False,
        "return_routed_experts": False,
        "return_indexer_topk": False,
        "return_sampling_mask": False,
        "return_logprob": False,
        "logprob_start_len": -1,
        "is_prefill_only": False,
    }
    return SimpleNamespace(**(plain | changes))


def test_a_plain_engine_and_one_with_hicache_may_be_preempted():
    assert why_engine_is_fixed(scheduler()) is None
    assert why_engine_is_fixed(scheduler(enable_hierarchical_cache=True)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_generation": False}, "it generates nothing"),
        ({"spec_algorithm": SPECULATIVE}, "speculative decoding"),
        ({"is_hybrid_swa": True}, "sliding-window attention"),
        ({"is_hybrid_ssm": True}, "state-space layers"),
        ({"tree_cache": MAMBA}, "state-space layers"),
        ({"dllm_config": object()}, "a diffusion model"),
        ({"enable_hisparse": True}, "HiSparse"),
        (
            {"enable_hierarchical_cache": True, "enable_hicache_storage": True},
            "HiCache's storage (leave out --hicache-storage-backend)",
        ),
        ({"enable_lmcache": True}, "LMCache"),
        ({"enable_unified_cache_external_linker": True}, "an external KV cache"),
        ({"enable_unified_memory": True}, "unified memory"),
        ({"enable_priority_preemption": True}, "SGLang's own priority preemption"),
        ({"disaggregation_mode": PREFILL}, "prefill and decode on different engines"),
        ({"decode_offload_manager": object()}, "SGLang's own KV offload"),
        ({"kv_shard_widening": 2}, "a sharded KV cache"),
        ({"require_mlp_sync": True}, "data-parallel attention"),
        ({"model_config": ENCODER_DECODER}, "an encoder-decoder model"),
        ({"server_args": arguments(enable_pdmux=True)}, "--enable-pdmux"),
        ({"server_args": arguments(enable_two_batch_overlap=True)}, "--enable-two-batch-overlap"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_engine_in_which_it_was_not_shown_to_be_safe_is_refused_in_words(
    changes: dict[str, object], reason: str
):
    assert why_engine_is_fixed(scheduler(**changes)) == reason


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"return_logprob": True},  # of its output
        {"return_logprob": True, "logprob_start_len": 3},  # of the output, counted from the prompt's start
        {"logprob_start_len": 0},  # of nothing
    ],
    ids=str,
)
def test_a_plain_request_may_be_preempted(changes: dict[str, object]):
    assert why_request_is_fixed(request(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"grammar": object()}, "grammar"),
        ({"grammar_key": ("regex", "[a-z]+")}, "grammar"),  # not compiled yet
        ({"beam_group": object()}, "beams"),
        ({"session": object()}, "session"),
        ({"session_id": "s"}, "session"),
        ({"lora_id": "l"}, "lora"),
        ({"multimodal_inputs": object()}, "multimodal"),
        ({"input_embeds": [[0.5]]}, "embeddings"),
        ({"positional_embed_overrides": object()}, "embeddings"),
        ({"sampling_params": sampling(frequency_penalty=0.1)}, "penalties"),
        ({"sampling_params": sampling(presence_penalty=-0.1)}, "penalties"),
        ({"sampling_params": sampling(repetition_penalty=1.1)}, "penalties"),
        ({"sampling_params": sampling(min_new_tokens=1)}, "penalties"),
        ({"custom_logit_processor": "p"}, "logit_processor"),
        ({"return_hidden_states": True}, "extra_outputs"),
        ({"return_routed_experts": True}, "extra_outputs"),
        ({"return_indexer_topk": True}, "extra_outputs"),
        ({"return_sampling_mask": True}, "extra_outputs"),
        ({"return_logprob": True, "logprob_start_len": 0}, "input_logprobs"),
        ({"return_logprob": True, "logprob_start_len": 2}, "input_logprobs"),
        ({"is_prefill_only": True}, "prefill_only"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_a_request_for_which_it_was_not_shown_to_be_safe_is_never_preempted(
    changes: dict[str, object], reason: str
):
    assert why_request_is_fixed(request(**changes)) == reason
