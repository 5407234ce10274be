"""Which time-outs hold for which request."""

from __future__ import annotations

from tokenflow_gateway.config import ConfigError, PhaseTimes, Settings, Timeouts
from tokenflow_gateway.relay.dialects import DIALECTS
from tokenflow_gateway.relay.routes import PASSED

__all__ = ["TimeoutTable"]


class TimeoutTable:
    """The time-outs of each request, phase by phase: its tenant's, else its route's, else those of all."""

    def __init__(self, settings: Settings) -> None:
        """Raises `ConfigError` for a route that is not served."""
        served = [*DIALECTS, *PASSED]
        for path in settings.routes:
            if path not in served:
                raise ConfigError(f"routes: {path} is not served; there are {', '.join(served)}")
        routes = {path: entry.timeouts.over(settings.timeouts) for path, entry in settings.routes.items()}
        tenants = {name: entry.timeouts for name, entry in settings.tenants.items()}
        self._times = {
            (route, tenant): own.over(times)
            for route, times in [("", settings.timeouts), *routes.items()]
            for tenant, own in [("", PhaseTimes()), *tenants.items()]
        }
        self._routes, self._tenants = frozenset(routes), frozenset(tenants)

    def of(self, route: str | None, tenant: str) -> Timeouts:
        """`route` as `routes.route_of` names it."""
        known = route if route in self._routes else ""
        return self._times[known or "", tenant if tenant in self._tenants else ""]
