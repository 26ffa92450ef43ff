"""prune: what was published long enough ago goes, in bounded batches, and nothing else does."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import Outbox
from oncely.testing import RecordingPublisher
from tests.outboxes import Sessions, claim, emit, execute, fail, locked, rows, sent_sql, states

pytestmark = pytest.mark.in_schema

HOUR = timedelta(hours=1)


async def published(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, *payloads: object, ago: timedelta
) -> None:
    """Events that were emitted and published so long ago; their ids tell the time too."""
    await emit(outbox, sessions, *payloads, topic="published")
    await execute(
        engine,
        """
        UPDATE outbox SET published_at = statement_timestamp() - CAST(:ago AS interval),
            created_at = statement_timestamp() - CAST(:ago AS interval),
            id = CAST(lpad(to_hex(CAST(1000 * extract(epoch FROM
                     statement_timestamp() - CAST(:ago AS interval)) AS bigint)), 12, '0')
                 || substr(replace(CAST(id AS text), '-', ''), 13) AS uuid)
        WHERE topic = 'published' AND published_at IS NULL
        """,
        ago=ago,
    )


async def prune(outbox: Outbox, sessions: Sessions, **options: Any) -> int:
    async with sessions.begin() as session:
        return await outbox.prune(session, **options)


async def count(engine: AsyncEngine) -> int:
    [(rows_left,)] = await rows(engine, "SELECT count(*) FROM outbox")
    return int(rows_left)


async def test_only_what_was_published_before_goes(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    await published(outbox, engine, sessions, "old 1", "old 2", ago=timedelta(days=8))
    await published(outbox, engine, sessions, "young", ago=timedelta(days=6))
    assert await prune(outbox, sessions, older_than=timedelta(days=7)) == 2
    assert await states(engine) == {"young": "published"}
    assert await prune(outbox, sessions, older_than=timedelta(days=7)) == 0
    assert await prune(outbox, sessions, older_than=timedelta(0)) == 1


async def test_it_never_touches_what_is_not_published(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher, driver: str
) -> None:
    await emit(outbox, sessions, "failed", "dead")
    await fail(outbox, sessions, "failed", delay=HOUR)
    await fail(outbox, sessions, "dead", delay=None)
    await emit(outbox, sessions, "in flight")
    await claim(outbox, sessions)
    await emit(outbox, sessions, "ready")
    await emit(outbox, sessions, "deferred", delay=HOUR)
    await published(outbox, engine, sessions, "published", ago=HOUR)
    await execute(engine, "UPDATE outbox SET created_at = created_at - interval '1 year'")
    future = datetime.now(UTC) + timedelta(days=365)
    assert await prune(outbox, sessions, older_than=future) == 1
    assert await states(engine) == {
        "failed": "waiting, tried 1",
        "dead": "dead, tried 1",
        "in flight": "open, claimed",
        "ready": "open",
        "deferred": "waiting",
    }


async def test_what_counts_is_when_it_was_published_and_not_when_it_was_emitted(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await published(outbox, engine, sessions, "late", ago=timedelta(days=30))
    await execute(engine, "UPDATE outbox SET published_at = statement_timestamp() - interval '1 minute'")
    assert await prune(outbox, sessions, older_than=HOUR) == 0
    assert await prune(outbox, sessions, older_than=timedelta(seconds=30)) == 1


@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=9)), timezone(timedelta(hours=-11))])
async def test_the_cutoff_may_be_a_time_in_any_zone(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, zone: timezone, driver: str
) -> None:
    await published(outbox, engine, sessions, "old", ago=HOUR)
    now = datetime.now(zone)
    assert await prune(outbox, sessions, older_than=now - timedelta(minutes=61)) == 0
    assert await prune(outbox, sessions, older_than=now - timedelta(minutes=59)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"older_than": datetime(2026, 1, 1)}, "older_than is a time without a time zone"),  # noqa: DTZ001
        ({"older_than": timedelta(seconds=-1)}, "older_than is below zero: -1 day, 23:59:59"),
        ({"older_than": HOUR, "limit": -1}, "limit must be 0 or more, not -1"),
    ],
)
async def test_a_cutoff_or_limit_that_makes_no_sense_is_refused_before_any_sql(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, options: Any, message: str
) -> None:
    async with sessions() as session:
        with sent_sql(engine) as sent, pytest.raises(ValueError) as raised:
            await outbox.prune(session, **options)
    assert str(raised.value) == message
    assert sent == []


@pytest.mark.parametrize(
    "older_than", [timedelta.max, timedelta(days=10**6), datetime(1, 1, 2, tzinfo=UTC)], ids=str
)
async def test_nothing_is_older_than_everything(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, older_than: Any, driver: str
) -> None:
    await published(outbox, engine, sessions, "old", ago=timedelta(days=20_000))
    assert await prune(outbox, sessions, older_than=older_than) == 0
    assert await prune(outbox, sessions, older_than=datetime(9999, 12, 31, tzinfo=UTC)) == 1


async def test_the_limit_is_kept_and_the_oldest_go_first(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await published(outbox, engine, sessions, *range(5), ago=timedelta(hours=3))
    await published(outbox, engine, sessions, *range(5, 8), ago=timedelta(hours=2))
    assert await prune(outbox, sessions, older_than=HOUR, limit=0) == 0
    assert await prune(outbox, sessions, older_than=HOUR, limit=6) == 6
    assert len(set(await states(engine)) & {"5", "6", "7"}) == 2
    assert await prune(outbox, sessions, older_than=HOUR, limit=6) == 2


async def test_one_statement_deletes_at_most_a_thousand(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    await published(outbox, engine, sessions, *range(2_300), ago=timedelta(hours=2))
    with sent_sql(engine) as sent:
        assert await prune(outbox, sessions, older_than=HOUR) == 2_300
    assert len(sent) == 3
    assert await count(engine) == 0


async def test_each_batch_begins_where_the_one_before_ended(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await published(outbox, engine, sessions, *range(2_000), ago=timedelta(hours=2))
    await emit(outbox, sessions, "kept")
    after: list[Any] = []

    def note(*arguments: Any) -> None:
        after.append(arguments[3])

    event.listen(engine.sync_engine, "before_cursor_execute", note)
    assert await prune(outbox, sessions, older_than=HOUR, limit=2_000) == 2_000
    event.remove(engine.sync_engine, "before_cursor_execute", note)
    assert len({str(parameters) for parameters in after}) == 2
    assert await states(engine) == {"kept": "open"}


async def test_a_row_that_somebody_has_locked_is_passed_over(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    await published(outbox, engine, sessions, "a", "locked", "c", ago=timedelta(hours=2))
    async with locked(engine, "locked"), sessions.begin() as session:
        await session.execute(text("SET LOCAL lock_timeout = '300ms'"))
        assert await outbox.prune(session, older_than=HOUR) == 2
    assert await states(engine) == {"locked": "published"}
    assert await prune(outbox, sessions, older_than=HOUR) == 1


async def test_two_at_once_share_the_work_and_both_count_right(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await published(outbox, engine, sessions, *range(1_500), ago=timedelta(hours=2))
    async with asyncio.timeout(10), sessions.begin() as one, sessions.begin() as other:
        assert await outbox.prune(one, older_than=HOUR, limit=700) == 700
        assert await outbox.prune(other, older_than=HOUR) == 800
    await published(outbox, engine, sessions, *range(1_500), ago=timedelta(hours=2))
    counts = await asyncio.gather(*(prune(outbox, sessions, older_than=HOUR) for _ in range(4)))
    assert sum(counts) == 1_500
    assert await count(engine) == 0


async def test_it_is_the_callers_transaction(outbox: Outbox, engine: AsyncEngine, sessions: Sessions) -> None:
    await published(outbox, engine, sessions, "old", ago=timedelta(hours=2))
    async with sessions() as session:
        assert await outbox.prune(session, older_than=HOUR) == 1
        await session.rollback()
    assert await states(engine) == {"old": "published"}


@pytest.mark.parametrize("minutes", [-59, 59])
async def test_an_applications_clock_may_be_an_hour_off(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, minutes: int
) -> None:
    """The time in an id is the application's; when it was published, the database says."""
    off = timedelta(minutes=minutes)
    await published(outbox, engine, sessions, "old", ago=timedelta(days=7, seconds=1) - off)
    await execute(engine, "UPDATE outbox SET published_at = published_at - CAST(:off AS interval)", off=off)
    assert await prune(outbox, sessions, older_than=timedelta(days=7)) == 1
