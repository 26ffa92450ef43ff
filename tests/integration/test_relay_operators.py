"""What an operator sees and does: statistics, dead letters, cancelling, beside relays at work."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import Outbox, Reject
from oncely.stats import OutboxStats
from tests.outboxes import Sessions, claim, emit, execute, fail, rows, sent_sql
from tests.relays import Broker, hasty, running
from tests.waiting import until

pytestmark = pytest.mark.in_schema

HOUR = timedelta(hours=1)
EVENTS = 150
EMPTY = OutboxStats(ready=0, deferred=0, in_flight=0, retrying=0, dead=0, lag_seconds=0.0)


async def stats(outbox: Outbox, sessions: Sessions, **settings: int) -> OutboxStats:
    async with sessions() as session:
        return await outbox.stats(session, **settings)


async def test_an_empty_outbox(driver: str, outbox: Outbox, sessions: Sessions) -> None:
    assert await stats(outbox, sessions) == EMPTY


async def test_every_event_is_counted_in_one_state(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "dead")
    await fail(outbox, sessions, "dead", delay=None)
    await emit(outbox, sessions, "retrying", key="k")
    await fail(outbox, sessions, "retrying", delay=HOUR)
    await emit(outbox, sessions, "in flight", "in flight too")
    await claim(outbox, sessions)
    await emit(outbox, sessions, "ready")
    await emit(outbox, sessions, "ready, behind its key", key="k")
    await emit(outbox, sessions, "deferred", "deferred", "deferred", delay=HOUR)
    await emit(outbox, sessions, "deferred and due", delay=HOUR)
    await execute(engine, "UPDATE outbox SET due_at = now() WHERE payload = '\"deferred and due\"'")
    await emit(outbox, sessions, "published")
    await execute(engine, "UPDATE outbox SET published_at = now() WHERE payload = '\"published\"'")
    await execute(engine, "UPDATE outbox SET created_at = now() - interval '1 hour' WHERE dead_at IS NULL")
    with sent_sql(engine) as sent:
        found = await stats(outbox, sessions)
    assert replace(found, lag_seconds=0.0) == OutboxStats(
        ready=3, deferred=3, in_flight=2, retrying=1, dead=1, lag_seconds=0.0
    )
    assert 3600 <= found.lag_seconds < 3660
    assert len(sent) == 1


async def test_a_retried_event_in_flight_is_in_flight(outbox: Outbox, sessions: Sessions) -> None:
    await emit(outbox, sessions, "a")
    await fail(outbox, sessions, "a", delay=timedelta(0))
    await claim(outbox, sessions)
    found = await stats(outbox, sessions)
    assert replace(found, lag_seconds=0.0) == replace(EMPTY, in_flight=1)


async def test_no_state_is_counted_further_than_asked(outbox: Outbox, sessions: Sessions) -> None:
    await emit(outbox, sessions, *range(10))
    await emit(outbox, sessions, *range(10), delay=HOUR)
    found = await stats(outbox, sessions, at_most=7)
    assert (found.ready, found.deferred) == (7, 7)
    with pytest.raises(ValueError, match="at_most"):
        await stats(outbox, sessions, at_most=0)


async def test_counting_reads_along_the_indexes_whatever_the_statistics_say(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, *range(3_000))
    await execute(engine, "ANALYZE outbox")  # when everything was ready
    await execute(engine, "UPDATE outbox SET published_at = now()")
    await stats(outbox, sessions)
    statement = outbox._statistics._look
    async with engine.connect() as connection:
        compiled = str(statement.compile(connection.sync_connection))
        sql = compiled.replace("$1::INTEGER", "100000")
        plan = "\n".join(line for (line,) in await connection.execute(text(f"EXPLAIN {sql}")))
    assert "Seq Scan on outbox " not in plan


async def test_parked_events_are_ready_and_do_not_lag(
    engine: AsyncEngine, metadata: MetaData, sessions: Sessions
) -> None:
    outbox = Outbox(metadata, on_dead="park")
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await emit(outbox, sessions, "dead", "parked", key="k")
    await fail(outbox, sessions, "dead", delay=None)
    assert await stats(outbox, sessions) == replace(EMPTY, ready=1, dead=1)


async def test_dead_events_are_chosen_by_topic_error_time_and_id(
    driver: str, outbox: Outbox, sessions: Sessions
) -> None:
    [first] = await emit(outbox, sessions, "a", topic="orders")
    await fail(outbox, sessions, "a", error="ValueError: no", delay=None)
    await emit(outbox, sessions, "b", topic="orders")
    await fail(outbox, sessions, "b", error="TypeError: no", delay=None)
    await emit(outbox, sessions, "c", topic="mails")
    await fail(outbox, sessions, "c", error="TypeError: no", delay=None)
    async with sessions() as session:

        async def found(**which: object) -> list[str]:
            return [dead.payload_json for dead in await outbox.dead(session, **which)]  # type: ignore[arg-type]

        assert await found() == ['"a"', '"b"', '"c"']
        assert await found(topic="orders") == ['"a"', '"b"']
        assert await found(error="TypeError") == ['"b"', '"c"']
        assert await found(topic="orders", error="TypeError") == ['"b"']
        assert await found(limit=1) == ['"a"']
        [a, b, _] = await outbox.dead(session)
        assert await found(since=b.dead_at) == ['"b"', '"c"']
        assert await found(until=b.dead_at) == ['"a"']
        with pytest.raises(ValueError, match="time zone"):
            await found(since=datetime(2026, 1, 1))  # noqa: DTZ001  that is the point
        assert await found(since=datetime.now(UTC) + HOUR) == []
        assert a.id == first
        assert await outbox.replay(session, ids=[first]) == 1
        assert await outbox.discard(session, error="TypeError", topic="mails") == 1
        assert await found() == ['"b"']


async def test_replaying_and_discarding_pass_over_rows_that_somebody_has_locked(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a", "b")
    await fail(outbox, sessions, "a", "b", delay=None)
    async with engine.connect() as somebody:
        await somebody.execute(text("SELECT FROM outbox WHERE payload = '\"a\"' FOR UPDATE"))
        async with sessions.begin() as session:
            assert await outbox.replay(session) == 1
        async with sessions.begin() as session:
            assert await outbox.discard(session) == 0
    async with sessions.begin() as session:
        assert await outbox.discard(session) == 1


async def test_all_of_it_is_safe_beside_relays_at_work(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    """Dead events are replayed until they pass; cancelled ones never leave; nothing is lost or sent twice."""
    failing = {str(number): 2 for number in range(0, EVENTS, 7)}

    def fault(payload: str) -> Exception | None:
        failing[payload] -= 1
        return Reject("not yet") if failing[payload] >= 0 else None

    broker = Broker(**{payload: (lambda payload=payload: fault(payload)) for payload in failing})
    cancelled: set[int] = set()
    emitting = asyncio.Event()

    async def operate() -> None:
        while not emitting.is_set() or await left():
            async with sessions.begin() as session:
                await outbox.replay(session)
                await outbox.stats(session)
                await outbox.prune(session, older_than=timedelta(0), limit=10)
            await asyncio.sleep(0.01)

    async def left() -> bool:
        return await rows(engine, "SELECT 1 FROM outbox WHERE published_at IS NULL LIMIT 1") != []

    async def write() -> None:
        for number in range(EVENTS):
            async with sessions.begin() as session:
                event_id = await outbox.emit(session, "t", number, key=f"k{number % 5}")
            if number % 3 == 0:
                async with sessions.begin() as session:
                    if await outbox.cancel(session, event_id):
                        cancelled.add(number)
        emitting.set()

    relays = [hasty(Outbox(MetaData()), sessions, broker, batch=5) for _ in range(2)]
    async with running(*relays), asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(operate())
        group.create_task(write())
    await until(lambda: len(broker.received) == EVENTS - len(cancelled))
    assert sorted(broker.received) == sorted(set(range(EVENTS)) - cancelled)  # type: ignore[type-var]  # numbers
