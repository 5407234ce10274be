"""The entry point that SGLang finds (group ``sglang.srt.plugins``) in each of its processes."""

from __future__ import annotations

import logging
import os
from importlib.metadata import version

__all__ = ["SUPPORTED_VERSIONS", "register"]

_logger = logging.getLogger(__name__)

SUPPORTED_VERSIONS = frozenset({"0.5.23"})
"""Releases of SGLang whose internals the hooks were tested against."""

_NAMED_BY_HEADER = "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES"
"""Has SGLang take a request's `rid` from ``X-Override-RID``: a body of ``/v1/messages`` has no field for it.

The other headers that it opens say what the bodies of other routes can say as well.
"""


def register() -> None:
    """Register the hooks, or say in one line why the engine runs without them."""
    if os.environ.get("TOKENFLOW_PLUGIN", "").lower() == "off":
        _logger.warning(
            "TokenFlow: the plugin is off (TOKENFLOW_PLUGIN=off); the engine serves as without it"
        )
        return
    found = version("sglang")
    if found not in SUPPORTED_VERSIONS:
        _logger.warning(
            "TokenFlow: passive, no hooks are registered: sglang %s is unknown to this release "
            "(it knows %s); the engine serves as without the plugin",
            found,
            ", ".join(sorted(SUPPORTED_VERSIONS)),
        )
        return
    os.environ.setdefault(_NAMED_BY_HEADER, "1")
    from tokenflow_engine.sglang.hooks import register_all

    register_all()
