"""A commit wakes the relays, few commits carry the NOTIFY, and the listener survives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncEngine, async_scoped_session

import oncely.wakeup
from oncely import Outbox
from oncely.testing import RecordingPublisher
from tests.database import Database
from tests.outboxes import Sessions, emit, payloads, rows, sent_sql
from tests.relays import AT_ONCE, hasty, running
from tests.waiting import until
from tests.wire import Wire

pytestmark = pytest.mark.in_schema

NEVER = timedelta(hours=1)


@asynccontextmanager
async def listening(
    outbox: Outbox, sessions: Sessions, *, url: str | None = None, keepalive: timedelta = NEVER
) -> AsyncIterator[list[float]]:
    """A listener at work; the list grows by one with each wake-up. The first is for what was before it."""
    woken: list[float] = []

    def wake() -> None:
        woken.append(time.monotonic())

    listener = asyncio.create_task(
        outbox.wakeup.listen(sessions, wake, url=url, backoff=AT_ONCE, keepalive=keepalive)
    )
    try:
        await until(lambda: len(woken) == 1)
        yield woken
    finally:
        listener.cancel()
        await asyncio.wait({listener})


def notifies(sent: list[str]) -> int:
    return sum("pg_notify" in sql for sql in sent)


async def test_a_commit_wakes_those_who_listen(driver: str, outbox: Outbox, sessions: Sessions) -> None:
    async with listening(outbox, sessions) as one, listening(outbox, sessions) as another:
        await emit(outbox, sessions, "a")
        await until(lambda: (len(one), len(another)) == (2, 2))


async def test_it_is_decided_in_the_outermost_commit(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    seen = []
    with sent_sql(engine) as sent:
        async with sessions() as session:
            async with session.begin_nested():
                await outbox.emit(session, "t", 1)
            seen.append(notifies(sent))
            await outbox.emit(session, "t", 2)
            seen.append(notifies(sent))
            await session.commit()
            seen.append(notifies(sent))
    assert seen == [0, 0, 1]


@pytest.mark.parametrize("ending", ["rollback", "close"])
async def test_what_was_rolled_back_is_not_announced_by_a_later_commit(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, ending: str
) -> None:
    with sent_sql(engine) as sent:
        async with sessions() as session:
            await outbox.emit(session, "t", 1)
            await (session.rollback() if ending == "rollback" else session.close())
            await session.execute(text("SELECT 1"))
            await session.commit()
    assert notifies(sent) == 0


async def test_on_a_bare_connection_it_is_decided_at_once(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    async with listening(outbox, sessions) as woken:
        with sent_sql(engine) as sent:
            async with engine.begin() as connection:
                await outbox.emit(connection, "t", 1)
                assert notifies(sent) == 1
        await until(lambda: len(woken) == 2)


async def test_a_scoped_session_announces_too(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    scoped = async_scoped_session(sessions, scopefunc=asyncio.current_task)
    with sent_sql(engine) as sent:
        await outbox.emit(scoped, "t", 1)
        await scoped.commit()
    await scoped.remove()
    assert notifies(sent) == 1


async def test_a_process_sends_at_most_one_in_a_window(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    async def emit_some() -> None:
        for _ in range(20):
            async with sessions.begin() as session:
                await outbox.emit(session, "t", 1)

    with sent_sql(engine) as sent:
        begun = time.monotonic()
        await asyncio.gather(*(emit_some() for _ in range(10)))
        windows = (time.monotonic() - begun) / oncely.wakeup.WINDOW.total_seconds()
    assert 1 <= notifies(sent) <= windows + 1
    assert notifies(sent) < 200


async def test_those_that_did_not_notify_are_found_all_the_same(
    driver: str, outbox: Outbox, sessions: Sessions
) -> None:
    publish = RecordingPublisher()
    relay = hasty(outbox, sessions, publish, poll_interval=NEVER)
    async with running(relay):
        await until(lambda: relay.last_success is not None)
        for burst in range(1, 6):
            await asyncio.gather(*(emit(outbox, sessions, number) for number in range(10)))
            await until(lambda: len(publish.events) == burst * 10)  # noqa: B023  awaited at once


async def test_polling_is_enough(outbox: Outbox, sessions: Sessions) -> None:
    publish = RecordingPublisher()
    async with running(hasty(outbox, sessions, publish, listen=False)):
        for number in range(3):
            await emit(outbox, sessions, number)
            await until(lambda: len(publish.events) == number + 1)  # noqa: B023  awaited at once


async def test_one_outbox_does_not_wake_the_relays_of_another(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    other = Outbox(MetaData(), table_name="Other")
    async with engine.begin() as connection:
        await connection.run_sync(other.table.metadata.create_all)
    async with listening(outbox, sessions) as woken, listening(other, sessions) as others:
        await emit(other, sessions, "a")
        await until(lambda: len(others) == 2)
        await emit(outbox, sessions, "b")
        await until(lambda: len(woken) == 2)
        assert len(others) == 2


LISTENERS = "FROM pg_stat_activity WHERE query ~ '^LISTEN|^SELECT 1$' AND datname = current_database()"


async def test_a_listener_that_lost_its_connection_makes_a_new_one_and_wakes(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    async with listening(outbox, sessions) as woken:
        await rows(engine, f"SELECT pg_terminate_backend(pid) {LISTENERS}")
        await until(lambda: len(woken) == 2)  # for what was announced in between
        await emit(outbox, sessions, "a")
        await until(lambda: len(woken) == 3)


async def test_a_connection_whose_other_end_has_vanished_is_noticed(
    driver: str,
    outbox: Outbox,
    database: Database,
    engine: AsyncEngine,
    sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(oncely.wakeup, "_PATIENCE", timedelta(milliseconds=100))
    async with Wire.to_postgres(database.url) as wire:
        keepalive = timedelta(milliseconds=50)
        async with listening(outbox, sessions, url=wire.url, keepalive=keepalive) as woken:
            wire.silence()
            await emit(outbox, sessions, "unheard")
            wire.restore()
            await until(lambda: len(woken) == 2)
            await emit(outbox, sessions, "a")
            await until(lambda: len(woken) == 3)


async def test_a_listener_that_was_cancelled_leaves_no_connection(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    async with listening(outbox, sessions):
        assert await rows(engine, f"SELECT count(*) {LISTENERS}") == [(1,)]

    async def gone() -> bool:
        return await rows(engine, f"SELECT count(*) {LISTENERS}") == [(0,)]

    await until(gone)


async def test_a_relay_listens_past_the_pooler(
    driver: str, outbox: Outbox, database: Database, engines: Callable[..., AsyncEngine], sessions: Sessions
) -> None:
    publish = RecordingPublisher()
    async with Wire.to_postgres(database.url) as wire:
        relay = hasty(outbox, sessions, publish, poll_interval=NEVER, listen_url=wire.url)
        async with running(relay):
            await until(lambda: wire.connections == 1)
            await emit(outbox, sessions, "a")
            await until(lambda: len(publish.events) == 1)
    assert payloads(publish.events) == ["a"]
