"""Workers that are killed in the middle of handlers, and connections that are cut: nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from oncely.streams import StreamConsumer, stream_publisher
from tests.streams import Recorder, events, pending, until


@asynccontextmanager
async def worker(
    url: str, stream: str, name: str, *, attempts: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.acceptance.streams_worker", url, stream, name, str(attempts)),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def calls(redis: Redis, stream: str) -> list[tuple[object, int, str]]:
    """What the handlers have noted so far."""
    notes: Any = await redis.lrange(f"{stream}:log", 0, -1)
    return [tuple(json.loads(note)) for note in notes]


async def count(redis: Redis, stream: str) -> int:
    """How many notes there are."""
    return int(await redis.llen(f"{stream}:log"))


async def ended(redis: Redis, stream: str) -> set[object]:
    return {payload for payload, _, what in await calls(redis, stream) if what == "ended"}


def attempts(noted: list[tuple[object, int, str]]) -> dict[object, list[int]]:
    """The attempt of each time that a handler was called, by payload."""
    begun = defaultdict(list)
    for payload, attempt, what in noted:
        if what == "begun":
            begun[payload].append(attempt)
    return begun


async def test_an_event_that_kills_its_worker_is_found_and_its_neighbours_live(
    redis_url: str, redis: Redis, stream: str
) -> None:
    good = list(range(30))
    await stream_publisher(redis, stream)(events(*good[:10], "poison", *good[10:]))
    consumer = StreamConsumer(redis, stream=stream)

    async def is_settled() -> bool:
        try:
            return await pending(consumer, redis) == [] and await ended(redis, stream) >= set(good)
        except Exception:
            return False

    names = itertools.cycle(["", "the same", "the same"])
    while not await is_settled():
        async with worker(redis_url, stream, next(names), attempts=3) as process:
            settled = asyncio.create_task(until(is_settled, 30))
            died = asyncio.create_task(process.wait())
            await asyncio.wait({settled, died}, return_when=asyncio.FIRST_COMPLETED)
            settled.cancel()
    noted = await calls(redis, stream)
    assert attempts(noted)["poison"] == [1, 2, 3]
    assert (
        max(
            Counter(payload for payload, _, what in noted if what == "begun" and payload != "poison").values()
        )
        <= 2
    )
    assert max(attempt for payload, attempt, _ in noted if payload != "poison") <= 2
    [letter] = await consumer.dead_letters.list()
    assert letter.event is not None
    assert letter.event.payload == "poison"
    assert letter.attempts == 3


async def test_workers_that_are_killed_again_and_again_lose_nothing_and_count_truly(
    redis_url: str, redis: Redis, stream: str
) -> None:
    good: list[object] = list(range(200))
    await stream_publisher(redis, stream)(events(*good))
    chance = random.Random(7)
    consumer = StreamConsumer(redis, stream=stream)

    for name in ("", "the same", "the same", ""):
        async with worker(redis_url, stream, name, attempts=20) as process:
            enough = await count(redis, stream) + chance.randint(1, 90)

            async def is_time(enough: int = enough) -> bool:
                return await count(redis, stream) >= enough or await ended(redis, stream) == set(good)

            await until(is_time, 20)
            process.kill()
    async with worker(redis_url, stream, "", attempts=20):
        await until(lambda: is_done(consumer, redis, set(good)), 20)
    for begun in attempts(await calls(redis, stream)).values():
        assert begun == sorted(set(begun))
        assert len(begun) <= begun[-1]
    assert await consumer.dead_letters.list() == []


async def test_connections_that_are_cut_lose_nothing(redis_url: str, redis: Redis, stream: str) -> None:
    async with Redis.from_url(redis_url, client_name="victim") as client:
        handler = Recorder()
        consumer = StreamConsumer(client, stream=stream, retry_after_ms=100, count=7)
        consumer.subscribe("*", handler)
        stop = asyncio.Event()
        running = asyncio.create_task(consumer.run(stop))
        publish = stream_publisher(redis, stream)

        async def cut() -> None:
            for found in await redis.client_list():
                if found["name"] == "victim":
                    await redis.client_kill_filter(_id=found["id"])

        for number in range(100):
            await publish(events(number * 2, number * 2 + 1))
            await cut()
        await until(lambda: has_all(handler, 200), 30)
        stop.set()
        await running
    assert set(handler.handled) == set(range(200))
    assert await pending(consumer, redis) == []


async def has_all(handler: Recorder, count: int) -> bool:
    return len(set(handler.handled)) == count


async def is_done(consumer: StreamConsumer, redis: Redis, payloads: set[object]) -> bool:
    return await ended(redis, consumer.stream) == payloads and await pending(consumer, redis) == []
