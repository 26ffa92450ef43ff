"""What a relay costs while there is nothing to do, by the server's own count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy import MetaData, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import Outbox, RelayResult
from oncely.testing import RecordingPublisher
from tests.database import Database
from tests.relays import hasty
from tests.waiting import until

TRANSACTIONS = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s"
CONNECTIONS = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"


async def test_a_poll_is_one_transaction(
    driver: str, database: Database, engines: Callable[..., AsyncEngine], metadata: MetaData
) -> None:
    """One a second as delivered, and one every five seconds for the listener to see that it is heard."""
    if database.schema is not None:
        pytest.skip("a database of the user's may be in use by others")
    name = make_url(database.url).database
    outbox = Outbox(metadata)
    maker = engines()
    async with maker.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await maker.dispose()  # a server process that ends hands in its numbers

    async def cost(passes: int) -> int:
        with psycopg.connect(database.dsn(), dbname="postgres", autocommit=True) as observer:
            [(before,)] = observer.execute(TRANSACTIONS, [name]).fetchall()
            engine = engines()
            relay = hasty(
                outbox,
                async_sessionmaker(engine),
                RecordingPublisher(),
                poll_interval=timedelta(milliseconds=15),
            )
            stop, left, run_once = asyncio.Event(), passes, relay.run_once

            async def counted() -> RelayResult:
                nonlocal left
                left -= 1
                if not left:
                    stop.set()
                return await run_once()

            relay.run_once = counted  # type: ignore[method-assign]  # to stop after so many
            await relay.run(stop)
            await engine.dispose()

            await until(lambda: observer.execute(CONNECTIONS, [name]).fetchall() == [(0,)])
            [(after,)] = observer.execute(TRANSACTIONS, [name]).fetchall()
            return int(after - before)

    # Making the connections is in both. A vacuum may come by.
    assert 20 <= await cost(30) - await cost(10) <= 22
