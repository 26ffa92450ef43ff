"""Nothing of ours is state of a session: poolers may give each transaction another one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import timedelta

import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from oncely import Event, Inbox, KeyInFlight, NewEvent, Outbox, Retention
from oncely.event import uuid7
from oncely.testing import RecordingPublisher
from tests.database import Database
from tests.effects import Provider, make_effects
from tests.keys import REFUSAL, Shop
from tests.outboxes import emit
from tests.pooler import SETTINGS, left_behind
from tests.relays import Broker, hasty
from tests.webhooks import endpoint, enqueue, make_webhooks, worker

NO_WAIT = timedelta(0)


@pytest.fixture
async def session_engine(driver: str, database: Database) -> AsyncIterator[AsyncEngine]:
    """One connection, so one session; the driver's own prepared statements are off."""
    engine = database.engine(connect_args=SETTINGS[driver], pool_size=1, max_overflow=0)
    yield engine
    await engine.dispose()


@pytest.fixture
async def outbox(session_engine: AsyncEngine, metadata: MetaData) -> Outbox:
    outbox = Outbox(metadata)
    async with session_engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    return outbox


@pytest.mark.parametrize(
    ("kind", "statement"),
    [
        ("setting", "SET lock_timeout = '1s'"),
        ("advisory lock", "SELECT pg_advisory_lock(1)"),
        ("channel", "LISTEN anything"),
        ("prepared statement", "PREPARE anything AS SELECT 1"),
        ("temporary table", "CREATE TEMPORARY TABLE anything ()"),
        ("cursor", "DECLARE anything CURSOR WITH HOLD FOR SELECT 1"),
    ],
)
async def test_what_would_be_left_behind_is_seen(
    session_engine: AsyncEngine, kind: str, statement: str
) -> None:
    """Or nothing here would prove anything."""
    async with session_engine.begin() as connection:
        await connection.execute(text(statement))
    assert [left for left, _ in await left_behind(session_engine)] == [kind]


async def test_keys_leave_nothing_behind(
    session_engine: AsyncEngine, engines: Callable[..., AsyncEngine]
) -> None:
    shop = await Shop.open(session_engine)
    other = Shop(engines())

    async def retry() -> None:
        for wait in (NO_WAIT, timedelta(milliseconds=20)):
            with pytest.raises(KeyInFlight):
                await shop.request("held", wait=wait)

    await shop.request()
    await shop.request()
    await shop.request("refused", raising=REFUSAL)
    with pytest.raises(ZeroDivisionError):
        await shop.request("failing", raising=ZeroDivisionError())
    await shop.request("brief", ttl=timedelta(hours=1))
    await shop.expire("brief")
    await shop.request("brief", wait=timedelta(seconds=1))
    await other.request("held", meanwhile=retry)
    assert await left_behind(session_engine) == []
    assert shop.worked == 5


async def test_outbox_and_relay_leave_nothing_behind(session_engine: AsyncEngine, outbox: Outbox) -> None:
    sessions = async_sessionmaker(session_engine)
    broker = Broker(bad=ValueError("no"))
    relay = hasty(outbox, sessions, broker, max_attempts=1)
    async with sessions.begin() as session:
        await outbox.emit(session, "t", "good", key="a", dedup_key="1")
        await outbox.emit_many(
            session, [NewEvent("t", "bad", key="b"), NewEvent("t", "later", delay=NO_WAIT)]
        )
        cancelled = await outbox.emit(session, "t", "cancelled")
    async with sessions.begin() as session:
        assert await outbox.cancel(session, cancelled)
    assert (await relay.run_once()).dead == 1
    async with sessions.begin() as session:
        assert await outbox.replay(session) == 1
        assert (await outbox.stats(session)).dead == 0
    broker.faults.clear()
    await relay.run_once()
    await emit(outbox, sessions, "last")
    assert len(await outbox.relay_once(sessions, RecordingPublisher())) == 1
    assert await Retention(sessions, {outbox: NO_WAIT}).run_once() == {"outbox": 4}
    assert await left_behind(session_engine) == []


async def test_the_inbox_leaves_nothing_behind(session_engine: AsyncEngine, metadata: MetaData) -> None:
    inbox, sessions = Inbox(metadata), async_sessionmaker(session_engine)
    async with session_engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    handled: list[Event] = []

    async def handle(session: AsyncSession, event: Event) -> None:
        handled.append(event)

    deliver = inbox.handler(sessions, handle, consumer="billing")
    event = Event(uuid7(), "t", 1)
    await deliver(event)
    await deliver(event)
    assert handled == [event]
    assert await left_behind(session_engine) == []


async def test_effects_leave_nothing_behind(session_engine: AsyncEngine) -> None:
    effects, provider = await make_effects(session_engine, stale_after=timedelta(seconds=1)), Provider()
    for _ in range(2):
        assert await effects.run("charge", provider.charge) == {"charge": 1}
    await effects.purge(NO_WAIT)
    assert await left_behind(session_engine) == []


async def test_webhooks_leave_nothing_behind(session_engine: AsyncEngine) -> None:
    webhooks, sessions = await make_webhooks(session_engine), async_sessionmaker(session_engine)
    async with endpoint() as server:
        await enqueue(webhooks, sessions, server.url("/hook"))
        await worker(webhooks, sessions, server).run_once()
        assert len(server.requests) == 1
    async with sessions.begin() as session:
        await webhooks.purge(session)
    assert await left_behind(session_engine) == []
