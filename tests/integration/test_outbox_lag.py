"""lag_seconds: how long the first event in line has been due and is not published; always a float."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import Outbox
from oncely.testing import RecordingPublisher
from tests.outboxes import Sessions, claim, emit, execute, expire_claims, fail

pytestmark = pytest.mark.in_schema

HOUR = timedelta(hours=1)


async def lag(outbox: Outbox, sessions: Sessions) -> float:
    """To ten seconds, since making and reading it takes a moment; its type is checked on the way."""
    async with sessions() as session:
        exact = await outbox.lag_seconds(session)
        assert type(exact) is float
        assert exact >= 0.0
        stats = await outbox.stats(session)
    assert exact <= stats.lag_seconds <= exact + 5
    return exact // 10 * 10


async def age(engine: AsyncEngine, seconds: int, *payloads: str, column: str = "created_at") -> None:
    """Let these events be as old as that."""
    await execute(
        engine,
        f"UPDATE outbox SET {column} = statement_timestamp() - :seconds * interval '1 second'"
        " WHERE payload #>> '{}' = ANY (:payloads)",
        seconds=seconds,
        payloads=list(payloads),
    )


async def test_an_empty_outbox_has_none(outbox: Outbox, sessions: Sessions, driver: str) -> None:
    async with sessions() as session:
        assert await outbox.lag_seconds(session) == 0.0
    assert await lag(outbox, sessions) == 0.0


async def test_it_is_the_age_of_the_first_event_in_line(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher, driver: str
) -> None:
    await emit(outbox, sessions, "first", "second")
    await age(engine, 100, "first")
    await age(engine, 50, "second")
    assert await lag(outbox, sessions) == 100
    await outbox.relay_once(sessions, publish, batch=1)
    assert await lag(outbox, sessions) == 50
    await outbox.relay_once(sessions, publish)
    assert await lag(outbox, sessions) == 0


async def test_what_is_in_flight_is_not_published_yet(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a")
    await age(engine, 100, "a")
    await claim(outbox, sessions)
    assert await lag(outbox, sessions) == 100
    await expire_claims(engine)
    assert await lag(outbox, sessions) == 100


async def test_a_dead_event_does_not_pin_it(outbox: Outbox, engine: AsyncEngine, sessions: Sessions) -> None:
    await emit(outbox, sessions, "dead", key="k")
    await age(engine, 10_000, "dead")
    await fail(outbox, sessions, "dead", delay=None)
    assert await lag(outbox, sessions) == 0
    await emit(outbox, sessions, "behind", key="k")
    await age(engine, 30, "behind")
    assert await lag(outbox, sessions) == 30


async def test_under_park_what_waits_behind_a_dead_event_does_not_count(
    parking: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    await emit(parking, sessions, "dead", "parked", key="k")
    await age(engine, 10_000, "dead", "parked")
    await fail(parking, sessions, "dead", delay=None)
    assert await lag(parking, sessions) == 0
    await emit(parking, sessions, "free")
    await emit(parking, sessions, "parked too", key="k", delay=timedelta(microseconds=1))
    await age(engine, 20, "free")
    assert await lag(parking, sessions) == 20
    async with sessions.begin() as session:
        assert await parking.replay(session) == 1
    assert await lag(parking, sessions) == 10_000


async def test_an_event_that_waits_for_its_next_try_counts(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "failed")
    await age(engine, 100, "failed")
    await fail(outbox, sessions, "failed", delay=HOUR)
    assert await lag(outbox, sessions) == 100


async def test_a_delayed_event_counts_from_when_it_was_due(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "delayed", delay=HOUR)
    await age(engine, 10_000, "delayed")
    assert await lag(outbox, sessions) == 0
    await age(engine, 40, "delayed", column="due_at")
    assert await lag(outbox, sessions) == 40


async def test_a_delayed_event_that_has_failed_counts_from_when_it_was_emitted(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    """When it was due first is not kept: the lag is too high rather than too low."""
    await emit(outbox, sessions, "delayed", delay=timedelta(microseconds=1))
    await age(engine, 100, "delayed")
    await fail(outbox, sessions, "delayed", delay=HOUR)
    assert await lag(outbox, sessions) == 100


async def test_a_time_in_the_future_is_no_negative_lag(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "of a server whose clock was set back")
    await age(engine, -3_600, "of a server whose clock was set back")
    async with sessions() as session:
        assert await outbox.lag_seconds(session) == 0.0


async def test_the_sessions_time_zone_does_not_matter(
    outbox: Outbox, engine: AsyncEngine, engines: Callable[..., AsyncEngine], driver: str, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a")
    await age(engine, 100, "a")
    there = engines()
    async with there.connect() as connection:
        await connection.exec_driver_sql("SET timezone = 'Asia/Tokyo'")
        assert await outbox.lag_seconds(connection) // 1 == 100


async def test_it_is_of_now_also_late_in_a_long_transaction(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a")
    async with sessions() as session:
        first = await outbox.lag_seconds(session)
        connection = await session.connection()
        await connection.exec_driver_sql("SELECT pg_sleep(0.05)")
        assert await outbox.lag_seconds(session) >= first + 0.05


async def test_it_works_above_read_committed(
    outbox: Outbox, engine: AsyncEngine, engines: Callable[..., AsyncEngine], sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a")
    await age(engine, 100, "a")
    above: Any = async_sessionmaker(engines(isolation_level="SERIALIZABLE"))
    assert await lag(outbox, above) == 100
