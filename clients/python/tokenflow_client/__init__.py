"""TokenFlow's client: an HTTP client for the OpenAI SDK that tells the gateway what its reader has read.

    client = openai.OpenAI(base_url="http://localhost:8080/v1", http_client=tokenflow_client.http_client())

Nothing else changes. Without this package, or against another server, everything works as before.
"""

from tokenflow_client._client import async_http_client, async_transport, http_client, transport
from tokenflow_client._reader import Delivery, Evidence, Kind, TokenFlowReader
from tokenflow_client._reporter import Statistics

__all__ = [
    "Delivery",
    "Evidence",
    "Kind",
    "Statistics",
    "TokenFlowReader",
    "async_http_client",
    "async_transport",
    "http_client",
    "transport",
]
