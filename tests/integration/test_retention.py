"""Finished rows are deleted in bounded batches, and nothing else is touched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.pool import NullPool

from oncely import IdempotencyKeys, Inbox, Outbox, Retention, TablesMissing, fingerprint
from oncely.event import Event, uuid7
from tests.database import Database
from tests.outboxes import Sessions, claim, emit, execute, fail, rows, sent_sql, states
from tests.relays import AT_ONCE
from tests.schemas import schemas_of_their_own
from tests.waiting import until
from tests.wire import Wire

pytestmark = pytest.mark.in_schema

HOUR = timedelta(hours=1)
NOW = timedelta(0)


async def publish_all(engine: AsyncEngine, *, ago: timedelta = HOUR) -> None:
    """Mark all that is open as published so long ago."""
    sql = (
        "UPDATE outbox SET published_at = now() - CAST(:ago AS interval), due_at = NULL"
        " WHERE published_at IS NULL AND dead_at IS NULL"
    )
    await execute(engine, sql, ago=ago)


async def count(engine: AsyncEngine) -> int:
    [(found,)] = await rows(engine, "SELECT count(*) FROM outbox")
    return int(found)


async def test_only_what_was_published_long_enough_ago_goes(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "old")
    await publish_all(engine, ago=2 * HOUR)
    await emit(outbox, sessions, "new")
    await publish_all(engine, ago=HOUR / 2)
    await emit(outbox, sessions, "dead")
    await fail(outbox, sessions, "dead", delay=None)
    await emit(outbox, sessions, "retried")
    await fail(outbox, sessions, "retried", delay=HOUR)
    await emit(outbox, sessions, "in flight")
    await claim(outbox, sessions)
    await emit(outbox, sessions, "ready")
    await emit(outbox, sessions, "deferred", delay=HOUR)
    await execute(
        engine,
        "UPDATE outbox SET created_at = now() - interval '1 year', dead_at = dead_at - interval '1 year'",
    )
    assert await Retention(sessions, {outbox: HOUR}).run_once() == {"outbox": 1}
    assert await states(engine) == {
        "new": "published",
        "dead": "dead, tried 1",
        "retried": "waiting, tried 1",
        "in flight": "open, claimed",
        "ready": "open",
        "deferred": "waiting",
    }


async def test_rows_that_somebody_has_locked_are_passed_over(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "locked", "free")
    await publish_all(engine)
    async with engine.connect() as somebody:
        await somebody.execute(text("SELECT 1 FROM outbox WHERE payload = '\"locked\"' FOR UPDATE"))
        async with asyncio.timeout(10):
            assert await Retention(sessions, {outbox: NOW}).run_once() == {"outbox": 1}
    assert await states(engine) == {"locked": "published"}


async def test_two_at_once_delete_every_row_once(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, *range(1_000))
    await publish_all(engine)

    async def prune() -> int:
        retention, total = Retention(sessions, {outbox: NOW}, batch=50), 0
        while deleted := (await retention.run_once())["outbox"]:
            total += deleted
        return total

    assert sum(await asyncio.gather(prune(), prune())) == 1_000
    assert await count(engine) == 0


async def test_no_statement_deletes_more_than_a_batch_and_each_is_committed(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, *range(25))
    await publish_all(engine)
    retention = Retention(sessions, {outbox: NOW}, batch=10)
    left = []
    with sent_sql(engine) as sent:
        for _ in range(4):
            await retention.run_once()
            left.append(await count(engine))
    assert left == [15, 5, 0, 0]
    assert sum("DELETE" in sql for sql in sent) == 4


async def test_at_work_it_deletes_all_that_is_finished_and_stops_when_told(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, *range(100))
    await publish_all(engine)
    await emit(outbox, sessions, "ready")
    stop = asyncio.Event()
    work = asyncio.create_task(Retention(sessions, {outbox: NOW}, batch=10, interval=HOUR).run(stop))

    async def only_the_ready() -> bool:
        return await states(engine) == {"ready": "open"}

    await until(only_the_ready)
    stop.set()
    async with asyncio.timeout(10):
        await work


async def test_it_keeps_house_for_keys_and_inboxes_too(
    driver: str, engine: AsyncEngine, metadata: MetaData, sessions: Sessions
) -> None:
    outbox, keys, inbox = Outbox(metadata), IdempotencyKeys(metadata), Inbox(metadata)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)

    async def answer() -> tuple[int, str]:
        return 201, "made"

    async def handle() -> None: ...

    async with sessions.begin() as session:
        await keys.run(session, scope="s", key="k", fingerprint=fingerprint("r"), work=answer)
        await inbox.run(session, Event(uuid7(), "t", None), handle, consumer="c")
    await emit(outbox, sessions, "a")
    await publish_all(engine)
    retention = Retention(sessions, {outbox: HOUR / 2, keys: NOW, inbox: NOW})
    assert await retention.run_once() == {"outbox": 1, "idempotency_keys": 1, "inbox": 1}


async def test_tables_of_one_name_in_two_schemas_are_told_apart(
    database: Database, engine: AsyncEngine, sessions: Sessions
) -> None:
    metadata = MetaData()
    with schemas_of_their_own(database, "one", "two") as schemas:
        outboxes = [Outbox(metadata, schema=schema) for schema in schemas]
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        await emit(outboxes[0], sessions, *range(3))
        await execute(engine, f'UPDATE "{schemas[0]}".outbox SET published_at = now()')
        deleted = await Retention(sessions, dict.fromkeys(outboxes, NOW)).run_once()
    assert deleted == {f"{schemas[0]}.outbox": 3, f"{schemas[1]}.outbox": 0}


async def test_a_database_that_ends_its_connections_is_waited_for(
    driver: str, outbox: Outbox, engines: Callable[..., AsyncEngine], sessions: Sessions
) -> None:
    fresh = engines(poolclass=NullPool)
    end = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE pid <> pg_backend_pid() AND datname = current_database() AND query !~ 'SCHEMA'"
    )
    retention = Retention(sessions, {outbox: NOW}, interval=timedelta(milliseconds=1), outage=AT_ONCE)
    stop = asyncio.Event()
    work = asyncio.create_task(retention.run(stop))
    for number in range(3):
        await emit(outbox, async_sessionmaker(fresh), number)
        await rows(fresh, end)
        await publish_all(fresh)

        async def gone() -> bool:
            return await count(fresh) == 0

        await until(gone)
    stop.set()
    await work


async def test_a_database_that_says_nothing_is_waited_for_and_that_shows(
    database: Database, outbox: Outbox, sessions: Sessions, engine: AsyncEngine
) -> None:
    await emit(outbox, sessions, "a")
    await publish_all(engine)
    async with Wire.to_postgres(database.url) as wire:
        through = Database(wire.url, database.schema).engine()
        retention = Retention(
            async_sessionmaker(through),
            {outbox: NOW},
            interval=timedelta(milliseconds=1),
            outage=AT_ONCE,
            database_timeout=timedelta(milliseconds=300),
        )
        stop = asyncio.Event()
        work = asyncio.create_task(retention.run(stop))
        await until(lambda: retention.last_success is not None)
        assert retention.waits_for is None
        wire.silence()
        await until(lambda: retention.waits_for == "database")
        wire.restore()
        await until(lambda: retention.waits_for is None)
        stop.set()
        await work
        await through.dispose()
    assert await count(engine) == 0


async def test_a_missing_table_ends_it(outbox: Outbox, engine: AsyncEngine, sessions: Sessions) -> None:
    await execute(engine, "DROP TABLE outbox")
    with pytest.raises(TablesMissing, match="'outbox'"):
        await Retention(sessions, {outbox: NOW}).run()


async def test_a_cutoff_is_a_time_with_a_zone(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a")
    await publish_all(engine, ago=HOUR)
    async with sessions.begin() as session:
        assert await outbox.prune(session, older_than=datetime.now(UTC) - 2 * HOUR) == 0
        assert await outbox.prune(session, older_than=datetime.now(UTC)) == 1
        with pytest.raises(ValueError, match="time zone"):
            await outbox.prune(session, older_than=datetime(2026, 1, 1))  # noqa: DTZ001  that is the point


@pytest.mark.parametrize(
    ("age", "settings", "named"),
    [
        (timedelta(seconds=-1), {}, "outbox"),
        (NOW, {"interval": NOW}, "interval"),
        (NOW, {"batch": 0}, "batch"),
        (NOW, {"database_timeout": NOW}, "database_timeout"),
        (NOW, {"grace": NOW}, "grace"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    age: timedelta, settings: dict[str, Any], named: str
) -> None:
    sessions: async_sessionmaker[AsyncSession] = async_sessionmaker()
    with pytest.raises(ValueError, match=named):
        Retention(sessions, {Outbox(MetaData()): age}, **settings)
