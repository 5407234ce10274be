"""`tokenflow serve` that never looks at its clients' connections: what the looks cost is the difference."""

from __future__ import annotations

import asyncio

from tokenflow_gateway.cli import main
from tokenflow_gateway.readers.connection import ConnectionSweep

__all__: list[str] = []


async def _never(_sweep: ConnectionSweep) -> None:
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    ConnectionSweep.run = _never  # type: ignore[method-assign, assignment]
    main()
