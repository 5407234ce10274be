"""Requests out of SGLang's decode batch and back into it."""

from __future__ import annotations

from typing import Any

__all__ = ["in_flight", "leave", "rejoin"]


def in_flight(scheduler: Any) -> set[Any]:
    """Requests of forward passes whose results the scheduler has not processed yet."""
    return {req for batch, _ in scheduler.result_queue for req in batch.reqs}


def leave(batch: Any, reqs: list[Any]) -> None:
    """Take these requests out of the decode batch; rows and KV stay theirs."""
    batch.filter_batch(reqs_to_exclude=reqs)
    batch.batch_is_full = False


def rejoin(scheduler: Any, batch: Any, reqs: list[Any]) -> Any:
    """The decode batch with these requests in it, whose KV is on the device and of whom nothing is in flight.

    Their last token is staged for the next pass by row, as that of any other request.
    """
    joining = scheduler._build_hisparse_decode_batch(reqs)
    joining.multimodal_inputs = [req.multimodal_inputs for req in reqs]
    if joining.return_logprob:
        joining.token_ids_logprobs = [req.logprob.token_ids_logprob for req in reqs]
    if batch.is_empty():
        return joining
    batch.merge_batch(joining)
    return batch
