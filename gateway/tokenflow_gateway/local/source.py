"""Where this installation of TokenFlow came from, so that the engine's environment gets the same."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

import tokenflow_gateway
from tokenflow_gateway.local.errors import SetupError

__all__ = ["Source", "package_source"]

DISTRIBUTION = "tokenflow-serving"


@dataclass(frozen=True)
class Source:
    """Arguments for ``pip install``, and content that, when it changes, asks for a new installation."""

    pip_arguments: tuple[str, ...]
    content: str


def package_source() -> Source:
    """How to install what is running now: the same checkout, the same file, or the same version."""
    checkout = Path(tokenflow_gateway.__file__).parents[2]
    try:
        return _installed(distribution(DISTRIBUTION))
    except PackageNotFoundError as error:
        if (checkout / "pyproject.toml").is_file():
            return _checkout(checkout)
        raise SetupError(f"{DISTRIBUTION} is not installed here: pip install {DISTRIBUTION}") from error


def _installed(found: Distribution) -> Source:
    record = found.read_text("direct_url.json")
    if record is None:
        return Source((f"{DISTRIBUTION}=={found.version}",), found.version)
    origin = json.loads(record)
    if "dir_info" in origin:
        return _checkout(Path(unquote(urlsplit(origin["url"]).path)))
    return Source((origin["url"],), record)


def _checkout(root: Path) -> Source:
    """Editable: only what is installed as metadata (entry points, version) has to be installed again."""
    try:
        return Source(("-e", str(root)), (root / "pyproject.toml").read_text())
    except OSError as error:
        raise SetupError(
            f"{root}, from where TokenFlow was installed, is gone: pip install it again"
        ) from error
