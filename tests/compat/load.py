"""An independent load client: NVIDIA's aiperf, in its own environment."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path

from compat.environments import python
from support.real_engine import tokenflow_home

__all__ = ["Measured", "aiperf"]

TOKENIZER = tokenflow_home() / "models" / "SmolLM2-135M-Instruct"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a load client says of its run. `tokens` were generated for all requests that succeeded."""

    name: str
    version: str
    succeeded: int
    errors: int
    tokens: int
    ttft_p50_ms: float

    def __str__(self) -> str:
        return f"{self.succeeded} streams, {self.tokens} tokens, {self.errors} errors"


async def aiperf(url: str, model: str, folder: Path, *, requests: int, tokens: int) -> Measured:
    """`requests` streams of at most `tokens`, four at a time. Raises `AssertionError` with its last words."""
    program = (await asyncio.to_thread(python, "aiperf")).parent / "aiperf"
    await _run(
        *(str(program), "profile", "--ui", "none", "--random-seed", "1", "--artifact-dir", str(folder)),
        *(
            "--url",
            url,
            "--model",
            model,
            "--endpoint-type",
            "chat",
            "--streaming",
            "--use-server-token-count",
        ),
        *("--request-count", str(requests), "--concurrency", "4", "--isl", "16", "--osl", str(tokens)),
        *("--tokenizer", str(TOKENIZER)),
        folder=folder,
    )
    shown = json.loads((folder / "profile_export_aiperf.json").read_text())
    return Measured(
        name="aiperf",
        version=shown["aiperf_version"],
        succeeded=int(shown["request_count"]["avg"]),
        errors=sum(error["count"] for error in shown["error_summary"]),
        tokens=int(shown["total_usage_completion_tokens"]["avg"]),
        ttft_p50_ms=shown["time_to_first_token"]["p50"],
    )


async def _run(*command: str, folder: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode(errors="replace")[-4000:]
