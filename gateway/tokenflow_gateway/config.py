"""The gateway's configuration: one YAML file, environment variables over it, the command line over both.

Every field can be set in the environment as ``TOKENFLOW_<FIELD>`` (nested: ``TOKENFLOW_TIMEOUTS__IDLE_S``).
The result is frozen and validated once; a bad value stops the start with one line that names it.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from tokenflow_gateway.local.home import Home
from tokenflow_gateway.store.settings import RedisSettings
from tokenflow_gateway.tenants.admission_settings import AdmissionSettings, EstimateSettings
from tokenflow_gateway.tenants.model import ANONYMOUS
from tokenflow_gateway.tenants.settings import (
    AnonymousMode,
    ClassSettings,
    Network,
    PhaseTimes,
    TenantSettings,
    Timeouts,
    UsageSettings,
    check_names,
)
from tokenflow_gateway.workers.worker import MAX_WORKERS

__all__ = [
    "ANONYMOUS",
    "ConfigError",
    "DeliverySettings",
    "EngineConfig",
    "KeepAliveForm",
    "KeepAliveSettings",
    "PhaseTimes",
    "RouteSettings",
    "Settings",
    "TelemetrySettings",
    "TenantSettings",
    "Timeouts",
    "is_loopback",
    "load_settings",
]


_FILE = "_file"
"""Carries the file's values through the constructor to the place where sources are ordered."""


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the fields and what to do."""


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether an address of this name stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class EngineConfig(BaseModel):
    """One OpenAI-compatible engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    """Base URL without ``/v1``, for example ``http://127.0.0.1:30000``."""
    id: str | None = None
    """Name in metrics and views; by default the URL's host and port."""
    link: str | None = None
    """ZeroMQ endpoint of the plugin, or ``off``. By default the local one, for an engine on this machine."""
    api_key: SecretStr | None = None
    """Sent to the engine as its bearer token, in place of what the client sent."""
    max_running: int | None = Field(default=None, ge=1)
    """Streams that it runs at a time, where no plugin tells: more wait in the gateway. None: it takes all."""

    @field_validator("url")
    @classmethod
    def _plain_base_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise ValueError("a URL with a password ends up in logs: give the key as api_key")
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is not an http(s) URL such as http://127.0.0.1:30000")
        try:
            _ = parts.port
        except ValueError as error:
            raise ValueError(f"{url!r} has no valid port") from error
        return url.rstrip("/").removesuffix("/v1")

    @field_validator("link")
    @classmethod
    def _an_endpoint(cls, link: str | None) -> str | None:
        if link is not None and link != "off" and not link.startswith(("ipc://", "tcp://")):
            raise ValueError(f"{link!r} is neither ipc://PATH, tcp://HOST:PORT nor off")
        return link

    @field_validator("api_key")
    @classmethod
    def _fits_into_a_header(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and not (
            key.get_secret_value().isascii() and key.get_secret_value().isprintable()
        ):
            raise ValueError("not a key that fits into a header: printable ASCII only")
        return key

    @property
    def name(self) -> str:
        """`id`, or the URL's host and port."""
        return self.id or urlsplit(self.url).netloc


class RouteSettings(BaseModel):
    """What is different for the requests of one route."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeouts: PhaseTimes = PhaseTimes()


KeepAliveForm = Literal["none", "comment", "chunk"]


class KeepAliveSettings(BaseModel):
    """What a streaming client hears while there is nothing to say; docs/delivery.md."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    form: KeepAliveForm = "none"
    """``comment``: an SSE comment; ``chunk``: a chunk without text. For requests that do not choose."""
    every_s: float = Field(default=15.0, ge=0.05, le=3600)
    """Seconds of silence before each."""


class DeliverySettings(BaseModel):
    """What happens while a client takes a stream more slowly than its engine gives it; docs/delivery.md."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_buffered_bytes: int = Field(default=256 * 1024, gt=0)
    """What one stream may have waiting for its client, before the engine is not read any further."""
    at_cap: Literal["hold", "abort"] = "hold"
    """``hold``: wait for the client, and the engine with it; ``abort``: end the stream, free the engine."""
    max_hold_s: float = Field(default=600.0, gt=0)
    """How long a connection that takes nothing, or a reader who pauses, is waited for."""


class TelemetrySettings(BaseModel):
    """Traces and metrics over OTLP; docs/telemetry.md."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    otlp_endpoint: str | None = None
    """Base URL of a receiver of OTLP/HTTP, such as ``http://127.0.0.1:4318``; without one nothing is sent."""
    sample: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of requests that are traced, of those whose client has not decided it."""
    metrics_every_s: float = Field(default=60.0, ge=1.0, le=3600.0)
    prompts: bool = False
    """Send the text of requests, too; answers never go out."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _can_export(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        parts = urlsplit(endpoint)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{endpoint!r} is not an http(s) URL such as http://127.0.0.1:4318")
        if find_spec("opentelemetry") is None:
            raise ValueError("telemetry needs OpenTelemetry: pip install '.[otel]' in a clone of TokenFlow")
        return endpoint


