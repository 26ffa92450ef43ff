"""The database under the line ends connections, has none left, is full, stops, and is killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from oncely.testing import EmbeddedPostgres
from oncely.transaction import is_unavailable, sqlstates
from tests.acceptance.line import KEYS, Line
from tests.database import Database
from tests.outboxes import execute, rows
from tests.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.in_schema]

Recovered = Callable[[str, float], None]


async def test_backends_that_are_terminated_again_and_again_lose_and_double_nothing(
    driver: str, beside: Line, database: Database, recovered: Recovered
) -> None:
    name = {"application_name": "line"}
    engine = database.engine(connect_args={"server_settings": name} if driver == "asyncpg" else name)
    line = Line(engine, beside.redis, beside.stream)
    async with line.running():
        for _ in range(10):
            await beside.emit(2)
            await until(lambda: _is_busy(beside.engine))
            await execute(
                beside.engine,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'line'",
            )
        ended = time.monotonic()
        await until(beside.is_done)
        recovered(f"backends terminated ten times ({driver})", time.monotonic() - ended)
    await engine.dispose()
    await beside.check()


async def _is_busy(engine: AsyncEngine) -> bool:
    return await rows(engine, "SELECT 1 FROM pg_stat_activity WHERE application_name = 'line' LIMIT 1") != []


async def test_a_pool_without_a_connection_left_is_waited_for_and_loses_nothing(
    driver: str, beside: Line, database: Database, recovered: Recovered
) -> None:
    engine = database.engine(pool_size=1, max_overflow=0, pool_timeout=0.05)
    line = Line(engine, beside.redis, beside.stream)
    async with line.running() as (relay, _):
        async with engine.connect():
            await until(lambda: relay.waits_for == "database")
            await beside.emit(4)
        freed = time.monotonic()
        await until(beside.is_done)
        recovered(f"pool exhausted ({driver})", time.monotonic() - freed)
        await until(lambda: relay.waits_for is None)
    await engine.dispose()
    await beside.check()


FULL = """
CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100';
END $$
"""


@pytest.mark.parametrize("table", ["outbox_claims", "inbox", "handled"])
async def test_a_disk_that_is_full_below_relay_or_consumer_is_waited_for_and_loses_nothing(
    table: str, beside: Line, recovered: Recovered
) -> None:
    await execute(beside.engine, FULL)
    await execute(
        beside.engine, f"CREATE TRIGGER full_disk BEFORE INSERT ON {table} EXECUTE FUNCTION full_disk()"
    )
    async with beside.running() as (relay, consumer):
        if table == "outbox_claims":
            await until(lambda: relay.waits_for == "database")
        else:
            await until(lambda: _has_failed(consumer.stream, beside.redis))
        await execute(beside.engine, f"DROP TRIGGER full_disk ON {table}")
        freed = time.monotonic()
        await until(beside.is_done)
        recovered(f"disk full for {table}", time.monotonic() - freed)
    await beside.check()


async def _has_failed(stream: str, redis: Redis) -> bool:
    """Whether an entry was delivered a second time."""
    if not await redis.exists(stream):
        return False
    pending: Any = await redis.xpending_range(stream, "workers", "-", "+", 100)
    return any(one["times_delivered"] > 1 for one in pending)


async def test_a_disk_that_is_full_under_emit_undoes_the_callers_transaction_and_nothing_else(
    driver: str, beside: Line
) -> None:
    await execute(beside.engine, FULL)
    await execute(
        beside.engine, "CREATE TRIGGER full_disk BEFORE INSERT ON outbox EXECUTE FUNCTION full_disk()"
    )
    async with beside.running():
        with pytest.raises(DBAPIError) as raised:
            await beside.emit(4)
        assert "53100" in sqlstates(raised.value)
        await execute(beside.engine, "DROP TRIGGER full_disk ON outbox")
        await beside.emit(4)
        await until(beside.is_done)
    await beside.check()


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[EmbeddedPostgres]:
    """One that keeps what it has confirmed, also when it is killed."""
    with EmbeddedPostgres({"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}) as server:
        yield server


@pytest.fixture
async def own_engine(own_postgres: EmbeddedPostgres, driver: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(own_postgres.url(driver))
    yield engine
    await engine.dispose()


async def test_a_server_that_is_stopped_and_killed_under_the_line_loses_and_doubles_nothing(
    driver: str, own_postgres: EmbeddedPostgres, own_engine: AsyncEngine, redis: Redis, stream: str,
    recovered: Recovered,
) -> None:  # fmt: skip
    line = Line(own_engine, redis, stream)

    async def is_empty() -> bool:
        try:
            async with own_engine.begin() as connection:
                await connection.run_sync(line.metadata.drop_all)
        except Exception as error:
            if is_unavailable(error):  # it recovers from what the test before did to it
                return False
            raise
        return True

    await until(is_empty)
    await line.begin()
    async with line.running() as (relay, _):
        for end in (own_postgres.stop, own_postgres.kill):
            await line.emit(10)
            await asyncio.to_thread(end)
            await until(lambda: relay.waits_for == "database")
            await asyncio.to_thread(own_postgres.start)
            started = time.monotonic()
            await until(line.is_done)
            recovered(f"PostgreSQL: {end.__name__}, and started ({driver})", time.monotonic() - started)
    await line.check()
    assert (await line.in_order()).keys() == set(KEYS)
