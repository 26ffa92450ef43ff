"""A worker whose database or broker is away: before it starts, and when it is to stop."""

from __future__ import annotations

import asyncio
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine

from oncely import Outbox, Relay, Worker
from oncely.testing import EmbeddedPostgres, EmbeddedValkey, RecordingPublisher
from tests.acceptance.worker_process import GROUP, make_worker
from tests.acceptance.workers import Process, frozen, process
from tests.outboxes import emit, expire_claims, rows
from tests.waiting import until

only_on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@pytest.fixture
def stream() -> str:
    return f"stream {uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres() as server:
        yield server


@pytest.fixture(scope="module")
def own_valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


@pytest.fixture
async def own_engine(own_postgres: EmbeddedPostgres) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(own_postgres.url())
    yield engine
    await engine.dispose()


@pytest.fixture
async def outbox(own_engine: AsyncEngine, metadata: MetaData) -> Outbox:
    outbox = Outbox(metadata)
    async with own_engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)
        await connection.run_sync(metadata.create_all)
    return outbox


@asynccontextmanager
async def running(
    postgres: EmbeddedPostgres, valkey: EmbeddedValkey, stream: str, driver: str
) -> AsyncIterator[Process]:
    command = ("-m", "tests.acceptance.worker_process", postgres.url(driver), valkey.url, stream)
    async with process(*command) as started:
        await started.says("running Relay outbox")
        yield started


@only_on_linux
@pytest.mark.parametrize(
    ("driver", "topic", "payload"),
    [
        ("asyncpg", "handle", "nothing"),
        ("asyncpg", "handle", "wait"),
        ("asyncpg", "publish", "wait"),
        ("psycopg", "publish", "wait"),
    ],
)
async def test_a_worker_ends_within_its_grace_while_the_database_is_frozen(
    driver: str,
    topic: str,
    payload: str,
    own_postgres: EmbeddedPostgres,
    own_valkey: EmbeddedValkey,
    outbox: Outbox,
    own_engine: AsyncEngine,
    stream: str,
) -> None:
    sessions = async_sessionmaker(own_engine)
    await emit(outbox, sessions, payload, topic=topic)
    async with running(own_postgres, own_valkey, stream, driver) as worker:
        await worker.says(f"{'ended' if payload == 'nothing' else 'begun'} {topic}")
        with frozen(own_postgres):
            worker.send(signal.SIGTERM)
            await worker.says("stopping")
            worker.go()
            assert await worker.ends() == 0, worker.output
    assert f"ended {topic} {payload}" in worker.lines
    await expire_claims(own_engine)
    relay = Relay(outbox, sessions, RecordingPublisher(), listen=False)
    while (await relay.run_once()).claimed:
        pass
    assert await rows(own_engine, "SELECT count(published_at) FROM outbox") == [(1,)]
    async with Redis.from_url(own_valkey.url) as redis:
        assert await redis.xlen(stream) == 1
        # What the consumer read in that moment, it gave back without an attempt.
        found: Any = await redis.xpending_range(stream, GROUP, "-", "+", 10)
        assert {entry["times_delivered"] for entry in found} <= {0}


@only_on_linux
async def test_a_handler_whose_database_is_frozen_is_cancelled_within_the_grace(
    own_postgres: EmbeddedPostgres,
    own_valkey: EmbeddedValkey,
    outbox: Outbox,
    own_engine: AsyncEngine,
    stream: str,
) -> None:
    await emit(outbox, async_sessionmaker(own_engine), "a", topic="query")
    async with running(own_postgres, own_valkey, stream, "asyncpg") as worker:
        await worker.says("asked")
        with frozen(own_postgres):
            worker.go()
            assert await worker.stop() == 0, worker.output
    async with Redis.from_url(own_valkey.url) as redis:
        assert (await redis.xpending(stream, GROUP))["pending"] == 1


@only_on_linux
@pytest.mark.parametrize("payload", ["nothing", "wait"])  # waits for new entries, or handles one
async def test_a_worker_ends_within_its_grace_while_the_broker_is_frozen(
    payload: str,
    own_postgres: EmbeddedPostgres,
    own_valkey: EmbeddedValkey,
    outbox: Outbox,
    own_engine: AsyncEngine,
    stream: str,
) -> None:
    await emit(outbox, async_sessionmaker(own_engine), payload, topic="handle")
    async with running(own_postgres, own_valkey, stream, "asyncpg") as worker:
        await worker.says(f"{'ended' if payload == 'nothing' else 'begun'} handle")
        async with Redis.from_url(own_valkey.url) as redis:
            if payload == "nothing":
                await until(lambda: is_read_by_a_waiting_worker(redis, stream))
        with frozen(own_valkey):
            worker.send(signal.SIGTERM)
            await worker.says("stopping")
            worker.go()
            assert await worker.ends() == 0, worker.output
    assert f"ended handle {payload}" in worker.lines
    assert await rows(own_engine, "SELECT count(*) FROM outbox_claims") == [(0,)]


async def test_a_worker_that_is_started_before_its_database_and_its_broker_waits_and_says_so(
    own_postgres: EmbeddedPostgres,
    own_valkey: EmbeddedValkey,
    outbox: Outbox,
    own_engine: AsyncEngine,
    stream: str,
) -> None:
    await emit(outbox, async_sessionmaker(own_engine), "nothing", topic="handle")
    await own_engine.dispose()
    own_postgres.stop()
    own_valkey.stop()
    worker = make_worker(own_postgres.url(), own_valkey.url, stream, timedelta(seconds=10))
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(worker.run(stop))
        await until(lambda: waits(worker) == ["database", "broker", "database"])
        assert [each.alive for each in worker.health()] == [True] * 3
        assert [each.last_success for each in worker.health()] == [None] * 3
        own_valkey.start()
        await until(lambda: waits(worker) == ["database", None, "database"])
        own_postgres.start()
        await until(lambda: waits(worker) == [None, None, None])
        assert [each.healthy for each in worker.health()] == [True] * 3
        async with Redis.from_url(own_valkey.url) as redis:

            async def is_handled() -> bool:
                [found] = await redis.xinfo_groups(stream)
                return bool(found["last-delivered-id"] != b"0-0" and found["pending"] == 0)

            await until(is_handled)
        stop.set()


def waits(worker: Worker) -> list[str | None]:
    return [each.waits_for for each in worker.health()]


async def is_read_by_a_waiting_worker(redis: Redis, stream: str) -> bool:
    return bool((await redis.xpending(stream, GROUP))["pending"] == 0) and bool(
        (await redis.info("clients"))["blocked_clients"]
    )
