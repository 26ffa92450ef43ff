"""relay_once cut off at each of its stages: nothing is lost, and nothing is held after."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import anyio
import asyncpg
import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import Event, Outbox
from oncely.testing import RecordingPublisher
from tests.database import Database, both_drivers
from tests.outboxes import (
    Gate,
    Sessions,
    claiming_is_held_up,
    emit,
    execute,
    expire_claims,
    payloads,
    rows,
    states,
)
from tests.waiting import backend_waits, until

pytestmark = [pytest.mark.in_schema, both_drivers]

STAGES = ("claiming", "publishing", "settling")


@pytest.fixture
def relay_engine(engines: Callable[..., AsyncEngine], driver: str) -> AsyncEngine:
    """The relay's own engine, with a single connection that the server knows by name."""
    name = {"application_name": "relay"}
    settings: dict[str, Any] = {"server_settings": name} if driver == "asyncpg" else name
    return engines(pool_size=1, max_overflow=0, pool_timeout=2, connect_args=settings)


@dataclass
class HeldUp:
    """What holds a relay up: give it `publish`, wait until it has `arrived`, and `let_go` in the end."""

    publish: Callable[[Sequence[Event]], Awaitable[None]]
    arrived: Callable[[], Awaitable[object]]
    let_go: Callable[[], Awaitable[None]]


@asynccontextmanager
async def held_up(stage: str, engine: AsyncEngine) -> AsyncIterator[HeldUp]:
    gate = Gate()
    async with claiming_is_held_up(engine) if stage == "claiming" else engine.connect() as other:

        async def publish(events: Sequence[Event]) -> None:
            if stage == "settling":
                await other.execute(
                    text("SELECT FROM outbox WHERE id = :id FOR UPDATE"), {"id": events[1].id}
                )
            await gate(events)

        async def arrived() -> None:
            if stage == "publishing":
                await gate.entered.wait()
            else:
                await backend_waits(engine, "advisory" if stage == "claiming" else "transactionid")

        async def let_go() -> None:
            gate.opened.set()
            await other.rollback()

        if stage != "publishing":
            gate.opened.set()
        yield HeldUp(publish, arrived, let_go)


async def nothing_is_held(engine: AsyncEngine, relay_engine: AsyncEngine) -> None:
    assert relay_engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
    busy = "SELECT state, query FROM pg_stat_activity WHERE application_name = 'relay' AND state <> 'idle'"
    assert await rows(engine, busy) == []
    assert await rows(engine, "SELECT count(*) FROM outbox_claims") == [(0,)]


# --- cancelled

Cut = tuple["asyncio.Task[Any]", Callable[[], object]]


def by_cancel(work: Coroutine[Any, Any, Any]) -> Cut:
    task = asyncio.create_task(work)
    return task, task.cancel


def by_timeout(work: Coroutine[Any, Any, Any]) -> Cut:
    limit = asyncio.timeout(None)

    async def run() -> None:
        async with limit:
            await work

    return asyncio.create_task(run()), lambda: limit.reschedule(0)


def by_cancel_scope(work: Coroutine[Any, Any, Any]) -> Cut:
    scope = anyio.CancelScope()

    async def run() -> bool:
        with scope:
            await work
        return scope.cancelled_caught

    return asyncio.create_task(run()), scope.cancel


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", [by_cancel, by_timeout, by_cancel_scope])
async def test_a_relay_that_is_cancelled_leaves_nothing_behind(
    outbox: Outbox,
    engine: AsyncEngine,
    relay_engine: AsyncEngine,
    sessions: Sessions,
    publish: RecordingPublisher,
    stage: str,
    way: Callable[[Coroutine[Any, Any, Any]], Cut],
) -> None:
    await emit(outbox, sessions, 1, 2, key="k")
    async with held_up(stage, engine) as relay:
        task, cut = way(outbox.relay_once(async_sessionmaker(relay_engine), relay.publish))
        await relay.arrived()
        cut()
        await relay.let_go()
        [ended] = await asyncio.gather(task, return_exceptions=True)
    if way is by_cancel_scope:
        assert ended is True
    else:
        assert type(ended) is (asyncio.CancelledError if way is by_cancel else TimeoutError)
    await nothing_is_held(engine, relay_engine)
    # What was sent is marked; what was not is offered again as it was.
    end = "published" if stage == "settling" else "open"
    assert await states(engine) == {"1": end, "2": end}
    left = await Outbox(MetaData()).relay_once(sessions, publish)
    assert payloads(left) == ([] if stage == "settling" else [1, 2])


