"""The part of the configuration that says how much may be used and who may wait; docs/fleets.md."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["AdmissionSettings", "EstimateSettings"]


class AdmissionSettings(BaseModel):
    """The queue before the engines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool | None = None
    """By default where classes or tenants are configured."""
    max_waiting: int = Field(default=1000, ge=0, le=1_000_000)
    """Streams that may wait, of all classes; `share_floor` of a class keeps places for it."""
    max_wait_s: float = Field(default=60.0, gt=0, le=3600)
    """After which a stream that waits is turned away."""
    engine_queue: int = Field(default=4, ge=1, le=1000)
    """Streams that may wait in an engine, however long it takes: so many that it never idles."""


class EstimateSettings(BaseModel):
    """What is taken of limits when a request begins; what it has used is settled at its end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    assumed_output_tokens: int = Field(default=512, ge=0, le=10_000_000)
    """Of a request that names no length."""
    most_output_tokens: int = Field(default=4096, ge=1, le=10_000_000)
    """Of one that does: clients ask for far more than they get."""
