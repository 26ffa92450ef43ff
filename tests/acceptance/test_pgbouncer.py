"""Behind PgBouncer in transaction mode: each transaction may be on another of the server's connections."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from oncely import Event, Inbox, KeyInFlight, NewEvent, Outbox, Retention
from oncely.check import check_schema, check_upkeep
from oncely.testing import EmbeddedPostgres, RecordingPublisher
from tests.effects import Provider, make_effects
from tests.keys import Shop
from tests.outboxes import Sessions, emit, payloads, rows
from tests.pooler import SETTINGS, EmbeddedPgBouncer, left_behind
from tests.relays import Broker, hasty, running
from tests.waiting import until
from tests.webhooks import endpoint, enqueue, make_webhooks, worker
from tests.webhooks import rows as webhook_rows

pytestmark = pytest.mark.pgbouncer

BACKENDS = 5
NEVER = timedelta(hours=1)


@pytest.fixture(scope="module")
def pooler(postgres: EmbeddedPostgres) -> Iterator[EmbeddedPgBouncer]:
    with EmbeddedPgBouncer(postgres, backends=BACKENDS) as server:
        yield server


@pytest.fixture
def database_name(postgres: EmbeddedPostgres) -> Iterator[str]:
    name = f"test_{uuid4().hex}"
    with psycopg.connect(postgres.dsn(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE template0".encode())
        yield name
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture
async def engine(pooler: EmbeddedPgBouncer, driver: str, database_name: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(
        pooler.url(driver, database_name), connect_args=dict(SETTINGS[driver]), pool_size=20
    )
    yield engine
    await engine.dispose()


async def test_transactions_of_one_connection_run_in_several_sessions(engine: AsyncEngine) -> None:
    """Or nothing here would prove anything."""
    async with engine.connect() as connection:
        sessions = set()
        for _ in range(200):
            sessions.add(await connection.scalar(text("SELECT pg_backend_pid()")))
            await connection.rollback()
            if len(sessions) == BACKENDS:
                break
            await asyncio.sleep(0.01)
    assert len(sessions) == BACKENDS


async def test_retries_of_keys_at_once_work_once_and_get_their_answers(engine: AsyncEngine) -> None:
    shop = await Shop.open(engine)

    async def moment() -> None:
        await asyncio.sleep(0.02)

    names = [f"order-{number}" for number in range(4)]
    outcomes = await asyncio.gather(
        *(shop.request(name, (201, f"made {name}"), meanwhile=moment) for name in names * 5)
    )
    assert shop.worked == 4
    assert Counter((each.body, each.replayed) for each in outcomes) == {
        (f"made {name}", replayed): count for name in names for replayed, count in ((False, 1), (True, 4))
    }


async def test_a_key_in_flight_is_told_and_the_transaction_stays_usable(engine: AsyncEngine) -> None:
    shop = await Shop.open(engine)

    async def retry() -> None:
        for wait in (timedelta(0), timedelta(milliseconds=30)):
            async with shop.sessions.begin() as session:
                with pytest.raises(KeyInFlight):
                    await shop.order(session, wait=wait)
                await shop.order(session, "another", item="pen")

    assert (await shop.request(meanwhile=retry)).replayed is False
    assert sorted(await shop.items()) == ["book", "pen"]


async def test_writers_relays_and_the_inbox_lose_nothing_and_keep_each_key_in_order(
    engine: AsyncEngine, outbox: Outbox
) -> None:
    sessions = async_sessionmaker(engine)
    inbox = Inbox(MetaData())
    async with engine.begin() as connection:
        await connection.run_sync(inbox.table.metadata.create_all)
    handled: list[tuple[str, int]] = []
    once_more = {("1", 7), ("3", 0)}

    async def handle(session: AsyncSession, event: Event) -> None:
        await session.execute(text("SELECT 1"))
        handled.append((str(event.key), event.payload))

    deliver = inbox.handler(sessions, handle, consumer="billing")

    async def publish(events: Sequence[Event]) -> None:
        for event in events:
            if (str(event.key), event.payload) in once_more:
                once_more.remove((str(event.key), event.payload))
                raise ValueError("not this time")
            await deliver(event)
            await deliver(event)

    async def write(key: str) -> None:
        for number in range(0, 20, 2):
            async with sessions.begin() as session:
                await outbox.emit(session, "t", number, key=key)
                await outbox.emit_many(session, [NewEvent("t", number + 1, key=key)])

    relays = [hasty(outbox, sessions, publish, batch=7, listen=False) for _ in range(2)]
    async with running(*relays):
        await asyncio.gather(*(write(str(key)) for key in range(6)))
        await until(lambda: len(handled) == 120)
    for key in range(6):
        assert [number for its, number in handled if its == str(key)] == list(range(20))
    assert await rows(engine, "SELECT count(*), count(published_at) FROM outbox") == [(120, 120)]
    assert await rows(engine, "SELECT count(*) FROM outbox_claims") == [(0,)]


async def test_a_failing_event_dies_and_is_replayed(engine: AsyncEngine, outbox: Outbox) -> None:
    sessions = async_sessionmaker(engine)
    broker = Broker(bad=ValueError("no"))
    relay = hasty(outbox, sessions, broker, max_attempts=2, listen=False)
    await emit(outbox, sessions, "good", "bad")
    async with running(relay):
        await until(lambda: _dead(outbox, sessions, 1))
        broker.faults.clear()
        async with sessions.begin() as session:
            assert await outbox.replay(session) == 1
        await until(lambda: broker.received == ["good", "bad"])


async def test_a_relay_that_listens_past_the_pooler_is_woken_by_commits_through_it(
    engine: AsyncEngine, outbox: Outbox, postgres: EmbeddedPostgres, driver: str, database_name: str
) -> None:
    sessions, publish = async_sessionmaker(engine), RecordingPublisher()
    past = postgres.url(driver, database_name)
    relay = hasty(outbox, sessions, publish, poll_interval=NEVER, listen_url=past)
    async with running(relay):
        await until(lambda: _listens(postgres, database_name))
        for number in range(3):
            await emit(outbox, sessions, number)
            await until(lambda: len(publish.events) == number + 1)  # noqa: B023  awaited at once
    assert payloads(publish.events) == [0, 1, 2]


async def test_effects_are_run_once(engine: AsyncEngine) -> None:
    effects, provider = await make_effects(engine), Provider()
    results = await asyncio.gather(
        *(effects.run("charge", provider.charge, wait=timedelta(seconds=10)) for _ in range(8))
    )
    assert (results, len(provider.tokens)) == ([{"charge": 1}] * 8, 1)


async def test_webhooks_are_delivered(engine: AsyncEngine) -> None:
    sessions, webhooks = async_sessionmaker(engine), await make_webhooks(engine)
    async with endpoint() as server:
        await enqueue(webhooks, sessions, server.url("/hook"))
        await worker(webhooks, sessions, server).run_once()
        assert len(server.requests) == 1
    assert await webhook_rows(engine, "state") == [("delivered",)]


async def test_retention_deletes_what_is_finished(engine: AsyncEngine, outbox: Outbox) -> None:
    sessions = async_sessionmaker(engine)
    await emit(outbox, sessions, *range(10))
    await outbox.relay_once(sessions, RecordingPublisher())
    await emit(outbox, sessions, "not yet published")
    assert await Retention(sessions, {outbox: timedelta(0)}).run_once() == {"outbox": 10}
    assert await rows(engine, "SELECT count(*) FROM outbox") == [(1,)]


async def test_a_relay_that_listens_through_the_pooler_works_by_polling_and_leaves_a_listener_behind(
    engine: AsyncEngine, outbox: Outbox, postgres: EmbeddedPostgres, database_name: str
) -> None:
    """So it is told not to: listen=False, or a listen_url."""
    sessions, publish = async_sessionmaker(engine), RecordingPublisher()
    async with running(hasty(outbox, sessions, publish)):
        await until(lambda: _listens(postgres, database_name))
        await emit(outbox, sessions, "polled for")
        await until(lambda: len(publish.events) == 1)

    async def found_behind() -> bool:
        return "channel" in {kind for kind, _ in await left_behind(engine)}

    await until(found_behind)


async def _dead(outbox: Outbox, sessions: Sessions, count: int) -> bool:
    async with sessions() as session:
        return len(await outbox.dead(session)) == count


def _listens(postgres: EmbeddedPostgres, database: str) -> bool:
    """Whether a session of this database has said LISTEN last, or is being asked whether it still hears."""
    listening = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND query ~ '^LISTEN'"
    with psycopg.connect(postgres.dsn()) as connection:
        [(count,)] = connection.execute(listening, [database]).fetchall()
    return bool(count)


async def test_a_check_of_the_tables_finds_them_well_and_leaves_nothing_behind(
    engine: AsyncEngine, outbox: Outbox
) -> None:
    tables = [outbox.table, outbox.claims]
    for _ in range(2 * BACKENDS):
        async with engine.connect() as connection:
            assert await check_schema(connection, tables) == []
        async with engine.connect() as connection:
            assert [each.severity for each in await check_upkeep(connection, tables)] == ["advice", "advice"]
    for _ in range(2 * BACKENDS):
        assert await left_behind(engine) == []