async def test_a_relay_that_is_cancelled_over_and_over_never_loses_count(
    outbox: Outbox, engine: AsyncEngine, relay_engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, *range(40))
    relay_sessions = async_sessionmaker(relay_engine)
    left: list[Event] = []

    async def publish(events: Sequence[Event]) -> None:
        await asyncio.sleep(0.001)
        left.extend(events)

    for turn in range(60):
        task = asyncio.create_task(outbox.relay_once(relay_sessions, publish, batch=2))
        await asyncio.wait({task}, timeout=turn % 20 / 1_000)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await nothing_is_held(engine, relay_engine)
    while await outbox.relay_once(relay_sessions, publish, batch=2):
        pass
    assert sorted(set(payloads(left))) == list(range(40))
    assert set((await states(engine)).values()) == {"published"}


# --- its connection is ended by the server


async def end_the_connection(engine: AsyncEngine) -> None:
    alive = "FROM pg_stat_activity WHERE application_name = 'relay'"

    async def gone() -> bool:
        return await rows(engine, f"SELECT count(*) {alive}") == [(0,)]

    await execute(engine, f"SELECT pg_terminate_backend(pid) {alive}")
    await until(gone)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_relay_whose_connection_is_ended_loses_nothing(
    outbox: Outbox,
    engine: AsyncEngine,
    relay_engine: AsyncEngine,
    sessions: Sessions,
    publish: RecordingPublisher,
    stage: str,
) -> None:
    await emit(outbox, sessions, 1, 2, key="k")
    relay_sessions = async_sessionmaker(relay_engine)
    async with held_up(stage, engine) as relay:
        task = asyncio.create_task(outbox.relay_once(relay_sessions, relay.publish))
        await relay.arrived()
        await end_the_connection(engine)
        await relay.let_go()
        with pytest.raises(DBAPIError) as raised:
            await task
    assert raised.value.connection_invalidated
    if stage == "claiming":
        assert await states(engine) == {"1": "open", "2": "open"}
        assert payloads(await outbox.relay_once(relay_sessions, publish)) == [1, 2]
        return
    # It was sent and could not be marked. Nobody knows that, so it is sent again when the lease ends.
    assert await states(engine) == {"1": "open, claimed", "2": "open, claimed"}
    assert await outbox.relay_once(relay_sessions, publish) == []
    await expire_claims(engine)
    assert payloads(await outbox.relay_once(relay_sessions, publish)) == [1]
    assert payloads(await outbox.relay_once(relay_sessions, publish)) == [2]
    await nothing_is_held(engine, relay_engine)


async def test_a_batch_that_cannot_be_given_back_is_noted_on_the_publishers_error(
    outbox: Outbox, engine: AsyncEngine, relay_engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1)

    async def publish(events: Sequence[Event]) -> None:
        await end_the_connection(engine)
        raise ValueError("the publisher's own")

    with pytest.raises(ValueError, match="the publisher's own") as raised:
        await outbox.relay_once(async_sessionmaker(relay_engine), publish)
    [note] = raised.value.__notes__
    assert note.startswith("the batch could not be given back and waits for its lease to end: ")
    assert await states(engine) == {"1": "open, claimed"}


