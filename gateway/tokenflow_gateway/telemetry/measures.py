"""Metrics of the GenAI and HTTP conventions. What only TokenFlow has is in ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.metrics import Histogram, Meter

from tokenflow_gateway.telemetry import names

__all__ = ["Measures"]

Attributes = Mapping[str, str | int]

_REQUEST_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(4**power for power in range(14))
"""The conventions' own boundaries: other ones cannot be compared with what else reports them."""


class Measures:
    """Histograms; each call records one request."""

    def __init__(self, meter: Meter) -> None:
        def seconds(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            return meter.create_histogram(
                name, unit="s", description=text, explicit_bucket_boundaries_advisory=bounds
            )

        self._request = seconds(
            "gen_ai.server.request.duration",
            "Requests that generate text, as an engine served them.",
            _REQUEST_S,
        )
        self._first = seconds(
            "gen_ai.server.time_to_first_token", "From a request's arrival to its first token.", _FIRST_S
        )
        self._token = seconds(
            "gen_ai.server.time_per_output_token", "Time per token after the first one.", _TOKEN_S
        )
        self._http = seconds("http.server.request.duration", "Requests of clients.", _REQUEST_S)
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Tokens of prompts and of answers.",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )

    def http(self, attributes: Attributes, duration_s: float, context: Context) -> None:
        self._http.record(duration_s, attributes, context)

    def generation(
        self,
        attributes: Attributes,
        *,
        duration_s: float,
        first_s: float | None,
        input_tokens: int | None,
        output_tokens: int,
        context: Context,
    ) -> None:
        """One attempt; the times of tokens only of those that came to their end."""
        self._request.record(duration_s, attributes, context)
        if names.ERROR_TYPE not in attributes and first_s is not None:
            self._first.record(first_s, attributes, context)
            if output_tokens > 1:
                self._token.record((duration_s - first_s) / (output_tokens - 1), attributes, context)
        if input_tokens:
            self._tokens.record(input_tokens, {**attributes, names.TOKEN_TYPE: "input"}, context)
        if output_tokens:
            self._tokens.record(output_tokens, {**attributes, names.TOKEN_TYPE: "output"}, context)
