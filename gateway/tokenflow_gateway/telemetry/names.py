"""Names of the semantic conventions, and ours beside them.

They are strings here, because the package of the conventions has moved and deprecated those of GenAI twice;
the version that they are of goes out as the schema's URL.
"""

from __future__ import annotations

from typing import Final

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.41.0"
"""Version of https://opentelemetry.io/docs/specs/semconv/gen-ai/ that these names are of."""

ERROR_TYPE: Final = "error.type"
FIRST_TOKEN: Final = "gen_ai.first_token"  # noqa: S105 - an event's name
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OPERATION: Final = "gen_ai.operation.name"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
STREAM: Final = "gen_ai.request.stream"
TIME_TO_FIRST: Final = "gen_ai.response.time_to_first_chunk"
TOKEN_TYPE: Final = "gen_ai.token.type"  # noqa: S105 - an attribute's name
URL_PATH: Final = "url.path"

END: Final = "tokenflow.end"
ENGINE: Final = "tokenflow.engine"
DELIVERED_TOKENS: Final = "tokenflow.delivered_tokens"
QUEUE: Final = "tokenflow.queue"
READER: Final = "tokenflow.reader"
REASON: Final = "tokenflow.reason"
REQUEST_ID: Final = "tokenflow.request_id"
RID: Final = "tokenflow.rid"
STATE: Final = "tokenflow.state"
TENANT: Final = "tokenflow.tenant"

REQUEST_PARAMETERS: Final = {
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
}
"""Attributes by fields of a request's body; all are numbers."""
