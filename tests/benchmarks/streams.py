"""Consuming a stream, against a bare loop: XREADGROUP, JSON decoded, one XACK a batch.

Ours is the loop that a worker runs, `run`. Both call a handler that does nothing, with the payload
decoded. The bare loop knows no keys, no
retries, no dead letters and no type for an event: that is what the ratio pays for.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from redis.asyncio import Redis

from oncely.event import Event, uuid7
from oncely.streams import StreamConsumer, stream_publisher
from tests.benchmarks.ratio import Ratio, Servers, compare

_EVENTS = 20_000
_COUNT = 500
_PAYLOAD = {"order_id": 12345, "total": "99.90", "currency": "EUR", "lines": [{"sku": "A-1", "quantity": 2}]}


class _Consuming:
    """A stream of its own, filled before each round."""

    def __init__(self, redis: Redis, stream: str) -> None:
        self.redis = redis
        self.stream = stream

    async def prepare(self) -> None:
        await self.redis.delete(self.stream)
        events = [
            Event(uuid7(), "order.paid", _PAYLOAD, key=f"order-{number % 5000}") for number in range(_EVENTS)
        ]
        await stream_publisher(self.redis, self.stream)(events)
        await self.redis.xgroup_create(self.stream, "workers", "0")


class _Ours(_Consuming):
    async def __call__(self) -> int:
        consumer = StreamConsumer(self.redis, stream=self.stream, concurrency=64, count=_COUNT)
        stop, done = asyncio.Event(), 0

        @consumer.subscribe("order.paid")
        async def handle(event: Event) -> None:
            nonlocal done
            done += 1
            if done == _EVENTS:
                stop.set()

        await consumer.run(stop)
        return done


class _Bare(_Consuming):
    async def __call__(self) -> int:
        async def handle(topic: str, payload: object) -> None: ...

        done = 0
        while done < _EVENTS:
            reply: Any = await self.redis.xreadgroup("workers", "bare", {self.stream: ">"}, count=_COUNT)
            [[_, entries]] = reply
            for _, fields in entries:
                await handle(fields[b"topic"].decode(), json.loads(fields[b"payload"]))
            await self.redis.xack(self.stream, "workers", *(entry_id for entry_id, _ in entries))
            done += len(entries)
        return done


async def measure(servers: Servers) -> list[Ratio]:
    """Events handled a second, by one worker."""
    async with Redis.from_url(servers.valkey.url) as redis:
        return [
            await compare(
                "consume a stream, concurrency 64",
                ours=_Ours(redis, "bench:ours"),
                bare=_Bare(redis, "bench:bare"),
                limit=0.7,
                rounds=9,
            )
        ]
