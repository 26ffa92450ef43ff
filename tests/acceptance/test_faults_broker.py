"""The broker under the line is killed, flushed, and started without what it had."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely.testing import EmbeddedValkey
from tests.acceptance.line import Line
from tests.streams import DurableValkey
from tests.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.in_schema]

Recovered = Callable[[str, float], None]


@pytest.fixture
def forgetful() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


@pytest.fixture
def durable() -> Iterator[DurableValkey]:
    with DurableValkey() as server:
        yield server


async def test_a_broker_that_writes_down_what_it_confirms_may_be_killed_and_nothing_is_lost(
    engine: AsyncEngine, durable: DurableValkey, recovered: Recovered
) -> None:
    async with Redis.from_url(durable.url) as redis:
        line = Line(engine, redis, "events")
        await line.begin()
        async with line.running() as (relay, _):
            for _ in range(2):
                await line.emit(10)
                await asyncio.to_thread(durable.kill)
                await until(lambda: relay.waits_for == "broker")
                await asyncio.to_thread(durable.start)
                started = time.monotonic()
                await until(line.is_done)
                recovered("Valkey with appendfsync always killed, and started", time.monotonic() - started)
        await line.check()


@pytest.mark.parametrize("loss", ["flushed", "restarted without persistence"])
async def test_what_a_broker_has_lost_is_handled_after_republish_and_nothing_twice(
    loss: str, engine: AsyncEngine, forgetful: EmbeddedValkey, recovered: Recovered
) -> None:
    begun = datetime.now(UTC)
    async with Redis.from_url(forgetful.url) as redis:
        line = Line(engine, redis, "events")
        await line.begin()
        async with line.running():
            await until(line.is_done)
        before = await line.in_order()

        await line.emit(4)
        while (await line.relay().run_once()).published:
            pass  # they are in the stream, and nobody has handled them
        if loss == "flushed":
            await redis.flushall()
        else:
            await asyncio.to_thread(forgetful.kill)
            await asyncio.to_thread(forgetful.start)
        await line.emit(4)
        assert await line.in_order() == before

        async with line.sessions.begin() as session:
            assert await line.outbox.republish(session, since=begun) == 1 + 3 * 8
        republished = time.monotonic()
        async with line.running():
            await until(line.is_done)
        recovered(f"Valkey {loss}, from republish on", time.monotonic() - republished)
        await line.check()


async def test_a_line_whose_broker_is_flushed_under_it_misses_nothing_that_comes_later(
    engine: AsyncEngine, forgetful: EmbeddedValkey, recovered: Recovered
) -> None:
    async with Redis.from_url(forgetful.url) as redis:
        line = Line(engine, redis, "events")
        await line.begin()
        async with line.running():
            await until(line.is_done)
            await redis.flushall()
            flushed = time.monotonic()
            await line.emit(4)
            await until(line.is_done)
            recovered("Valkey flushed under a running line", time.monotonic() - flushed)
        assert await line.in_order() == {key: list(range(8)) for key in ("a", "b", "c")}
