"""A dedup_key: a second emit of the same thing is the first one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import DedupKeyReused, NewEvent, Outbox, RowsHidden
from oncely.testing import RecordingPublisher
from oncely.transaction import is_retryable, sqlstates
from tests.database import Database
from tests.outboxes import Sessions, emit, execute, fail, rows, sent_sql, states
from tests.waiting import backend_waits

pytestmark = pytest.mark.in_schema


async def test_a_second_emit_returns_the_first_id_and_writes_nothing(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    async with sessions.begin() as session:
        first = await outbox.emit(session, "t", {"n": 1}, key="k", dedup_key="d")
        assert await outbox.emit(session, "t", {"n": 1}, key="k", dedup_key="d") == first
    async with sessions.begin() as session:
        assert await outbox.emit(session, "t", {"n": 1}, key="k", dedup_key="d") == first
        again = NewEvent("t", {"n": 1}, "k", dedup_key="d")
        assert await outbox.emit_many(session, [again, again]) == [first, first]
    assert await rows(engine, "SELECT id FROM outbox") == [(first,)]


async def test_a_published_one_is_still_the_first(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    first = await emit(outbox, sessions, 1, dedup_key="d")
    await outbox.relay_once(sessions, publish)
    assert await emit(outbox, sessions, 1, dedup_key="d") == first
    assert await states(engine) == {"1": "published"}


async def test_the_same_dedup_key_on_another_topic_is_another_event(
    outbox: Outbox, sessions: Sessions
) -> None:
    first = await emit(outbox, sessions, 1, topic="a", dedup_key="d")
    assert await emit(outbox, sessions, 1, topic="b", dedup_key="d") != first


async def test_headers_delay_and_the_order_of_names_do_not_count(outbox: Outbox, sessions: Sessions) -> None:
    async with sessions.begin() as session:
        first = await outbox.emit(session, "t", {"a": 1, "b": 2}, dedup_key="d", headers={"trace": "1"})
        again = await outbox.emit(session, "t", {"b": 2, "a": 1}, dedup_key="d", delay=timedelta(hours=1))
    assert again == first


@pytest.mark.parametrize(
    ("key", "payload"), [("other", 1), (None, 1), ("k", 2), ("k", "1"), ("k", None), ("k", [1])]
)
async def test_another_key_or_payload_is_refused_and_names_the_first(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, key: str | None, payload: object, driver: str
) -> None:
    [first] = await emit(outbox, sessions, 1, key="k", dedup_key="d")
    async with sessions() as session:
        await outbox.emit(session, "t", "before")
        with pytest.raises(DedupKeyReused) as raised:
            await outbox.emit(session, "t", payload, key=key, dedup_key="d")
        assert (raised.value.topic, raised.value.dedup_key, raised.value.event_id) == ("t", "d", first)
        with pytest.raises(DedupKeyReused):
            await outbox.emit_many(session, [NewEvent("t", payload, key, dedup_key="d")])
        await outbox.emit(session, "t", "after")
        await session.commit()
    assert await states(engine) == {"1": "open", "before": "open", "after": "open"}


async def test_the_first_may_have_had_no_key(outbox: Outbox, sessions: Sessions) -> None:
    first = await emit(outbox, sessions, 1, dedup_key="d")
    assert await emit(outbox, sessions, 1, dedup_key="d") == first
    with pytest.raises(DedupKeyReused):
        await emit(outbox, sessions, 1, key="k", dedup_key="d")


# --- in one batch


async def test_a_batch_may_repeat_itself_and_ids_keep_their_order(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    [old] = await emit(outbox, sessions, "old", dedup_key="old")
    async with sessions.begin() as session:
        ids = await outbox.emit_many(
            session,
            [
                NewEvent("t", "a", dedup_key="a"),
                NewEvent("t", "none"),
                NewEvent("t", "old", dedup_key="old"),
                NewEvent("t", "a", dedup_key="a"),
                NewEvent("t", "none"),
                NewEvent("t", "b", dedup_key="b"),
            ],
        )
    by_id: dict[UUID, str] = dict(await rows(engine, "SELECT id, payload #>> '{}' FROM outbox"))
    assert [by_id[event_id] for event_id in ids] == ["a", "none", "old", "a", "none", "b"]
    assert ids[0] == ids[3]
    assert ids[1] != ids[4]
    assert ids[2] == old
    assert len(by_id) == 5


async def test_of_a_batch_that_is_refused_nothing_is_written(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    await emit(outbox, sessions, "old", dedup_key="old")
    async with sessions() as session:
        await outbox.emit(session, "t", "before")
        for refused in ("old", "new"):
            with pytest.raises(DedupKeyReused):
                await outbox.emit_many(
                    session,
                    [
                        NewEvent("t", "one"),
                        NewEvent("t", "two", dedup_key="new"),
                        NewEvent("t", "three", dedup_key=refused),
                    ],
                )
        await outbox.emit(session, "t", "after")
        await session.commit()
    assert await states(engine) == {"old": "open", "before": "open", "after": "open"}


async def test_it_is_one_statement_when_new_and_one_more_for_all_that_are_not(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    events = [NewEvent("t", n, dedup_key=str(n)) for n in range(20)]
    for expected in (["INSERT INTO"], ["INSERT INTO", "SELECT given.line,"]):
        async with sessions.begin() as session:
            with sent_sql(engine) as sent:
                await outbox.emit(session, "t", "one", dedup_key="one")
                await outbox.emit_many(session, events)
            inside = [sql for sql in sent if "SAVEPOINT" not in sql]
        assert [" ".join(sql.split()[:2]) for sql in inside] == expected * 2


# --- beside others


async def waiting_emit(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, payload: object
) -> asyncio.Task[Any]:
    """An emit in a transaction of its own that waits for somebody's open one."""
    task = asyncio.create_task(emit(outbox, sessions, payload, dedup_key="d"))
    await backend_waits(engine, "transactionid")
    return task


