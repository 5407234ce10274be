"""What is measured at one gateway, a function for each kind of figures. CPU is the gateway's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles

from tokenflow_bench.gateway.driver import Client, Driver, EngineStream
from tokenflow_bench.gateway.targets import Target

__all__ = ["SCENARIOS", "Figures", "NotServed", "Scale"]

Figures = dict[str, float]

_PATIENCE_S = 20.0
_INTERVAL_S = 0.02  # 50 chunks a second
_STALLED_BYTES = 64 * 1024 * 1024
"""What is offered to a gateway whose client does not read."""


class Scale:
    """How long and how much."""

    def __init__(self, *, quick: bool) -> None:
        self.window_s = 1.0 if quick else 2.5
        self.first_tokens = 60 if quick else 300
        self.requests_s = 1.0 if quick else 2.0
        self.idle_streams = 100 if quick else 500
        self.aborts = 10 if quick else 30


class NotServed(Exception):
    """The gateway does not do what the scenario needs."""


def saturated(driver: Driver, target: Target, scale: Scale) -> Figures:
    """100 streams, each chunk sent once the client has the one before."""

    def reply(client: Client, count: int) -> None:
        if client.engine is not None and not client.engine.ended:
            client.engine.send()

    with _streams(driver, target, 100, on_events=reply) as clients:
        driver.run_for(0.5)
        received, cpu_s, started = _events(clients), target.cpu_s(), time.monotonic()
        ends = started + scale.window_s
        while time.monotonic() < ends:
            before = [client.events for client in clients]
            driver.run_for(min(0.5, max(0.0, ends - time.monotonic())))
            for client, events in zip(clients, before, strict=True):
                if client.events == events:  # an event that the gateway kept to itself
                    reply(client, 1)
        chunks, passed_s = _events(clients) - received, time.monotonic() - started
        used_s = target.cpu_s() - cpu_s
    return {
        "saturated_us": 1e6 * used_s / max(1, chunks),
        "saturated_per_s": chunks / passed_s,
        "saturated_core": used_s / passed_s,
    }


def paced(driver: Driver, target: Target, scale: Scale, *, streams: int) -> Figures:
    """Streams of 50 chunks a second each, evenly spread: CPU, time in transit, and whether it keeps up."""
    transit: list[float] = []

    def arrived(client: Client, count: int) -> None:
        now = time.monotonic()
        transit.extend(now - client.sent_at.popleft() for _ in range(min(count, len(client.sent_at))))

    with _streams(driver, target, streams, on_events=arrived) as clients:
        _send_paced(driver, clients, 0.5)
        driver.until(lambda: not any(client.sent_at for client in clients), within_s=0.2)
        for client in clients:
            client.sent_at.clear()
        transit.clear()
        received, cpu_s = _events(clients), target.cpu_s()
        late_s = _send_paced(driver, clients, scale.window_s)
        used_s, in_time = target.cpu_s() - cpu_s, _events(clients) - received
        driver.until(lambda: not any(client.sent_at for client in clients), within_s=1.0)
        lost = sum(len(client.sent_at) for client in clients)
    due = streams * scale.window_s / _INTERVAL_S
    name = f"paced{streams}"
    return {
        f"{name}_us": 1e6 * used_s / max(1, in_time),
        f"{name}_transit_p50_ms": 1e3 * _quantile(transit, 0.5),
        f"{name}_transit_p99_ms": 1e3 * _quantile(transit, 0.99),
        f"{name}_stretch": due / max(1, in_time),
        f"{name}_driver_late_ms": 1e3 * late_s,
        f"{name}_lost": float(lost),
    }


def first_token(driver: Driver, target: Target, scale: Scale) -> Figures:
    """From the request to the first event at the client, one request after another."""
    waits = []
    client = Client(driver, target.port, key=target.key)
    for _ in range(scale.first_tokens):
        if client.sock.fileno() < 0:
            client = Client(driver, target.port, key=target.key)
        events = client.events
        asked_at = time.perf_counter()
        client.ask()
        while client.events == events and not client.failed:
            driver.step(0.001)
            if time.perf_counter() - asked_at > _PATIENCE_S:
                raise NotServed("no first token")
        waits.append(time.perf_counter() - asked_at)
        _end(driver, client)
    client.close()
    return {"ttft_p50_ms": 1e3 * _quantile(waits, 0.5), "ttft_p99_ms": 1e3 * _quantile(waits, 0.99)}


def requests(driver: Driver, target: Target, scale: Scale) -> Figures:
    """CPU of a request whose stream is one chunk; sixteen connections that are kept."""
    done = 0
    clients = [Client(driver, target.port, key=target.key) for _ in range(16)]

    def asked(stream: EngineStream) -> None:
        if driver.pair(stream) is not None:
            stream.finish()

    with _asked(driver, asked):
        for client in clients:
            client.ask()
        cpu_s, measured_from, ends = 0.0, 0.0, time.monotonic() + 0.3 + scale.requests_s
        begun = time.monotonic() + 0.3
        while (now := time.monotonic()) < ends:
            if not measured_from and now > begun:
                cpu_s, done, measured_from = target.cpu_s(), 0, now
            driver.step(0.01)
            for number, client in enumerate(clients):
                if client.answered:
                    done += 1
                    if client.sock.fileno() < 0:
                        client = clients[number] = Client(driver, target.port, key=target.key)
                    client.ask()
        used_s, passed_s = target.cpu_s() - cpu_s, time.monotonic() - measured_from
        for client in clients:
            client.close()
    return {"request_us": 1e6 * used_s / max(1, done), "requests_per_s": done / passed_s}


def memory(driver: Driver, target: Target, scale: Scale) -> Figures:
    """What an open stream takes whose engine is silent, at a gateway that has served only a few so far."""
    for _ in range(3):
        with _streams(driver, target, 8):
            driver.run_for(0.2)
    before = target.resident_bytes()
    with _streams(driver, target, scale.idle_streams):
        driver.run_for(0.7)
        grown = target.resident_bytes() - before
    return {"stream_kb": grown / scale.idle_streams / 1024}


def stalled_client(driver: Driver, target: Target, scale: Scale) -> Figures:
    """A client stops reading and the engine goes on: what the gateway takes in, holds, and grows by."""
    with _streams(driver, target, 1, receive_buffer=16 * 1024) as (client,):
        client.deafen()
        before, taken = target.resident_bytes(), 0
        last_taken = time.monotonic()
        assert client.engine is not None
        while taken < _STALLED_BYTES and time.monotonic() - last_taken < 1.0:
            took = client.engine.send_some()
            taken += took
            if took:
                last_taken = time.monotonic()
            driver.step(0.0 if took else 0.01)
        grown, held = target.resident_bytes() - before, target.held_bytes()
    figures = {"stalled_taken_kb": taken / 1024, "stalled_grown_kb": grown / 1024}
    if held is not None:
        figures["stalled_held_kb"] = held / 1024
    return figures


def aborts(driver: Driver, target: Target, scale: Scale) -> Figures:
    """From the client's leaving to the engine's seeing it, before and after the first event."""
    figures: Figures = {}
    for when in ("before", "after"):
        waits: list[float] = []
        until = time.monotonic() + 12.0
        while len(waits) < scale.aborts and (time.monotonic() < until or not waits):
            waits.append(_abort(driver, target, answered=when == "after"))
        figures[f"abort_{when}_ms"] = 1e3 * median(waits)
    return figures


SCENARIOS: dict[str, Callable[[Driver, Target, Scale], Figures]] = {
    "memory": memory,
    "stalled_client": stalled_client,
    "saturated": saturated,
    "paced100": lambda driver, target, scale: paced(driver, target, scale, streams=100),
    "paced500": lambda driver, target, scale: paced(driver, target, scale, streams=500),
    "first_token": first_token,
    "requests": requests,
    "aborts": aborts,
}


# ---- parts -------------------------------------------------------------------------------------------------


@contextmanager
def _streams(
    driver: Driver,
    target: Target,
    count: int,
    *,
    on_events: Callable[[Client, int], None] = lambda client, count: None,
    receive_buffer: int | None = None,
) -> Iterator[list[Client]]:
    """So many streams that have begun. Raises `NotServed` if some do not."""
    clients = []
    for _ in range(count):
        client = Client(driver, target.port, key=target.key, receive_buffer=receive_buffer)
        client.on_events = on_events
        client.ask()
        clients.append(client)
        driver.step(0.0005)
    if not driver.until(lambda: all(client.events for client in clients), within_s=_PATIENCE_S):
        begun = sum(client.events > 0 for client in clients)
        for client in clients:
            client.close()
        raise NotServed(f"{begun} of {count} streams began")
    try:
        yield clients
    finally:
        for client in clients:
            client.close()
        driver.until(
            lambda: all(client.engine is None or client.engine.ended for client in clients), within_s=6.0
        )


def _send_paced(driver: Driver, clients: list[Client], seconds: float) -> float:
    """Send on an absolute schedule; how late the driver itself was at worst."""
    apart_s = _INTERVAL_S / len(clients)
    begun, worst_s = time.monotonic(), 0.0
    for turn in range(round(seconds / apart_s)):
        due = begun + turn * apart_s
        while (now := time.monotonic()) < due:
            driver.step(0.001 if due - now > 0.002 else 0.0)
        worst_s = max(worst_s, now - due)
        client = clients[turn % len(clients)]
        if client.engine is not None and not client.engine.ended:
            client.sent_at.append(time.monotonic())
            client.engine.send()
        if turn % 8 == 0:
            driver.step()
    return worst_s


def _abort(driver: Driver, target: Target, *, answered: bool) -> float:
    """Seconds until the engine sees it."""
    seen: list[float] = []
    came: list[EngineStream] = []

    def asked(stream: EngineStream) -> None:
        came.append(stream)
        if answered:
            driver.pair(stream)

    with _asked(driver, asked):
        driver.on_abort = lambda stream: seen.append(time.monotonic())
        client = Client(driver, target.port, key=target.key)
        client.ask()
        if not driver.until(lambda: bool(client.events if answered else came), within_s=_PATIENCE_S):
            raise NotServed("the request did not arrive")
        driver.run_for(0.02)
        left_at = time.monotonic()
        client.close()
        while not seen and time.monotonic() - left_at < 10.0:
            driver.step(0.001)
    return (seen[0] if seen else time.monotonic()) - left_at


@contextmanager
def _asked(driver: Driver, on_ask: Callable[[EngineStream], None]) -> Iterator[None]:
    driver.on_ask = on_ask
    try:
        yield
    finally:
        driver.on_ask = driver.pair
        driver.on_abort = lambda stream: None


def _end(driver: Driver, client: Client) -> None:
    """Finish the client's stream, and leave its connection ready for the next."""
    if client.engine is not None and not client.engine.ended:
        client.engine.finish()
    driver.until(lambda: client.answered, within_s=_PATIENCE_S)


def _events(clients: list[Client]) -> int:
    return sum(client.events for client in clients)


def _quantile(values: list[float], q: float) -> float:
    if len(values) < 2:
        return values[0] if values else float("nan")
    return quantiles(values, n=1000, method="inclusive")[round(q * 1000) - 1]