class Settings(BaseSettings):
    """Everything the gateway can be told."""

    model_config = SettingsConfigDict(
        env_prefix="TOKENFLOW_", env_nested_delimiter="__", frozen=True, extra="forbid"
    )

    engines: Annotated[tuple[EngineConfig, ...], NoDecode] = Field(min_length=1)
    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    workers: int = Field(default=1, ge=1, le=MAX_WORKERS)
    """Processes that serve the port, for more than one core; docs/workers.md."""
    gateway_id: str | None = Field(default=None, min_length=1, max_length=200)
    """Name of this gateway to the engines, kept over restarts. By default host name, address and port."""
    admin_token: SecretStr | None = Field(default=None, min_length=1)
    """Bearer token of ``/admin``. Without one these routes answer on loopback only."""
    link_secret: SecretStr | None = None
    """Shared with the engines' plugins; by default the one this user's engines use on this machine."""
    timeouts: Timeouts = Timeouts()
    routes: dict[str, RouteSettings] = {}
    """By path, such as ``/v1/embeddings``: these requests differ from all."""
    classes: dict[str, ClassSettings] = {}
    """Classes of service, by name; docs/tenants.md. ``default`` is there in any case."""
    tenants: dict[str, TenantSettings] = {}
    """By name. Requests without a key are of the tenant ``anonymous``."""
    anonymous: AnonymousMode = "auto"
    """Whether requests may come without a key."""
    trusted_proxies: tuple[Network, ...] = ()
    """Addresses of front ends and proxies whose word on their users' identity counts, as CIDR blocks."""
    state_dir: Path | None = None
    """Where keys and usage are kept; by default ``gateway`` in TOKENFLOW_HOME."""
    usage: UsageSettings = UsageSettings()
    metric_tenants: int = Field(default=20, ge=0, le=1000)
    """Tenants with metrics of their own; all others are counted together, as ``other``."""
    admission: AdmissionSettings = AdmissionSettings()
    estimates: EstimateSettings = EstimateSettings()
    redis: RedisSettings | None = None
    """What several gateways share; docs/fleets.md."""
    max_attempts: int = Field(default=2, ge=1, le=16)
    """Engines one request is tried on, as long as none has done anything for it."""
    max_connections: int = Field(default=10_000, ge=1)
    """Connections of clients at a time. Fewer where the system's limit of open files allows fewer."""
    keep_alive: KeepAliveSettings = KeepAliveSettings()
    delivery: DeliverySettings = DeliverySettings()
    coalesce_ms: float = Field(default=1.0, ge=0.0, le=20.0)
    """Chunks that follow each other faster than this are passed on together, so often; 0: each by itself."""
    telemetry: TelemetrySettings = TelemetrySettings()
    max_body_bytes: int = Field(default=32 * 1024 * 1024, gt=0)
    """Largest request body; larger ones get 413."""
    max_answer_bytes: int = Field(default=64 * 1024 * 1024, gt=0)
    """Largest answer that is no stream, of the routes that are followed; larger ones become a 502."""
    max_event_bytes: int = Field(default=4 * 1024 * 1024, gt=0)
    """Largest single event of an engine's stream."""
    user_header: str = Field(default="X-TokenFlow-User", pattern=r"^[A-Za-z0-9-]{1,100}$")
    """Names the reader of a request, for `learn_rates`; without it the body's `user` does."""
    learn_rates: bool = True
    """Remember how fast each reader reads, for the next stream; in memory, under a keyed hash of the name."""
    cors_origins: tuple[str, ...] = ()
    """Web origins whose pages may call the API, such as ``https://chat.example``; ``*`` for any."""
    shutdown_grace_s: int = Field(default=30, ge=0, le=86_400)
    """How long running streams may go on after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"

    @field_validator("engines", mode="before")
    @classmethod
    def _engines_from_urls(cls, value: Any) -> Any:
        """Accept URLs beside full entries, and one comma-separated string of them (the environment)."""
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, (list, tuple)):
            return [{"url": entry} if isinstance(entry, str) else entry for entry in value]
        return value

    @field_validator("engines")
    @classmethod
    def _engines_differ(cls, engines: tuple[EngineConfig, ...]) -> tuple[EngineConfig, ...]:
        names = [engine.name for engine in engines]
        doubles = {name for name in names if names.count(name) > 1}
        if doubles:
            raise ValueError(f"two engines share a name: {', '.join(sorted(doubles))}; give each its own id")
        return engines

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        check_names(self.classes, self.tenants, {engine.name for engine in self.engines})
        return self

    @property
    def state(self) -> Path:
        """The directory of what outlives the process."""
        return self.state_dir or Home.from_environ(os.environ).root / "gateway"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order of precedence: command line, environment, file."""
        assert isinstance(init_settings, InitSettingsSource)
        given = dict(init_settings.init_kwargs)
        file_values = given.pop(_FILE, {})
        return (
            InitSettingsSource(settings_cls, init_kwargs=given),
            env_settings,
            InitSettingsSource(settings_cls, init_kwargs=file_values),
        )


