"""The database and the broker are stopped, killed and started under a running relay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta

import pytest
from redis.asyncio import Redis
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine

from oncely import Event, Outbox, Relay
from oncely.backoff import Backoff
from oncely.streams import stream_publisher
from oncely.testing import EmbeddedPostgres, EmbeddedValkey
from tests.outboxes import emit, rows
from tests.relays import running
from tests.streams import entries
from tests.waiting import until

OUTAGE = Backoff(first=timedelta(milliseconds=20), maximum=timedelta(milliseconds=100))


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[EmbeddedPostgres]:
    """One that keeps what it has confirmed, also when it is killed; that moment's claim is lost with it."""
    durable = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}
    with EmbeddedPostgres(durable | {"wal_writer_delay": "10s"}) as server:
        yield server


@pytest.fixture
async def own_engine(own_postgres: EmbeddedPostgres, driver: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(own_postgres.url(driver))
    yield engine
    await engine.dispose()


@pytest.fixture
async def outbox(own_engine: AsyncEngine, metadata: MetaData) -> Outbox:
    outbox = Outbox(metadata)
    async with own_engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)
        await connection.run_sync(metadata.create_all)
    return outbox


async def test_a_database_that_is_stopped_or_killed_loses_nothing_and_the_relay_goes_on(
    driver: str, outbox: Outbox, own_engine: AsyncEngine, own_postgres: EmbeddedPostgres
) -> None:
    sessions = async_sessionmaker(own_engine)
    received: list[object] = []

    async def publish(events: Sequence[Event]) -> None:
        for event in events:
            await asyncio.sleep(0.001)
            received.append(event.payload)

    relay = Relay(
        outbox,
        sessions,
        publish,
        batch=10,
        lease=timedelta(seconds=5),
        poll_interval=timedelta(milliseconds=50),
        outage=OUTAGE,
    )
    for key in ("a", "b", "c"):
        await emit(outbox, sessions, *(f"{key}{number}" for number in range(100)), key=key)
    async with running(relay):
        for share, end in ((50, own_postgres.stop), (150, own_postgres.kill)):
            await until(lambda: len(received) >= share)  # noqa: B023  awaited at once
            end()
            await until(lambda: relay.waits_for == "database")
            own_postgres.start()
        await until(lambda: len(set(received)) == 300)
        await emit(outbox, sessions, "last")
        await until(lambda: "last" in received)
    assert relay.waits_for is None
    first = list(dict.fromkeys(received))
    for key in ("a", "b", "c"):
        assert [each for each in first if str(each).startswith(key)] == [f"{key}{n}" for n in range(100)]
    # A relay that lives knows what it has sent, and marks it when the database is back, claim or no claim.
    assert len(received) == 301


async def test_a_broker_that_is_stopped_and_started_burns_no_attempt(
    outbox: Outbox, driver: str, own_engine: AsyncEngine, own_valkey: EmbeddedValkey
) -> None:
    sessions = async_sessionmaker(own_engine)
    async with Redis.from_url(own_valkey.url) as redis:
        publish = stream_publisher(redis, "events")
        relay = Relay(outbox, sessions, publish, max_attempts=1, outage=OUTAGE)
        async with running(relay):
            await emit(outbox, sessions, "before")
            await until(lambda: relay.last_success is not None)

            async def arrived() -> bool:
                return len(await entries(redis, "events")) == 1

            await until(arrived)
            own_valkey.stop()
            await emit(outbox, sessions, *range(100))
            await until(lambda: relay.waits_for == "broker")
            seen = "SELECT count(*), max(attempts) FROM outbox WHERE published_at IS NULL"
            assert await rows(own_engine, seen) == [(100, 0)]
            own_valkey.start()

            async def all_arrived() -> bool:
                return len(await entries(redis, "events")) == 100  # it kept nothing over its stop

            await until(all_arrived)
        assert relay.waits_for is None
    payloads = "SELECT count(*), max(attempts) FROM outbox WHERE published_at IS NOT NULL"
    assert await rows(own_engine, payloads) == [(101, 0)]
