"""Callers that are cancelled, cut off or killed in the middle of a key's work: nothing of it remains.

All on one pooled connection, so that whatever is left behind would stand in the next caller's way.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from oncely import Outcome
from tests.database import Database, both_drivers
from tests.keys import Shop
from tests.waiting import backend_waits, until

pytestmark = [pytest.mark.in_schema, both_drivers]

WORKED = Outcome(201, "made", replayed=False)


@pytest.fixture
async def shop(engines: Callable[..., AsyncEngine]) -> Shop:
    """A shop with one connection for everything."""
    return await Shop.open(engines(pool_size=1, max_overflow=0, pool_timeout=5))


@pytest.fixture
def observer(engines: Callable[..., AsyncEngine]) -> AsyncEngine:
    """Another way into the database."""
    return engines(pool_size=2)


async def idle_in_transaction(observer: AsyncEngine) -> int:
    query = text("""
        SELECT count(*) FROM pg_stat_activity
        WHERE state LIKE 'idle in transaction%' AND datname = current_database() AND pid <> pg_backend_pid()
    """)
    async with observer.connect() as connection:
        return int(await connection.scalar(query) or 0)


async def assert_nothing_remains(shop: Shop, observer: AsyncEngine, orders: list[str] | None = None) -> None:
    """No key, no order but those, no transaction that hangs; and the key is free at once."""

    async def nobody_is_left() -> bool:
        return await idle_in_transaction(observer) == 0

    await until(nobody_is_left)
    before = Shop(observer)
    assert (await before.stored(), await before.items()) == ([], orders or [])
    async with asyncio.timeout(5):
        assert await shop.request() == WORKED
    assert await shop.request() == Outcome(201, "made", replayed=True)


async def terminate(session: AsyncSession, observer: AsyncEngine) -> None:
    """The server ends the session's backend."""
    pid = await session.scalar(text("SELECT pg_backend_pid()"))
    async with observer.connect() as connection:
        await connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})


Waits = Callable[[AsyncSession], Awaitable[object]]


async def in_the_database(session: AsyncSession) -> None:
    # Not for long: what anyio cuts off on asyncpg goes on in the server, with or without a key.
    await session.execute(text("SELECT pg_sleep(0.7)"))


async def elsewhere(session: AsyncSession) -> None:
    await asyncio.sleep(30)


Limit = Callable[[], AbstractAsyncContextManager[Callable[[], None]]]
"""A time limit around a block, which begins when the block calls what it gets."""


@asynccontextmanager
async def by_asyncio() -> AsyncIterator[Callable[[], None]]:
    with suppress(TimeoutError):
        async with asyncio.timeout(None) as limit:
            yield lambda: limit.reschedule(asyncio.get_running_loop().time() + 0.05)


@asynccontextmanager
async def by_anyio() -> AsyncIterator[Callable[[], None]]:
    with anyio.CancelScope() as scope:

        def begin() -> None:
            scope.deadline = anyio.current_time() + 0.05

        yield begin


@pytest.mark.parametrize("waits", [in_the_database, elsewhere])
@pytest.mark.parametrize("limit", [by_asyncio, by_anyio])
async def test_work_that_is_cut_off_leaves_nothing(
    shop: Shop, observer: AsyncEngine, limit: Limit, waits: Waits
) -> None:
    async with limit() as begin, shop.sessions.begin() as session:

        async def meanwhile() -> None:
            begin()
            await waits(session)

        await shop.order(session, meanwhile=meanwhile)
    assert shop.worked == 1
    await assert_nothing_remains(shop, observer)


@pytest.mark.parametrize("waits", [in_the_database, elsewhere])
@pytest.mark.parametrize("limit", [by_asyncio, by_anyio])
async def test_a_caller_who_goes_on_after_the_time_limit_commits_no_key(
    shop: Shop, observer: AsyncEngine, limit: Limit, waits: Waits
) -> None:
    committed = False
    async with shop.sessions() as session:
        await session.execute(text("INSERT INTO orders (item) VALUES ('before')"))
        async with limit() as begin:

            async def meanwhile() -> None:
                begin()
                await waits(session)

            await shop.order(session, meanwhile=meanwhile)
        with suppress(SQLAlchemyError):  # its connection may be gone with the statement that was cut off
            await session.commit()
            committed = True
    assert committed or (limit, waits) != (by_asyncio, elsewhere)
    await assert_nothing_remains(shop, observer, ["before"] if committed else [])


async def test_a_task_that_is_cancelled_while_it_waits_for_the_key_leaves_nothing(
    shop: Shop, observer: AsyncEngine
) -> None:
    async with Shop(observer).sessions() as first:
        await shop.keys.claim(first, scope="Ada", key="order-1", fingerprint=b"one book")
        waiter = asyncio.create_task(shop.request())
        await backend_waits(observer, "advisory")
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        await first.rollback()
    assert shop.worked == 0
    await assert_nothing_remains(shop, observer)


async def test_work_whose_backend_is_terminated_leaves_nothing(shop: Shop, observer: AsyncEngine) -> None:
    async def call() -> None:
        async with shop.sessions.begin() as session:

            async def meanwhile() -> None:
                await terminate(session, observer)
                await session.execute(text("SELECT 1"))

            await shop.order(session, meanwhile=meanwhile)

    with pytest.raises(DBAPIError) as caught:
        await call()
    assert caught.value.connection_invalidated
    await assert_nothing_remains(shop, observer)


async def test_work_that_fails_on_a_dead_connection_fails_with_its_own_error(
    shop: Shop, observer: AsyncEngine
) -> None:
    async def call() -> None:
        async with shop.sessions() as session:
            await shop.order(
                session,
                meanwhile=lambda: terminate(session, observer),
                raising=ConnectionError("payment service is away"),
            )

    with pytest.raises(ConnectionError, match="payment service is away") as caught:
        await call()
    assert "oncely: key 'order-1' was not released by hand" in caught.value.__notes__[0]
    await assert_nothing_remains(shop, observer)


async def test_work_that_ends_well_on_a_dead_connection_is_an_error(
    shop: Shop, observer: AsyncEngine
) -> None:
    async def call() -> None:
        async with shop.sessions.begin() as session:
            await shop.order(session, meanwhile=lambda: terminate(session, observer))

    with pytest.raises(DBAPIError):
        await call()
    await assert_nothing_remains(shop, observer)


PROGRAM = """
import asyncio, sys
from sqlalchemy.ext.asyncio import create_async_engine
from tests.keys import Shop

async def main():
    shop = Shop(create_async_engine(sys.argv[1], connect_args={connect_args}))

    async def meanwhile():
        print("working", flush=True)
        await asyncio.sleep(60)

    await shop.request(meanwhile=meanwhile)

asyncio.run(main())
"""


async def test_a_process_that_is_killed_in_its_work_leaves_nothing(
    shop: Shop, observer: AsyncEngine, database: Database
) -> None:
    connect_args: dict[str, Any] = {"server_settings": {"search_path": database.schema}}
    if database.driver == "psycopg":
        connect_args = {"options": f"-csearch_path={database.schema}"}
    program = PROGRAM.replace("{connect_args}", repr(connect_args))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, database.url, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"working\n"
    waiter = asyncio.create_task(shop.request())
    await backend_waits(observer, "advisory")
    os.kill(process.pid, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL
    async with asyncio.timeout(5):
        assert await waiter == WORKED
    assert (await shop.stored(), await shop.items()) == (["order-1"], ["book"])
