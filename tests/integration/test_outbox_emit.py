"""Emitting: the event is the caller's write, in the caller's transaction, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, Text, insert, select, text
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)

from oncely import NewEvent, NoTransaction, Outbox
from oncely.testing import RecordingPublisher
from tests.outboxes import Sessions, calling, emit, execute, payloads, rows, sent_sql, states

pytestmark = pytest.mark.in_schema

CALLERS = ("session", "scoped session", "connection")


@pytest.fixture(params=CALLERS)
async def caller(request: pytest.FixtureRequest, engine: AsyncEngine) -> AsyncIterator[Any]:
    async with calling(request.param, engine) as caller:
        yield caller


async def test_it_is_committed_with_the_callers_transaction(
    outbox: Outbox, engine: AsyncEngine, caller: Any, driver: str
) -> None:
    event_id = await outbox.emit(caller, "order.created", {"n": 1})
    assert await rows(engine, "SELECT id FROM outbox") == []
    await caller.commit()
    assert await rows(engine, "SELECT id, topic, payload ->> 'n' FROM outbox") == [
        (event_id, "order.created", "1")
    ]


async def test_it_is_rolled_back_with_the_callers_transaction(
    outbox: Outbox, engine: AsyncEngine, caller: Any, driver: str
) -> None:
    await outbox.emit(caller, "t", 1)
    await outbox.emit_many(caller, [NewEvent("t", 2), NewEvent("t", 3, dedup_key="d")])
    await caller.rollback()
    await caller.commit()
    assert await states(engine) == {}


async def test_a_savepoint_that_is_rolled_back_takes_its_events_and_no_others(
    outbox: Outbox, engine: AsyncEngine, caller: Any
) -> None:
    await outbox.emit(caller, "t", "before")
    async with caller.begin_nested() as savepoint:
        await outbox.emit(caller, "t", "inside")
        await outbox.emit_many(caller, [NewEvent("t", "inside, unique", dedup_key="d")])
        await savepoint.rollback()
    async with caller.begin_nested():
        await outbox.emit(caller, "t", "in one that is released")
    await outbox.emit(caller, "t", "after", dedup_key="d")
    await caller.commit()
    assert await states(engine) == {"before": "open", "in one that is released": "open", "after": "open"}


async def test_it_neither_begins_nor_ends_a_transaction_of_its_own(
    outbox: Outbox, engine: AsyncEngine, caller: Any
) -> None:
    asked = text("SELECT pg_current_xact_id()::text, pg_backend_pid()")
    before = (await caller.execute(asked)).one()
    await outbox.emit(caller, "t", 1)
    await outbox.emit_many(caller, [NewEvent("t", 2), NewEvent("t", 3, dedup_key="d")])
    assert (await caller.execute(asked)).one() == before
    await caller.rollback()


@pytest.mark.parametrize("begun", ["not", "by a read", "by begin", "by begin_nested"])
async def test_it_joins_the_transaction_whatever_began_it(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, begun: str, driver: str
) -> None:
    async with sessions() as session:
        if begun == "by a read":
            await session.execute(text("SELECT 1"))
        if begun == "by begin":
            await session.begin()
        if begun == "by begin_nested":
            async with session.begin_nested():
                await outbox.emit(session, "t", 1)
        else:
            await outbox.emit(session, "t", 1)
        assert await states(engine) == {}
        await session.commit()
    assert await states(engine) == {"1": "open"}


async def test_it_is_in_the_database_with_the_callers_own_writes_or_neither_is(
    engine: AsyncEngine, metadata: MetaData, sessions: Sessions
) -> None:
    orders = Table("orders", metadata, Column("id", Integer, primary_key=True), Column("name", Text))
    outbox = Outbox(metadata)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    for name in ("kept", "not kept"):
        async with sessions() as session:
            await session.execute(insert(orders).values(name=name))
            await outbox.emit(session, "order.created", name)
            await (session.commit() if name == "kept" else session.rollback())
    async with engine.connect() as connection:
        assert (await connection.scalars(select(orders.c.name))).all() == ["kept"]
    assert await states(engine) == {"kept": "open"}


async def test_a_two_phase_session_commits_it(
    outbox: Outbox, engine: AsyncEngine, publish: RecordingPublisher, driver: str
) -> None:
    async with AsyncSession(engine, twophase=True) as session:
        await outbox.emit(session, "t", 1)
        await session.commit()
    assert payloads(await outbox.relay_once(async_sessionmaker(engine), publish)) == [1]


@pytest.mark.parametrize("through", ["connection", "session"])
async def test_a_two_phase_transaction_of_a_connection_can_be_prepared(
    outbox: Outbox, engine: AsyncEngine, publish: RecordingPublisher, driver: str, through: str
) -> None:
    async with engine.connect() as connection:
        transaction = await connection.run_sync(lambda sync: sync.begin_twophase())
        if through == "connection":
            await outbox.emit(connection, "t", 1)
        else:
            async with AsyncSession(connection, join_transaction_mode="rollback_only") as session:
                await outbox.emit(session, "t", 1)
                await session.commit()
        await connection.run_sync(lambda _: transaction.prepare())
        assert await rows(engine, "SELECT count(*) FROM outbox") == [(0,)]
        await connection.run_sync(lambda _: transaction.commit())
    assert payloads(await outbox.relay_once(async_sessionmaker(engine), publish)) == [1]


async def test_a_session_of_several_engines_uses_the_one_of_the_outbox(
    outbox: Outbox, engine: AsyncEngine, publish: RecordingPublisher
) -> None:
    nowhere = create_async_engine(engine.url.set(host="/nowhere", database="nothing"))
    sessions = async_sessionmaker(nowhere, binds={outbox.table: engine})
    async with sessions() as session:
        await outbox.emit(session, "t", 1)
        await outbox.emit_many(session, [NewEvent("t", 2)])
        await session.commit()
    assert payloads(await outbox.relay_once(sessions, publish)) == [1, 2]


# --- autocommit


@pytest.mark.parametrize("on", ["engine", "connection"])
async def test_autocommit_is_refused_before_any_sql(
    outbox: Outbox, engine: AsyncEngine, on: str, driver: str
) -> None:
    option = {"isolation_level": "AUTOCOMMIT"}
    with sent_sql(engine) as sent:
        for kind in CALLERS:
            async with calling(
                kind, engine.execution_options(**option) if on == "engine" else engine
            ) as caller:
                if on == "connection" and kind == "connection":
                    await caller.execution_options(**option)
                elif on == "connection":
                    await caller.connection(execution_options=option)
                for refused in (
                    outbox.emit(caller, "t", 1),
                    outbox.emit(caller, "t", 1, dedup_key="d"),
                    outbox.emit_many(caller, [NewEvent("t", 1)]),
                ):
                    with pytest.raises(NoTransaction, match=r"^outbox: the connection is in autocommit"):
                        await refused
    assert sent == []
    assert await states(engine) == {}


# --- statements


async def test_one_event_is_one_statement(outbox: Outbox, engine: AsyncEngine, sessions: Sessions) -> None:
    async with sessions() as session:
        with sent_sql(engine) as sent:
            await outbox.emit(session, "t", 1)
        assert [sql.split(" (")[0] for sql in sent] == ["INSERT INTO outbox"]
        await session.commit()


async def test_many_events_are_one_statement(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    async with sessions() as session:
        with sent_sql(engine) as sent:
            await outbox.emit_many(session, (NewEvent("t", n, key="k") for n in range(1_000)))
        assert [sql.split(" (")[0] for sql in sent] == ["INSERT INTO outbox"]
        await session.commit()


async def test_a_commit_adds_one_notification_at_most(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    async with sessions() as session:
        await outbox.emit(session, "t", 1)
        await outbox.emit_many(session, [NewEvent("t", 2)] * 3)
        with sent_sql(engine) as sent:
            await session.commit()
    assert [sql.split("(")[0] for sql in sent] == ["SELECT pg_notify"]


async def test_no_events_are_no_statement(outbox: Outbox, engine: AsyncEngine) -> None:
    with sent_sql(engine) as sent:
        for kind in CALLERS:
            async with calling(kind, engine) as caller:
                assert await outbox.emit_many(caller, []) == []
                await caller.commit()
    assert sent == []


# --- what is written


async def test_ids_and_places_are_in_the_order_given(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    async with sessions.begin() as session:
        first = await outbox.emit(session, "t", -1)
        ids = await outbox.emit_many(session, (NewEvent("t", n, key=f"k{n % 7}") for n in range(500)))
        unique = await outbox.emit_many(
            session, [NewEvent("t", n, dedup_key=str(n)) for n in range(500, 600)]
        )
        last = await outbox.emit(session, "t", 600)
    written = await rows(engine, "SELECT id, payload::text::int FROM outbox ORDER BY position")
    assert written == list(zip([first, *ids, *unique, last], range(-1, 601), strict=True))


async def test_every_field_arrives(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher, driver: str
) -> None:
    async with sessions.begin() as session:
        started = await session.scalar(text("SELECT now()"))
        one = await outbox.emit(
            session, "a", {"n": [1]}, key="k", headers={"trace": "é", "": ""}, dedup_key="d"
        )
        [two] = await outbox.emit_many(session, [NewEvent("b", None, "", {})])
    events = await outbox.relay_once(sessions, publish)
    assert [
        (event.id, event.topic, event.payload, event.key, event.headers, event.created_at, event.attempt)
        for event in events
    ] == [
        (one, "a", {"n": [1]}, "k", {"trace": "é", "": ""}, started, 1),
        (two, "b", None, "", {}, started, 1),
    ]


async def test_an_empty_payload_is_json_null_and_missing_headers_are_sql_null(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    await emit(outbox, sessions, None)
    async with sessions.begin() as session:
        await outbox.emit(session, "t", None)
    asked = "SELECT payload IS NULL, payload::text, headers IS NULL, key IS NULL FROM outbox"
    assert await rows(engine, asked) == [(False, "null", True, True)] * 2


class Topic(StrEnum):
    PAID = "order.paid"


class OldTopic(str, Enum):  # noqa: UP042  StrEnum's older form
    PAID = "order.paid"


@pytest.mark.parametrize("topic", [Topic.PAID, OldTopic.PAID])
async def test_an_enum_of_strings_may_name_topics_and_keys(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, topic: str, driver: str
) -> None:
    async with sessions.begin() as session:
        await outbox.emit(session, topic, 1, key=topic, headers={topic: topic})
        await outbox.emit(session, topic, 2, key=topic, dedup_key=topic)
        await outbox.emit_many(session, [NewEvent(topic, 3, key=topic)])
    written = await rows(engine, "SELECT DISTINCT topic, key FROM outbox")
    assert written == [("order.paid", "order.paid")]


# --- delay


async def test_a_delay_counts_from_the_emit_and_not_from_the_transactions_begin(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    hour = timedelta(hours=1)
    async with sessions.begin() as session:
        await session.execute(text("SELECT pg_sleep(0.3)"))
        before = await session.scalar(text("SELECT clock_timestamp()"))
        await outbox.emit(session, "t", 1, delay=hour)
        await outbox.emit(session, "t", 2, delay=hour, dedup_key="d")
        await outbox.emit_many(session, [NewEvent("t", 3, delay=hour)])
        after = await session.scalar(text("SELECT clock_timestamp()"))
    due = [row.due_at for row in await rows(engine, "SELECT due_at FROM outbox")]
    assert len(due) == 3
    assert all(before + hour <= time <= after + hour for time in due)


async def test_a_delayed_event_leaves_when_it_is_due_and_not_before(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit(outbox, sessions, "late", delay=timedelta(hours=1))
    await emit(outbox, sessions, "now")
    assert payloads(await outbox.relay_once(sessions, publish)) == ["now"]
    assert await outbox.relay_once(sessions, publish) == []
    await execute(engine, "UPDATE outbox SET due_at = due_at - interval '1 hour' WHERE due_at IS NOT NULL")
    assert payloads(await outbox.relay_once(sessions, publish)) == ["late"]


async def test_a_delay_of_nothing_is_no_delay(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1, delay=timedelta(0))
    assert await rows(engine, "SELECT due_at FROM outbox") == [(None,)]


async def test_a_delay_does_not_hold_its_key(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit(outbox, sessions, "in an hour", key="k", delay=timedelta(hours=1))
    await emit(outbox, sessions, "now", key="k")
    assert payloads(await outbox.relay_once(sessions, publish)) == ["now"]


async def test_what_was_emitted_before_is_older(outbox: Outbox, sessions: Sessions) -> None:
    """Ids begin with the time, so that retention can walk along them."""
    before = datetime.now(UTC)
    [event_id] = await emit(outbox, sessions, 1)
    made = datetime.fromtimestamp(int.from_bytes(event_id.bytes[:6]) / 1000, UTC)
    assert before - timedelta(milliseconds=2) <= made <= datetime.now(UTC)
