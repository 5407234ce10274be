"""``docker compose`` for a topology of processes that runs already: what the docs' quick start asks of it.

``python docker_stand_in.py compose -f docker/compose.gpu.yaml up|exec ...``; made by `install`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["install"]

_FILE = ["compose", "-f", "docker/compose.gpu.yaml"]
_UP = Path("docker/is-up")
"""Left in the clone once the topology has been asked for."""


def install(folder: Path) -> None:
    """Put a ``docker`` into `folder`, to be put on PATH."""
    program = folder / "docker"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    program.chmod(0o755)


def main(arguments: list[str]) -> None:
    if arguments[:3] != _FILE:
        sys.exit(f"not what the topology was started with: {arguments}")
    match arguments[3:]:
        case ["up", "--build", "--detach", "--wait"]:
            _UP.touch()
        case ["exec", _, *_] if not _UP.exists():
            sys.exit("nothing is up")
        case ["exec", "gateway-1" | "gateway-2", "tokenflow", *command]:
            argv = [sys.executable, "-m", "tokenflow_gateway.cli", *command]
            os.execv(argv[0], argv)  # noqa: S606  # a list, no shell
        case other:
            sys.exit(f"the stand-in knows nothing of {other}")


if __name__ == "__main__":
    main(sys.argv[1:])