async def test_beside_an_open_first_emit_it_waits_and_returns_the_first_id(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    async with sessions() as session:
        first = await outbox.emit(session, "t", 1, dedup_key="d")
        second = await waiting_emit(outbox, engine, sessions, 1)
        await session.commit()
    assert await second == [first]


async def test_when_the_open_first_emit_is_rolled_back_the_waiting_one_writes(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    async with sessions() as session:
        first = await outbox.emit(session, "t", 1, dedup_key="d")
        second = await waiting_emit(outbox, engine, sessions, 2)
        await session.rollback()
    [written] = await second
    assert written != first
    assert await rows(engine, "SELECT id FROM outbox") == [(written,)]


async def test_when_the_open_first_emit_was_another_event_the_waiting_one_is_refused(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    async with sessions() as session:
        first = await outbox.emit(session, "t", 1, dedup_key="d")
        second = await waiting_emit(outbox, engine, sessions, 2)
        await session.commit()
    with pytest.raises(DedupKeyReused) as raised:
        await second
    assert raised.value.event_id == first


async def test_twelve_at_once_write_one_event(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    for dedup_key in "abcde":
        ids = await asyncio.gather(*(emit(outbox, sessions, 1, dedup_key=dedup_key) for _ in range(12)))
        assert len({event_id for [event_id] in ids}) == 1
    assert await rows(engine, "SELECT count(*) FROM outbox") == [(5,)]


async def test_when_the_first_is_deleted_meanwhile_it_writes_after_all(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, database: Database
) -> None:
    first = await emit(outbox, sessions, 1, dedup_key="d")

    def delete(*arguments: Any) -> None:
        if arguments[2].lstrip().startswith("SELECT given.line"):
            with psycopg.connect(database.dsn(), autocommit=True) as other:
                other.execute("DELETE FROM outbox WHERE id = %s", first)

    event.listen(engine.sync_engine, "before_cursor_execute", delete)
    second = await emit(outbox, sessions, 1, dedup_key="d")
    event.remove(engine.sync_engine, "before_cursor_execute", delete)
    assert second != first
    assert await rows(engine, "SELECT id FROM outbox") == [(second[0],)]


async def test_a_deadlock_passes_through_as_it_is(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    async def emit_both(first: str, second: str, met: asyncio.Barrier) -> list[UUID]:
        async with sessions.begin() as session:
            await session.execute(text("SET LOCAL deadlock_timeout = '50ms'"))
            ids = [await outbox.emit(session, "t", first, dedup_key=first)]
            await met.wait()
            return [*ids, await outbox.emit(session, "t", second, dedup_key=second)]

    met = asyncio.Barrier(2)
    ended = await asyncio.gather(emit_both("a", "b", met), emit_both("b", "a", met), return_exceptions=True)
    [error] = [end for end in ended if isinstance(end, BaseException)]
    assert isinstance(error, DBAPIError)
    assert sqlstates(error)[0] == "40P01"
    assert is_retryable(error)
    assert await states(engine) in ({"a": "open", "b": "open"}, {"b": "open", "a": "open"})


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_above_read_committed_what_was_there_before_is_found(
    outbox: Outbox, engines: Callable[..., AsyncEngine], sessions: Sessions, isolation: str
) -> None:
    first = await emit(outbox, sessions, 1, dedup_key="d")
    above = async_sessionmaker(engines(isolation_level=isolation))
    assert await emit(outbox, above, 1, dedup_key="d") == first
    with pytest.raises(DedupKeyReused):
        await emit(outbox, above, 2, dedup_key="d")


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_above_read_committed_what_came_meanwhile_is_a_serialization_failure(
    outbox: Outbox, engines: Callable[..., AsyncEngine], sessions: Sessions, isolation: str, driver: str
) -> None:
    above = async_sessionmaker(engines(isolation_level=isolation))
    async with above() as session:
        await session.execute(text("SELECT count(*) FROM outbox"))
        first = await emit(outbox, sessions, 1, dedup_key="d")
        with pytest.raises(DBAPIError) as raised:
            await outbox.emit(session, "t", 1, dedup_key="d")
    assert sqlstates(raised.value)[0] == "40001"
    assert is_retryable(raised.value)
    assert await emit(outbox, above, 1, dedup_key="d") == first


# --- as long as the row is kept


@pytest.mark.parametrize("gone", ["pruned", "cancelled", "discarded"])
async def test_when_the_row_is_gone_its_dedup_key_is_free(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher, gone: str
) -> None:
    [first] = await emit(outbox, sessions, 1, dedup_key="d")
    if gone == "pruned":
        await outbox.relay_once(sessions, publish)
        await execute(engine, "UPDATE outbox SET published_at = published_at - interval '1 hour'")
    if gone == "discarded":
        await fail(outbox, sessions, 1, delay=None)
    async with sessions.begin() as session:
        if gone == "pruned":
            assert await outbox.prune(session, older_than=timedelta(minutes=30)) == 1
        elif gone == "cancelled":
            assert await outbox.cancel(session, first) is True
        else:
            assert await outbox.discard(session) == 1
    [second] = await emit(outbox, sessions, 2, dedup_key="d")
    assert second != first


async def test_a_row_that_the_database_hides_is_said_and_not_waited_for(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    """A trigger here, row level security elsewhere: neither written nor seen."""
    await execute(
        engine, "CREATE FUNCTION hide() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
    )
    await execute(engine, "CREATE TRIGGER hide BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION hide()")
    async with asyncio.timeout(5), sessions.begin() as session:
        with pytest.raises(RowsHidden):
            await outbox.emit(session, "t", 1, dedup_key="d")
