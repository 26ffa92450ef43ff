"""A key that is held back keeps its events waiting in line, however many, and nobody else's."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import Outbox, Reject
from oncely.backoff import Backoff
from tests.outboxes import Sessions, emit, execute
from tests.relays import Broker, hasty, running
from tests.waiting import until

pytestmark = pytest.mark.in_schema

LATER = Backoff(first=timedelta(hours=1), maximum=timedelta(hours=1))


async def outbox_of(engine: AsyncEngine, metadata: MetaData, **settings: object) -> Outbox:
    outbox = Outbox(metadata, **settings)  # type: ignore[arg-type]  # on_dead
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    return outbox


async def fill_behind(engine: AsyncEngine, key: str, count: int) -> None:
    """`count` events of the key, payloads 0, 1, 2, …, as if they had been emitted."""
    await execute(
        engine,
        "INSERT INTO outbox (id, topic, key, payload) SELECT gen_random_uuid(), 't', :key, to_jsonb(number)"
        " FROM generate_series(0, :count - 1) AS number ORDER BY number",
        key=key,
        count=count,
    )


async def test_a_large_backlog_behind_a_failing_key_slows_no_claim_and_leaves_in_order_later(
    engine: AsyncEngine, metadata: MetaData, sessions: Sessions
) -> None:
    outbox = await outbox_of(engine, metadata)
    broker = Broker(bad=ValueError("no"))
    relay = hasty(outbox, sessions, broker, retry=LATER, batch=10_000)
    await emit(outbox, sessions, "bad", key="k")
    await relay.run_once()

    async def pass_others(count: int) -> float:
        """The shortest of `count` passes in seconds, each over one event of a key of its own."""
        times = []
        for number in range(count):
            await emit(outbox, sessions, "other", key=f"other {number}")
            begun = time.perf_counter()
            assert (await relay.run_once()).published == 1
            times.append(time.perf_counter() - begun)
        return min(times)

    before = await pass_others(10)
    await fill_behind(engine, "k", 100_000)
    await execute(engine, "ANALYZE outbox")  # as autovacuum does within a minute, for the settling
    await pass_others(3)  # the way around is found
    assert await pass_others(10) < 2 * before + 0.005
    broker.faults.clear()
    broker.received.clear()
    await execute(engine, "UPDATE outbox SET due_at = now() WHERE attempts > 0")
    while (await relay.run_once()).published:
        pass
    assert broker.received == ["bad", *range(100_000)]


async def test_several_relays_go_around_a_held_key_and_take_its_events_up_in_order_when_it_is_free(
    engine: AsyncEngine, metadata: MetaData, sessions: Sessions
) -> None:
    outbox = await outbox_of(engine, metadata)
    broker = Broker(bad=ValueError("no"))
    relays = [
        hasty(Outbox(MetaData()), sessions, broker, retry=LATER, batch=50, max_attempts=100) for _ in range(3)
    ]
    await emit(outbox, sessions, "bad", key="k")
    await relays[0].run_once()
    await fill_behind(engine, "k", 500)
    others = 0
    async with running(*relays):
        for held in (True, False, True):
            for _ in range(5):
                await emit(outbox, sessions, *([f"other {held}"] * 20))
                others += 20
            if not held:
                broker.faults.clear()
                await execute(engine, "UPDATE outbox SET due_at = now() WHERE attempts > 0")
            await until(lambda: sum("other" in str(payload) for payload in broker.received) == others)  # noqa: B023
        await until(lambda: len(broker.received) == others + 501)
    assert [payload for payload in broker.received if "other" not in str(payload)] == ["bad", *range(500)]


async def test_parked_behind_a_dead_event_they_wait_until_it_is_replayed(
    driver: str, engine: AsyncEngine, metadata: MetaData, sessions: Sessions
) -> None:
    outbox = await outbox_of(engine, metadata, on_dead="park")
    broker = Broker(bad=ValueError("no"))
    relay = hasty(outbox, sessions, broker, max_attempts=1)
    await emit(outbox, sessions, "bad", 1, 2, key="k")
    await emit(outbox, sessions, "other")
    for _ in range(5):
        await relay.run_once()
    assert broker.received == ["other"]
    broker.faults.clear()
    async with sessions.begin() as session:
        assert await outbox.replay(session) == 1
    while (await relay.run_once()).claimed:
        pass
    assert broker.received == ["other", "bad", 1, 2]


async def test_parked_behind_a_dead_event_they_leave_when_it_is_discarded(
    engine: AsyncEngine, metadata: MetaData, sessions: Sessions
) -> None:
    outbox = await outbox_of(engine, metadata, on_dead="park")
    broker = Broker(bad=Reject("never"))
    relay = hasty(outbox, sessions, broker)
    await emit(outbox, sessions, "bad", 1, 2, key="k")
    for _ in range(3):
        await relay.run_once()
    assert broker.received == []
    async with sessions.begin() as session:
        assert await outbox.discard(session) == 1
    await relay.run_once()
    assert broker.received == [1, 2]


async def test_by_default_a_dead_event_holds_nobody_back(
    engine: AsyncEngine, metadata: MetaData, sessions: Sessions
) -> None:
    outbox = await outbox_of(engine, metadata)
    broker = Broker(bad=Reject("never"))
    relay = hasty(outbox, sessions, broker)
    await emit(outbox, sessions, "bad", 1, 2, key="k")
    while (await relay.run_once()).claimed:
        pass
    assert broker.received == [1, 2]