@pytest.mark.parametrize("who", ["a claimer", "a cancel", "who marks after a crash"])
async def test_who_stalls_with_the_claimers_lock_is_ended_by_the_server(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher, who: str
) -> None:
    """The statement brings the limit along; here it is made short, or the test would take 5 s."""
    await emit(outbox, sessions, 1)
    claimer = outbox.ledger._claimer
    async with engine.connect() as stalled:
        if who == "a claimer":
            await stalled.run_sync(claimer.become)
        elif who == "a cancel":
            await stalled.execute(claimer._wait, {"patience": timedelta(seconds=5)})
        else:
            await stalled.run_sync(claimer.keep_out)
        limit = "SHOW idle_in_transaction_session_timeout"
        assert await stalled.scalar(text(limit)) == "5s"
        await stalled.execute(text("SET LOCAL idle_in_transaction_session_timeout = 50"))
        assert payloads(await outbox.relay_once(sessions, publish)) == [1]
        with pytest.raises(DBAPIError):
            await stalled.execute(text("SELECT 1"))


STALLS = ("amid a statement", "amid an answer")


@asynccontextmanager
async def stalled_claimer(
    database: Database, engine: AsyncEngine, outbox: Outbox, where: str
) -> AsyncIterator[None]:
    """A claimer whose process stands still where the server does not take it to be idle."""
    claimer = await asyncpg.connect(database.dsn())
    await claimer.execute("BEGIN")
    await claimer.fetch(str(outbox.ledger._claimer._become.compile(engine.sync_engine)))
    # Prepared and not executed: the server waits for what it shall do with it.
    statement = await claimer.prepare("SELECT repeat('x', 10000000)")
    asking = None
    if where == "amid an answer":
        claimer._transport.pause_reading()
        asking = asyncio.create_task(statement.fetch())
        await until(lambda: waits_for_its_client(engine))
    yield
    claimer.terminate()
    if asking is not None:
        await asyncio.wait({asking})
        assert asking.exception() is not None


async def waits_for_its_client(engine: AsyncEngine) -> bool:
    query = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'ClientWrite')"
    async with engine.connect() as connection:
        return bool(await connection.scalar(text(query)))


@pytest.mark.parametrize("where", STALLS)
async def test_a_claimer_that_stalls_amid_a_statement_or_an_answer_is_ended_by_the_next_relay(
    outbox: Outbox,
    database: Database,
    engine: AsyncEngine,
    sessions: Sessions,
    publish: RecordingPublisher,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    await emit(outbox, sessions, 1)
    monkeypatch.setattr("oncely.claimer._PATIENCE", timedelta(0))
    async with asyncio.timeout(10), stalled_claimer(database, engine, outbox, where):
        assert payloads(await outbox.relay_once(sessions, publish)) == [1]


async def test_a_relay_that_has_waited_in_vain_looks_for_a_stalled_claimer(
    outbox: Outbox,
    database: Database,
    engine: AsyncEngine,
    sessions: Sessions,
    publish: RecordingPublisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await outbox.relay_once(sessions, publish) == []
    await emit(outbox, sessions, 1)
    monkeypatch.setattr("oncely.claimer._PATIENCE", timedelta(hours=1))
    async with asyncio.timeout(30), stalled_claimer(database, engine, outbox, "amid a statement"):
        for _ in range(2):  # the claimer has not stood still for long enough
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await outbox.ledger.claim(sessions, limit=1, lease=timedelta(seconds=30))
        monkeypatch.setattr("oncely.claimer._PATIENCE", timedelta(0))
        assert payloads(await outbox.relay_once(sessions, publish)) == [1]


async def test_a_claimer_that_works_is_left_alone(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncely.claimer._PATIENCE", timedelta(0))
    async with engine.connect() as other, engine.connect() as claimer:
        await other.execute(text("SELECT pg_advisory_xact_lock(7)"))
        await claimer.run_sync(outbox.ledger._claimer.become)
        works = asyncio.ensure_future(claimer.execute(text("SELECT pg_advisory_xact_lock(7)")))
        await backend_waits(engine, "advisory")
        async with engine.connect() as relay:
            await relay.run_sync(outbox.ledger._claimer.end_stalled)
        await other.rollback()
        await works
