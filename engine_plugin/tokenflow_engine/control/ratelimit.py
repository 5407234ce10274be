"""Log lines that could come once a step, and shall not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["Occasionally"]

_MAX_TOPICS = 256


class Occasionally:
    """Lets one log line per topic through every `every_s` seconds, and says how many it held back."""

    def __init__(self, *, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._quiet: dict[str, tuple[float, int]] = {}

    def log(self, logger: logging.Logger, topic: str, line: str, *, exc_info: bool = False) -> None:
        """Log `line` as a warning, unless its topic was logged lately."""
        now = self._clock()
        until, held_back = self._quiet.pop(topic, (now, 0))
        if now < until:
            self._quiet[topic] = (until, held_back + 1)
            return
        if len(self._quiet) >= _MAX_TOPICS:
            del self._quiet[next(iter(self._quiet))]
        self._quiet[topic] = (now + self._every_s, 0)
        logger.warning("%s%s", line, f" ({held_back} more)" if held_back else "", exc_info=exc_info)