def load_settings(config_file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """The settings of a file, the environment and `overrides`. Raises `ConfigError`."""
    file_values = _read_yaml(config_file) if config_file else {}
    _refuse_unknown(file_values, config_file)
    values: dict[str, Any] = {_FILE: file_values, **(overrides or {})}
    try:
        return Settings(**values)
    except SettingsError as error:
        raise ConfigError(f"an environment variable cannot be read: {error}") from error
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not a {type(values).__name__}")
    return values


def _refuse_unknown(values: dict[str, Any], path: Path | None) -> None:
    unknown = sorted(str(key) for key in values if key not in Settings.model_fields)
    if unknown:
        known = ", ".join(Settings.model_fields)
        raise ConfigError(f"{path}: unknown setting {', '.join(unknown)}; known are {known}")


def _explain(error: ValidationError) -> str:
    details = error.errors()
    if any(len(detail["loc"]) > 1 for detail in details):  # a bad entry makes its list look empty, too
        details = [detail for detail in details if detail["type"] not in {"missing", "too_short"}]
    return "; ".join(_explain_one(detail["loc"], detail["msg"], detail["type"]) for detail in details)


def _explain_one(location: tuple[int | str, ...], message: str, kind: str) -> str:
    where = ".".join(str(part) for part in location)
    if where == "engines" and kind in {"missing", "too_short"}:
        return "no engine given: use --engine http://127.0.0.1:30000, or `engines:` in the file of --config"
    said = message.removeprefix("Value error, ")
    return f"{where}: {said}{_origin(location)}" if where else said


def _origin(location: tuple[int | str, ...]) -> str:
    """Names the environment variable when that is where a bad value came from."""
    name = "TOKENFLOW_" + "__".join(str(part).upper() for part in location)
    return f" (from {name})" if name in os.environ else ""
