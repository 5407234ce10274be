"""Which engines and which requests can be preempted: those for which it was shown to change no token."""

from __future__ import annotations

from typing import Any

__all__ = ["why_engine_is_fixed", "why_request_is_fixed"]


def why_engine_is_fixed(scheduler: Any) -> str | None:
    """Why nothing in this engine is ever preempted; None where it may be. In words for a person."""
    args = scheduler.server_args
    reasons = (
        (not scheduler.is_generation, "it generates nothing"),
        (not scheduler.spec_algorithm.is_none(), "speculative decoding"),
        (scheduler.is_hybrid_swa, "sliding-window attention"),
        (scheduler.is_hybrid_ssm or scheduler.tree_cache.supports_mamba(), "state-space layers"),
        (scheduler.dllm_config is not None, "a diffusion model"),
        (scheduler.enable_hisparse, "HiSparse"),
        (scheduler.enable_hicache_storage, "HiCache's storage (leave out --hicache-storage-backend)"),
        (scheduler.enable_lmcache, "LMCache"),
        (scheduler.enable_unified_cache_external_linker, "an external KV cache"),
        (scheduler.enable_unified_memory, "unified memory"),
        (scheduler.enable_priority_preemption, "SGLang's own priority preemption"),
        (scheduler.disaggregation_mode.value != "null", "prefill and decode on different engines"),
        (scheduler.decode_offload_manager is not None, "SGLang's own KV offload"),
        (scheduler.kv_shard_widening > 1, "a sharded KV cache"),
        (scheduler.require_mlp_sync, "data-parallel attention"),
        (scheduler.model_config.is_encoder_decoder, "an encoder-decoder model"),
        (args.enable_pdmux, "--enable-pdmux"),
        (args.enable_two_batch_overlap, "--enable-two-batch-overlap"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def why_request_is_fixed(req: Any) -> str | None:
    """Why this request is never preempted; None where it may be. A short name, to count by."""
    params = req.sampling_params
    reasons = (
        (req.grammar is not None or req.grammar_key is not None, "grammar"),
        (req.beam_group is not None, "beams"),
        (req.session is not None or req.session_id is not None, "session"),
        (req.lora_id is not None, "lora"),
        (req.multimodal_inputs is not None, "multimodal"),
        (req.input_embeds is not None or req.positional_embed_overrides is not None, "embeddings"),
        (_has_penalties(params), "penalties"),
        (req.custom_logit_processor is not None, "logit_processor"),
        (_returns_more_than_tokens(req), "extra_outputs"),
        (_wants_input_logprobs(req), "input_logprobs"),
        (req.is_prefill_only, "prefill_only"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def _has_penalties(params: Any) -> bool:
    """Their sums over past tokens live in the batch, and are lost when a request leaves it."""
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
    )


def _returns_more_than_tokens(req: Any) -> bool:
    return bool(
        req.return_hidden_states
        or req.return_routed_experts
        or req.return_indexer_topk
        or req.return_sampling_mask
    )


def _wants_input_logprobs(req: Any) -> bool:
    """Of the prompt's tokens: a second prefill would give them again."""
    return bool(req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids))
