"""The inbox: a message that arrives twice changes the database once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, Text, func, insert, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import registry

from oncely import Event, Inbox, InvalidKey, NoTransaction, TransactionEnded
from oncely.event import uuid7
from oncely.transaction import is_retryable, is_unavailable
from tests.waiting import backend_waits

Sessions = async_sessionmaker[AsyncSession]
revenue = Table("revenue", MetaData(), Column("id", Integer, primary_key=True), Column("note", Text))


class Booking:
    """A row of revenue, by the ORM."""

    def __init__(self, id: int, note: str) -> None:  # noqa: A002  the column's name
        self.id = id
        self.note = note


registry().map_imperatively(Booking, revenue)


@pytest.fixture
async def inbox(engine: AsyncEngine, metadata: MetaData) -> Inbox:
    inbox = Inbox(metadata)
    revenue.to_metadata(metadata)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    return inbox


def paid() -> Event:
    return Event(uuid7(), "order.paid", {"total": 3})


async def book(session: AsyncSession, event: Event) -> None:
    await session.execute(insert(revenue).values(note=event.topic))


async def booked(sessions: Sessions) -> int:
    async with sessions() as session:
        return await session.scalar(select(func.count()).select_from(revenue)) or 0


async def test_the_second_delivery_is_not_handled(inbox: Inbox, sessions: Sessions, driver: str) -> None:
    event, handle = paid(), inbox.handler(sessions, book, consumer="billing")
    await handle(event)
    await handle(event)
    assert await booked(sessions) == 1


async def test_two_consumers_of_one_event_each_handle_it(inbox: Inbox, sessions: Sessions) -> None:
    event = paid()
    for consumer in ("billing", "mail", "billing", "mail"):
        await inbox.handler(sessions, book, consumer=consumer)(event)
    assert await booked(sessions) == 2


async def test_a_handler_that_raises_leaves_nothing_and_is_called_again(
    inbox: Inbox, sessions: Sessions
) -> None:
    event, calls = paid(), []

    async def fails_first(session: AsyncSession, event: Event) -> None:
        calls.append(event)
        await book(session, event)
        if len(calls) == 1:
            raise ConnectionError

    handle = inbox.handler(sessions, fails_first, consumer="billing")
    with pytest.raises(ConnectionError):
        await handle(event)
    assert await booked(sessions) == 0
    await handle(event)
    await handle(event)
    assert (len(calls), await booked(sessions)) == (2, 1)


async def test_twenty_deliveries_at_once_are_handled_once(
    inbox: Inbox, sessions: Sessions, driver: str
) -> None:
    event, handle = paid(), inbox.handler(sessions, book, consumer="billing")
    await asyncio.gather(*(handle(event) for _ in range(20)))
    assert await booked(sessions) == 1


async def test_a_second_delivery_waits_and_handles_when_the_first_rolls_back(
    inbox: Inbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    event = paid()
    async with sessions() as first:
        assert await inbox.run(first, event, lambda: book(first, event), consumer="billing")
        handle = inbox.handler(sessions, book, consumer="billing")
        second = asyncio.ensure_future(handle(event))
        await backend_waits(engine, "transactionid")
        await first.rollback()
        await second
    assert await booked(sessions) == 1


async def test_run_joins_the_callers_transaction(inbox: Inbox, sessions: Sessions, driver: str) -> None:
    event = paid()
    async with sessions() as session:
        assert await inbox.run(session, event, lambda: book(session, event), consumer="billing")
        await session.rollback()
    async with sessions() as session, session.begin():
        assert await inbox.run(session, event, lambda: book(session, event), consumer="billing")
        assert not await inbox.run(session, event, lambda: book(session, event), consumer="billing")
    assert await booked(sessions) == 1


async def test_run_takes_a_scoped_session_a_connection_and_a_bare_id(
    inbox: Inbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    async def nothing() -> None: ...

    scoped = async_scoped_session(sessions, scopefunc=asyncio.current_task)
    answers = []
    event_id = uuid4()
    for _ in range(2):
        answers.append(await inbox.run(scoped, event_id, nothing, consumer="scoped"))
        await scoped.commit()
        async with engine.begin() as connection:
            answers.append(await inbox.run(connection, event_id, nothing, consumer="connection"))
    await scoped.remove()
    assert answers == [True, True, False, False]


async def test_work_that_raises_leaves_no_row_also_when_the_error_is_caught(
    inbox: Inbox, sessions: Sessions, driver: str
) -> None:
    event = paid()
    async with sessions() as session, session.begin():

        async def fails() -> None:
            await book(session, event)
            await session.execute(text("SELECT 1 / 0"))

        with pytest.raises(DBAPIError):
            await inbox.run(session, event, fails, consumer="billing")
        await session.execute(insert(revenue).values(note="the caller's own"))
    assert await booked(sessions) == 1
    async with sessions() as session, session.begin():
        assert await inbox.run(session, event, lambda: book(session, event), consumer="billing")


async def swallow_a_flush_that_fails(session: AsyncSession, event: Event) -> None:
    """What "insert if it is not there" looks like on a session; SQLAlchemy rolls back with the flush."""
    session.add_all([Booking(id=1, note="one"), Booking(id=1, note="the same")])
    with suppress(IntegrityError):
        await session.flush()


async def roll_back(session: AsyncSession, event: Event) -> None:
    await book(session, event)
    await session.rollback()


async def commit(session: AsyncSession, event: Event) -> None:
    await book(session, event)
    await session.commit()


async def commit_the_connection(session: AsyncSession, event: Event) -> None:
    await book(session, event)
    await (await session.connection()).commit()


async def swallow_the_error_of_a_statement(session: AsyncSession, event: Event) -> None:
    """PostgreSQL would answer the commit with a rollback, and no driver tells."""
    await book(session, event)
    with suppress(DBAPIError):
        await session.execute(text("SELECT 1 / 0"))


async def roll_back_by_sql(session: AsyncSession, event: Event) -> None:
    await book(session, event)
    await session.execute(text("ROLLBACK"))


ENDINGS = [swallow_a_flush_that_fails, roll_back, commit, commit_the_connection]
UNSEEN_ENDINGS = [swallow_the_error_of_a_statement, roll_back_by_sql]


@pytest.mark.filterwarnings("ignore:New instance .* conflicts with persistent instance")
@pytest.mark.parametrize(
    "handle", [*ENDINGS, swallow_the_error_of_a_statement], ids=lambda handle: handle.__name__
)
async def test_a_handler_that_ends_its_transaction_is_not_taken_for_done(
    inbox: Inbox, sessions: Sessions, driver: str, handle: Callable[[AsyncSession, Event], Awaitable[None]]
) -> None:
    event = paid()
    with pytest.raises(TransactionEnded):
        await inbox.handler(sessions, handle, consumer="billing")(event)
    assert await booked(sessions) == 0
    await inbox.handler(sessions, book, consumer="billing")(event)
    assert await booked(sessions) == 1


async def test_an_error_is_noted_once_whatever_engines_with_options_come_and_go(
    inbox: Inbox, engine: AsyncEngine, driver: str
) -> None:
    for _ in range(5):
        sessions = async_sessionmaker(engine.execution_options())
        with pytest.raises(TransactionEnded):
            await inbox.handler(sessions, swallow_the_error_of_a_statement, consumer="billing")(paid())
    listeners = [listener.__name__ for listener in engine.dialect.dispatch.handle_error]
    assert listeners.count("_note_failure") == 1


async def test_a_server_that_goes_away_before_the_commit_is_not_taken_for_the_works_doing(
    inbox: Inbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    async def handle(session: AsyncSession, event: Event) -> None:
        pid = await session.scalar(text("SELECT pg_backend_pid()"))
        await book(session, event)
        with suppress(DBAPIError):
            async with session.begin_nested():
                await session.execute(text("SELECT 1 / 0"))
        async with engine.connect() as other:
            await other.execute(text("SELECT pg_terminate_backend(:pid, 20000)"), {"pid": pid})

    event = paid()
    with pytest.raises(DBAPIError) as raised:
        await inbox.handler(sessions, handle, consumer="billing")(event)
    assert is_unavailable(raised.value)
    assert await booked(sessions) == 0
    await inbox.handler(sessions, book, consumer="billing")(event)
    assert await booked(sessions) == 1


@pytest.mark.filterwarnings("ignore:New instance .* conflicts with persistent instance")
@pytest.mark.filterwarnings("ignore:nested transaction already deassociated")
@pytest.mark.parametrize("handle", ENDINGS, ids=lambda handle: handle.__name__)
async def test_work_that_ends_the_transaction_is_not_taken_for_done(
    inbox: Inbox, sessions: Sessions, driver: str, handle: Callable[[AsyncSession, Event], Awaitable[None]]
) -> None:
    event = paid()
    async with sessions() as session:
        with pytest.raises(TransactionEnded):
            await inbox.run(session, event, lambda: handle(session, event), consumer="billing")
        with suppress(PendingRollbackError):  # when it was the connection that was to commit
            await session.commit()
    assert await booked(sessions) == 0
    async with sessions.begin() as session:
        assert await inbox.run(session, event, lambda: book(session, event), consumer="billing")


@pytest.mark.parametrize("handle", UNSEEN_ENDINGS, ids=lambda handle: handle.__name__)
async def test_work_that_spoils_the_transaction_unseen_is_not_taken_for_done(
    inbox: Inbox, sessions: Sessions, driver: str, handle: Callable[[AsyncSession, Event], Awaitable[None]]
) -> None:
    event = paid()
    async with sessions() as session:
        with pytest.raises(DBAPIError):
            await inbox.run(session, event, lambda: handle(session, event), consumer="billing")
        await session.commit()
    assert await booked(sessions) == 0
    async with sessions.begin() as session:
        assert await inbox.run(session, event, lambda: book(session, event), consumer="billing")


async def test_work_that_commits_a_bare_connection_leaves_nothing(
    inbox: Inbox, sessions: Sessions, engines: Callable[..., AsyncEngine], driver: str
) -> None:
    """Neither in the database nor open on the connection that goes back to the pool."""
    event, engine = paid(), engines(pool_size=1, max_overflow=0)
    async with engine.connect() as connection:

        async def work() -> None:
            await connection.execute(insert(revenue).values(note="half of it"))
            await connection.commit()

        with pytest.raises(TransactionEnded):
            await inbox.run(connection, event, work, consumer="billing")
    async with engine.begin() as connection:
        assert await connection.scalar(select(func.count()).select_from(revenue)) == 0
        assert await connection.scalar(select(func.count()).select_from(inbox.table)) == 0


async def test_a_handler_may_use_savepoints_of_its_own(inbox: Inbox, sessions: Sessions, driver: str) -> None:
    async def tries(session: AsyncSession, event: Event) -> None:
        with suppress(IntegrityError):
            async with session.begin_nested():
                session.add_all([Booking(id=1, note="one"), Booking(id=1, note="the same")])
        async with session.begin_nested():
            await book(session, event)

    event, handle = paid(), inbox.handler(sessions, tries, consumer="billing")
    await handle(event)
    await handle(event)
    assert await booked(sessions) == 1


async def test_at_repeatable_read_a_lost_race_is_a_serialization_failure(
    inbox: Inbox, sessions: Sessions
) -> None:
    event = paid()

    async def nothing() -> None: ...

    async with sessions() as session:
        await session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        await session.execute(text("SELECT count(*) FROM inbox"))
        await inbox.handler(sessions, book, consumer="billing")(event)
        with pytest.raises(DBAPIError) as raised:
            await inbox.run(session, event, nothing, consumer="billing")
    assert is_retryable(raised.value)


async def test_autocommit_is_refused_before_any_sql(inbox: Inbox, engine: AsyncEngine) -> None:
    async def never() -> None:
        raise AssertionError

    async with engine.connect() as connection:
        autocommit = await connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(NoTransaction):
            await inbox.run(autocommit, paid(), never, consumer="billing")


async def test_what_is_no_event_and_no_async_function_is_refused_at_once(
    inbox: Inbox, sessions: Sessions
) -> None:
    def plain(session: AsyncSession, event: Event) -> None: ...

    async def never() -> None:
        raise AssertionError

    with pytest.raises(TypeError, match="handle must be an async function"):
        inbox.handler(sessions, plain, consumer="billing")  # type: ignore[arg-type]  # that is refused
    async with sessions() as session:
        with pytest.raises(TypeError, match="event must be a UUID, not str"):
            await inbox.run(session, str(uuid4()), never, consumer="billing")  # type: ignore[arg-type]  # so is that
        assert not session.in_transaction()


@pytest.mark.parametrize("consumer", ["", "nul\0", "\ud800", "x" * 1001])
async def test_a_consumer_that_cannot_be_stored_is_refused_before_any_sql(
    inbox: Inbox, sessions: Sessions, consumer: str
) -> None:
    with pytest.raises(InvalidKey):
        inbox.handler(sessions, book, consumer=consumer)
    async with sessions() as session:
        with pytest.raises(InvalidKey):
            await inbox.run(session, paid(), lambda: book(session, paid()), consumer=consumer)
        assert await session.scalar(text("SELECT 1")) == 1


async def test_prune_forgets_what_is_older_and_passes_over_locked_rows(
    inbox: Inbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    handle = inbox.handler(sessions, book, consumer="billing")
    events = [paid() for _ in range(5)]
    for event in events:
        await handle(event)
    async with engine.begin() as connection:
        await connection.execute(
            text("UPDATE inbox SET handled_at = handled_at - interval '2 days' WHERE event_id <> :id"),
            {"id": events[0].id},
        )
    async with engine.begin() as other, sessions() as session, session.begin():
        await other.execute(text("SELECT 1 FROM inbox WHERE event_id = :id FOR UPDATE"), {"id": events[1].id})
        await session.execute(text("SET LOCAL lock_timeout = '300ms'"))
        assert await inbox.prune(session, older_than=timedelta(days=1), limit=2) == 2
        assert await inbox.prune(session, older_than=datetime.now(UTC) - timedelta(days=1)) == 1
    async with sessions() as session:
        left = set(await session.scalars(text("SELECT event_id FROM inbox")))
    assert left == {events[0].id, events[1].id}
