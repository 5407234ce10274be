"""What the gateways of a fleet share, by Redis; of a gateway by itself, the same in memory."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenflow_gateway.api.progress import Owners
from tokenflow_gateway.config import Settings
from tokenflow_gateway.engines.draining import Draining, LocalDraining
from tokenflow_gateway.engines.registry import EngineRegistry
from tokenflow_gateway.metrics import Metrics
from tokenflow_gateway.readers.learned import LearnedRates
from tokenflow_gateway.readers.progress import Capabilities
from tokenflow_gateway.readers.track import Watched
from tokenflow_gateway.relay.request_names import RequestNames
from tokenflow_gateway.store.sqlite import StoreError
from tokenflow_gateway.store.usage import USAGE_FILE
from tokenflow_gateway.tenants.admission import Admission
from tokenflow_gateway.tenants.budgets import Spender, Spent, spent_on_record
from tokenflow_gateway.tenants.entry_metrics import QueueMetrics
from tokenflow_gateway.tenants.keyring import Keyring
from tokenflow_gateway.tenants.limits import LimitStore, LocalLimits
from tokenflow_gateway.tenants.settings import names_tenants
from tokenflow_gateway.workers.limits import WorkerLimits
from tokenflow_gateway.workers.peers import (
    Began,
    Drain,
    Forwarded,
    Held,
    Lesson,
    PeerAnswer,
    Peers,
    Settle,
    Take,
    WorkerDraining,
    WorkerReports,
)
from tokenflow_gateway.workers.worker import Worker

if TYPE_CHECKING:
    from tokenflow_gateway.store.messages import Messages
    from tokenflow_gateway.store.redis import FleetStore
    from tokenflow_gateway.store.shared_limits import SharedLimits

__all__ = ["Fleet"]

_log = structlog.stdlib.get_logger("tokenflow.gateway")


class Fleet:
    """The state that outlives every configuration: limits, the queue, readers' habits, who is draining."""

    def __init__(
        self,
        settings: Settings,
        registry: EngineRegistry,
        metrics: Metrics,
        keyring: Keyring,
        worker: Worker,
        *,
        member: str,
        secret: str,
        spenders: Callable[[], Iterable[Spender]],
    ) -> None:
        """`member`: this process's name among all that share the Redis; `secret`: what they have in common.

        `spenders`: who has limits now. The queue and the local limits are of this process alone, in any case.
        """
        self._spenders = spenders
        self._usage = settings.state / USAGE_FILE
        self.parts: list[Callable[[], Awaitable[None]]] = []
        """What has to run as long as the gateway does."""
        self._local = LocalLimits()
        self.limits: LimitStore = self._local
        self._worker_limits: WorkerLimits | None = None
        self._shared_limits: SharedLimits | None = None
        self.learned: LearnedRates | None = None
        self.store: FleetStore | None = None
        self.messages: Messages | None = None
        self.peers = Peers(worker)
        drains = LocalDraining(registry)
        if settings.redis is not None and settings.redis.secret is not None:
            secret = settings.redis.secret.get_secret_value()
        self.names = RequestNames(_derived(secret, "responses"))
        if settings.redis is None:
            workers = [str(index) for index in range(worker.count)]
            self.capabilities = Capabilities(
                worker.capability_key, owner=str(worker.index), others=lambda: workers
            )
            self.owners: Owners = WorkerReports(self.peers)
            self.draining: Draining = WorkerDraining(worker, drains, self.peers)
            if not worker.is_alone:
                self.limits = self._worker_limits = WorkerLimits(worker, self.peers, self._local)
            if settings.learn_rates:
                self.learned = LearnedRates(key=worker.learning_key)
        else:
            self._share(settings, registry, keyring, member, secret, workers=worker.count)
        self._drains = drains
        queue = QueueMetrics(metrics.registry, metrics.sums)
        self.admission = Admission(
            settings.admission, registry.placement, registry.sent_to, enabled=False, count=queue.count
        )
        queue.watch(metrics.registry, lambda: self.admission.waiting)
        metrics.registry.register(_StoreCollector(lambda: self.store))
        self.parts.append(self.admission.run)
        self.update(settings)

    def update(self, settings: Settings) -> None:
        """Another configuration."""
        admission = settings.admission
        enabled = admission.enabled
        if enabled is None:
            enabled = bool(settings.classes) or names_tenants(settings.tenants)
        floors = {name: entry.share_floor for name, entry in settings.classes.items()}
        self.admission.update(admission, floors=floors, enabled=enabled)

    async def start(self) -> None:
        """Before the first request."""
        await self.remember_spent()
        if self.store is not None:
            await self.store.start()

    async def begin(self) -> None:
        """Once other workers are answered, before the first request."""
        if self._worker_limits is not None:
            await self._worker_limits.begin()

    async def remember_spent(self) -> None:
        """What is on record counts as spent of budgets: at the start, and of new ones. Twice does no harm."""
        recorded = await self._recorded()
        if recorded is None:
            return
        totals: Counter[tuple[str, str]] = Counter()
        for spent in recorded:
            totals[spent.subject, spent.period] += spent.tokens
        for (name, period), tokens in totals.items():
            self._local.remember(name, period, tokens)
        if self._shared_limits is not None:
            await self._shared_limits.remember(recorded)

    async def _recorded(self) -> list[Spent] | None:
        """None if the record of usage cannot be read."""
        try:
            return await asyncio.to_thread(spent_on_record, list(self._spenders()), self._usage)
        except StoreError as error:
            _log.error("what is spent of budgets cannot be read from the record of usage", reason=str(error))
            return None

    async def aclose(self) -> None:
        """After the last request."""
        if self._worker_limits is not None:
            await self._worker_limits.aclose()
        if self._shared_limits is not None:
            await self._shared_limits.aclose()

    def answer(self, question: Drain | Take | Settle | Began | Held) -> Any:
        """What another worker of this gateway wants to know."""
        if isinstance(question, Drain):
            self._drains.apply(question.engine, draining=question.draining)
            return True
        assert self._worker_limits is not None, "with Redis there is nothing to ask"
        return self._worker_limits.answer(question)

    def tell_lesson(self, name: bytes, watched: Watched) -> None:
        """To this gateway's other workers; over Redis, `SharedHabits` tells them with all the rest."""
        if self.store is None:
            self.peers.tell(Lesson(name, watched.ratio, watched.seconds))

    def answer_reports(self, answer: Callable[[Forwarded], PeerAnswer]) -> None:
        """Take progress reports that come to other replicas."""
        if self.messages is not None:
            self.messages.answers(
                lambda question: msgspec.msgpack.encode(
                    answer(msgspec.msgpack.decode(question, type=Forwarded))
                )
            )

    def _share(
        self,
        settings: Settings,
        registry: EngineRegistry,
        keyring: Keyring,
        member: str,
        secret: str,
        *,
        workers: int,
    ) -> None:
        from tokenflow_gateway.store.habits import SharedHabits
        from tokenflow_gateway.store.messages import Messages
        from tokenflow_gateway.store.redis import FleetStore
        from tokenflow_gateway.store.reports import FleetReports
        from tokenflow_gateway.store.shared_draining import SharedDraining
        from tokenflow_gateway.store.shared_keys import SharedKeys
        from tokenflow_gateway.store.shared_limits import SharedLimits

        assert settings.redis is not None
        self.store = store = FleetStore(settings.redis, member)
        self.messages = messages = Messages(store)
        self.capabilities = Capabilities(
            _derived(secret, "capabilities"), owner=member, others=lambda: store.members
        )
        self.owners = FleetReports(store, messages)
        self.draining = SharedDraining(store, registry)
        keys = SharedKeys(store, messages, keyring)
        self.parts += [store.run, messages.run, keys.run]
        if settings.learn_rates:
            habits = SharedHabits(store, messages, key=_derived(secret, "readers"))
            self.learned = habits
            self.parts.append(habits.run)
        limits = SharedLimits(  # the last to hear of Redis' return: nothing may come after
            store, self._local, recorded=self._recorded, processes=settings.redis.gateways * workers
        )
        self.limits = self._shared_limits = limits
        self.parts.append(limits.run)


def _derived(secret: str, purpose: str) -> bytes:
    """A key for one purpose, the same in all who have the secret."""
    return hmac.digest(secret.encode(), f"tokenflow fleet: {purpose}".encode(), hashlib.sha256)


class _StoreCollector(Collector):
    """Whether a gateway of a fleet reaches what it shares with the others."""

    def __init__(self, store: Callable[[], FleetStore | None]) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        store = self._store()
        up = GaugeMetricFamily(
            "tokenflow_redis_up", "1 while Redis answers; 0: this gateway goes on with limits of its own."
        )
        replicas = GaugeMetricFamily(
            "tokenflow_replicas", "Processes that share this gateway's Redis, itself included, as last seen."
        )
        lost = CounterMetricFamily("tokenflow_redis_lost", "Times that Redis has gone.")
        if store is not None:
            up.add_metric([], float(store.up))
            replicas.add_metric([], store.replicas)
            lost.add_metric([], store.lost)
        yield from (up, replicas, lost)
