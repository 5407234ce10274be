"""How a fleet's Redis is reached; docs/fleets.md."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

__all__ = ["RedisSettings"]


class RedisSettings(BaseModel):
    """What the gateways of a fleet share. Without it each gateway is by itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: SecretStr
    """``redis://``, ``rediss://`` (TLS) or ``unix://``, with its password, if it has one."""
    prefix: str = Field(default="tokenflow", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Of all keys: fleets that share a Redis differ in it."""
    secret: SecretStr | None = Field(default=None, min_length=16)
    """Of it the gateways derive the keys that they share (progress capabilities, names of readers).

    By default of the link's secret, which has to be the same in all of them then.
    """
    max_connections: int = Field(default=32, ge=2, le=1000)
    gateways: int = Field(default=1, ge=1, le=1000)
    """How many share it, at least: while it is away each takes one of so many parts of every limit.

    Of more, where more have been seen there; but one that starts without Redis has seen none.
    """

    @field_validator("url")
    @classmethod
    def _a_redis_url(cls, url: SecretStr) -> SecretStr:
        if not url.get_secret_value().startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("not a URL such as redis://127.0.0.1:6379/0, rediss://... or unix:///path")
        try:
            _ = urlsplit(url.get_secret_value()).port
        except ValueError:  # whose message would have a part of the password
            raise ValueError("no valid port: are the password's :/?#[]@ percent-encoded?") from None
        return url
