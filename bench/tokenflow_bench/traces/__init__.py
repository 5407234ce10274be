"""Recorded traffic: BurstGPT, Azure's LLM inference traces, Mooncake, ShareGPT."""

from tokenflow_bench.traces.errors import TraceError
from tokenflow_bench.traces.read import FORMATS, Trace, read_trace

__all__ = ["FORMATS", "Trace", "TraceError", "read_trace"]
