"""What follows from one configuration, and is replaced as a whole by that of the next."""

from __future__ import annotations

from tokenflow_gateway.config import Settings
from tokenflow_gateway.relay.timeouts import TimeoutTable
from tokenflow_gateway.tenants.access import Access
from tokenflow_gateway.tenants.keyring import Keyring

__all__ = ["Rules"]


class Rules:
    """Who may do what, and how long it may take. A request keeps those that it began under."""

    def __init__(self, settings: Settings, keyring: Keyring) -> None:
        """Raises `ConfigError` for what the settings alone do not show."""
        self.settings = settings
        self.timeouts = TimeoutTable(settings)
        self.access = Access(settings, keyring)
