"""cancel: True means that no relay sends it from then on, and False that nothing was changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from random import Random
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from sqlalchemy import MetaData, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import CancelUnsafe, Event, NoTransaction, Outbox, Relay
from oncely.testing import RecordingPublisher
from tests.database import Database
from tests.outboxes import (
    Sessions,
    being_claimed,
    claim,
    emit,
    expire_claims,
    fail,
    payloads,
    sent_sql,
    states,
)
from tests.waiting import backend_waits

pytestmark = pytest.mark.in_schema

HOUR = timedelta(hours=1)


async def cancel(outbox: Outbox, sessions: Sessions, event_id: UUID) -> bool:
    async with sessions.begin() as session:
        return await outbox.cancel(session, event_id)


@pytest.mark.parametrize("delay", [None, HOUR])
async def test_an_event_that_waits_is_cancelled(
    outbox: Outbox,
    engine: AsyncEngine,
    sessions: Sessions,
    publish: RecordingPublisher,
    delay: timedelta | None,
    driver: str,
) -> None:
    [event_id] = await emit(outbox, sessions, 1, delay=delay)
    assert await cancel(outbox, sessions, event_id) is True
    assert await states(engine) == {}
    assert await outbox.relay_once(sessions, publish) == []


async def test_a_cancel_that_is_rolled_back_has_not_happened(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher
) -> None:
    [event_id] = await emit(outbox, sessions, 1)
    async with sessions() as session:
        assert await outbox.cancel(session, event_id) is True
        await session.rollback()
    assert payloads(await outbox.relay_once(sessions, publish)) == [1]


async def test_it_cancels_what_the_same_transaction_emitted(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    async with sessions.begin() as session:
        event_id = await outbox.emit(session, "t", 1)
        assert await outbox.cancel(session, event_id) is True
        assert await outbox.cancel(session, event_id) is False
    assert await states(engine) == {}


async def test_it_works_on_a_connection_and_in_a_savepoint(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    one, two = await emit(outbox, sessions, 1, 2)
    async with engine.begin() as connection:
        assert await outbox.cancel(connection, one) is True
    async with sessions.begin() as session, session.begin_nested() as savepoint:
        assert await outbox.cancel(session, two) is True
        await savepoint.rollback()
    assert await states(engine) == {"2": "open"}


async def test_what_does_not_wait_any_more_is_not_cancelled(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    ids = [uuid4()]
    ids += await emit(outbox, sessions, "sent")
    await outbox.relay_once(sessions, publish)
    ids += await emit(outbox, sessions, "failed")
    await fail(outbox, sessions, "failed", delay=HOUR)
    ids += await emit(outbox, sessions, "dead")
    await fail(outbox, sessions, "dead", delay=None)
    ids += await emit(outbox, sessions, "its relay died")
    await claim(outbox, sessions)
    await expire_claims(engine)
    ids += await emit(outbox, sessions, "in flight")
    while await outbox.ledger.claim(sessions, limit=1, lease=HOUR):
        pass
    before = await states(engine)
    assert before == {
        "sent": "published",
        "failed": "waiting, tried 1",
        "dead": "dead, tried 1",
        "its relay died": "open, tried 1, claimed",
        "in flight": "open, claimed",
    }
    for event_id in ids:
        assert await cancel(outbox, sessions, event_id) is False
    assert await states(engine) == before


async def test_an_event_that_another_transaction_has_is_not_waited_for(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    [event_id] = await emit(outbox, sessions, 1)
    async with asyncio.timeout(10), sessions() as first:
        assert await outbox.cancel(first, event_id) is True
        assert await cancel(outbox, sessions, event_id) is False
        await first.commit()
    assert await states(engine) == {}


async def test_an_event_that_was_given_back_can_be_cancelled(outbox: Outbox, sessions: Sessions) -> None:
    [event_id] = await emit(outbox, sessions, 1)
    made = await claim(outbox, sessions)
    assert await cancel(outbox, sessions, event_id) is False
    await outbox.ledger.release(sessions, made)
    assert await cancel(outbox, sessions, event_id) is True


async def test_a_cancel_that_loses_the_race_keeps_no_lock_and_the_transaction_goes_on(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, database: Database, driver: str
) -> None:
    """A relay claims the event after the first look and before the lock, which must then be let go."""
    [event_id] = await emit(outbox, sessions, 1)

    def claim_it(*arguments: Any) -> None:
        if arguments[2].split() == str(outbox._cancellation._lock.compile(engine.sync_engine)).split():
            with psycopg.connect(database.dsn(), autocommit=True) as relay:
                relay.execute(
                    "INSERT INTO outbox_claims (token, claimed_by, expires_at, event_ids, keys)"
                    " VALUES (gen_random_uuid(), 'x:1', now() + interval '1 hour', ARRAY[%s], '{}')",
                    [event_id],
                )

    async with sessions() as session:
        await outbox.emit(session, "t", "before")
        event.listen(engine.sync_engine, "before_cursor_execute", claim_it)
        assert await outbox.cancel(session, event_id) is False
        event.remove(engine.sync_engine, "before_cursor_execute", claim_it)
        async with engine.connect() as other:
            await other.execute(text("SELECT FROM outbox WHERE id = :id FOR UPDATE NOWAIT"), {"id": event_id})
        await outbox.emit(session, "t", "after")
        await session.commit()
    assert await states(engine) == {"1": "open, claimed", "before": "open", "after": "open"}


async def test_in_a_race_with_relays_it_never_lies(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher, driver: str
) -> None:
    emitted: list[UUID] = []
    open_: list[UUID] = []
    cancelled: set[UUID] = set()
    all_emitted = False

    async def emit_all() -> None:
        nonlocal all_emitted
        for number in range(100):
            made = await emit(outbox, sessions, number, number, key=f"k{number % 3}")
            emitted.extend(made)
            open_.extend(made)
        all_emitted = True

    async def cancel_some(seed: int) -> None:
        choice = Random(seed)
        while open_ or not all_emitted:
            if not open_:
                await asyncio.sleep(0)
                continue
            event_id = open_.pop(choice.randrange(len(open_)))
            async with sessions() as session:
                answer = await outbox.cancel(session, event_id)
                if choice.random() < 0.3:
                    await session.rollback()
                    continue
                await session.commit()
                if answer:
                    cancelled.add(event_id)

    async def relay() -> None:
        own = Outbox(MetaData())
        while open_ or not all_emitted:
            await own.relay_once(sessions, publish, batch=2)

    await asyncio.gather(emit_all(), *map(cancel_some, range(3)), relay(), relay())
    while await outbox.relay_once(sessions, publish):
        pass
    sent = [event.id for event in publish.events]
    assert sorted(sent) == sorted(set(emitted) - cancelled)
    assert cancelled
    assert sent  # it was a race


@pytest.mark.parametrize("made", [True, False])
async def test_a_claim_that_is_being_made_is_waited_for(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, made: bool, driver: str
) -> None:
    """It was chosen before the cancel had the event, and locks nothing that the cancel would meet."""
    [event_id] = await emit(outbox, sessions, 1)
    async with sessions() as claimer:
        assert payloads(await being_claimed(outbox, claimer)) == [1]
        cancelling = asyncio.create_task(cancel(outbox, sessions, event_id))
        await backend_waits(engine, "advisory")
        await (claimer.commit() if made else claimer.rollback())
    assert await cancelling is not made
    assert await states(engine) == ({"1": "open, claimed"} if made else {})


@pytest.mark.parametrize("patience", ["its own", "the caller's"])
async def test_a_claim_that_goes_on_and_on_is_a_no_that_leaves_nothing_behind(
    outbox: Outbox,
    engine: AsyncEngine,
    sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    patience: str,
    driver: str,
) -> None:
    [event_id] = await emit(outbox, sessions, 1)
    limit = "77s"
    if patience == "its own":
        monkeypatch.setattr("oncely.claimer._PATIENCE", timedelta(milliseconds=20))
    else:
        limit = "20ms"
    async with asyncio.timeout(10), sessions() as claimer, sessions() as session:
        await being_claimed(outbox, claimer)
        await session.execute(text(f"SET LOCAL lock_timeout = '{limit}'"))
        assert await outbox.cancel(session, event_id) is False
        assert await session.scalar(text("SHOW lock_timeout")) == limit
        assert await session.scalar(text("SHOW idle_in_transaction_session_timeout")) == "0"
        locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        assert await session.scalar(text(locks)) == 0
        async with engine.connect() as other:
            await other.execute(text("SELECT FROM outbox WHERE id = :id FOR UPDATE NOWAIT"), {"id": event_id})
        await claimer.rollback()
        assert await outbox.cancel(session, event_id) is True
        await session.commit()
    assert await states(engine) == {}


async def test_a_cancel_that_is_open_does_not_stop_the_claims(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher
) -> None:
    one, _ = await emit(outbox, sessions, 1, 2)
    async with asyncio.timeout(10), sessions() as session:
        assert await outbox.cancel(session, one) is True
        assert payloads(await outbox.relay_once(sessions, publish)) == [2]
        await session.rollback()
    assert payloads(await outbox.relay_once(sessions, publish)) == [1]


async def test_it_is_at_most_a_look_two_locks_and_a_deletion(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    [event_id] = await emit(outbox, sessions, 1)
    for expected in (["SELECT", "SELECT", "SELECT", "DELETE"], ["SELECT", "SELECT"]):
        async with sessions.begin() as session:
            with sent_sql(engine) as sent:
                await outbox.cancel(session, event_id)
        words = [sql.split()[0] for sql in sent]
        assert [word for word in words if word in ("SELECT", "DELETE", "UPDATE")] == expected


# --- where it cannot be right


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_above_read_committed_it_refuses_and_changes_nothing(
    outbox: Outbox,
    engine: AsyncEngine,
    engines: Callable[..., AsyncEngine],
    sessions: Sessions,
    isolation: str,
    driver: str,
) -> None:
    [event_id] = await emit(outbox, sessions, 1)
    async with async_sessionmaker(engines(isolation_level=isolation))() as session:
        await outbox.emit(session, "t", 2)
        message = f"^cancel needs READ COMMITTED, this transaction is {isolation}$"
        with pytest.raises(CancelUnsafe, match=message):
            await outbox.cancel(session, event_id)
        await session.commit()
    assert await states(engine) == {"1": "open", "2": "open"}


async def test_in_autocommit_it_refuses_before_any_sql(
    outbox: Outbox, engine: AsyncEngine, engines: Callable[..., AsyncEngine], sessions: Sessions, driver: str
) -> None:
    [event_id] = await emit(outbox, sessions, 1)
    autocommit = engines(isolation_level="AUTOCOMMIT")
    async with autocommit.connect() as connection:
        with sent_sql(autocommit) as sent, pytest.raises(NoTransaction):
            await outbox.cancel(connection, event_id)
    assert sent == []
    assert await states(engine) == {"1": "open"}


async def test_what_got_through_in_an_outage_was_not_tried_and_is_taken_back_from_then_on(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher
) -> None:
    async def cut_off(events: Sequence[Event]) -> None:
        await publish(events)
        raise ConnectionError("the answer was lost")

    first, _ = await emit(outbox, sessions, 1, 2)
    outage = (await Relay(outbox, sessions, cut_off).run_once()).outage
    assert isinstance(outage, ConnectionError)
    assert await cancel(outbox, sessions, first) is True
    assert payloads(await outbox.relay_once(sessions, publish)) == [2]
    assert [event.payload for event in publish.events] == [1, 2, 2]


async def test_a_relay_that_finds_more_locked_events_than_it_looks_at_comes_back_for_them(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher
) -> None:
    ids = await emit(outbox, sessions, *range(30))
    async with sessions() as session:
        for event_id in ids:
            assert await outbox.cancel(session, event_id) is True
        assert await outbox.relay_once(sessions, publish, batch=1) == []
        await session.rollback()
    assert payloads(await outbox.relay_once(sessions, publish, batch=100)) == list(range(30))
