"""Joining the caller's transaction, having one of our own, and telling errors by their codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import asyncpg
import pytest
from sqlalchemy import Column, Connection, Integer, MetaData, Table, insert, text
from sqlalchemy.exc import DBAPIError, InternalError, ProgrammingError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.util import await_only

from oncely.errors import NoTransaction, TablesMissing
from oncely.statement import Statement
from oncely.transaction import (
    alone,
    execute,
    is_passing,
    is_retryable,
    is_unavailable,
    join,
    owner_of,
    sqlstates,
    transact,
)
from tests.database import both_drivers
from tests.outboxes import Sessions, calling, rows, sent_sql

pytestmark = [pytest.mark.in_schema, both_drivers]

PID = "SELECT pg_backend_pid()"


@pytest.fixture
async def things(engine: AsyncEngine, metadata: MetaData) -> Table:
    table = Table("things", metadata, Column("id", Integer))
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    return table


def an_insert(things: Table) -> Statement:
    return Statement("INSERT INTO {things} VALUES (:id)", {"things": things}, {"id": Integer})


# --- the caller's


@pytest.mark.parametrize("kind", ["session", "scoped session", "connection"])
async def test_what_joins_is_on_the_callers_connection_and_in_its_transaction(
    engine: AsyncEngine, things: Table, kind: str
) -> None:
    async with calling(kind, engine) as caller:
        connection = await join(caller, things)
        assert await connection.scalar(text(PID)) == await caller.scalar(text(PID))
        await execute(caller, things, an_insert(things), {"id": 1})
        assert await rows(engine, "SELECT id FROM things") == []
        await caller.rollback()
        await execute(caller, things, an_insert(things), {"id": 2})
        await caller.commit()
    assert await rows(engine, "SELECT id FROM things") == [(2,)]


async def test_the_table_decides_where_a_session_has_several_engines(
    engine: AsyncEngine, things: Table
) -> None:
    nowhere = create_async_engine(engine.url.set(host="/nowhere", database="nothing"))
    async with AsyncSession(nowhere, binds={things: engine}) as session:
        assert (await join(session, things)).engine.url == engine.url
        await execute(session, things, an_insert(things), {"id": 1})
        await session.commit()
    assert await rows(engine, "SELECT id FROM things") == [(1,)]


@pytest.mark.parametrize("kind", ["session", "scoped session", "connection"])
async def test_autocommit_is_refused_and_named_before_any_sql(
    engine: AsyncEngine, things: Table, kind: str
) -> None:
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with sent_sql(engine) as sent:
        async with calling(kind, autocommit) as caller:
            for refused in (
                join(caller, things),
                execute(caller, things, an_insert(things), {"id": 1}),
            ):
                with pytest.raises(NoTransaction, match=r"^things: the connection is in autocommit"):
                    await refused
    assert sent == []


async def test_a_connection_that_was_in_autocommit_before_is_accepted(
    engines: Callable[..., AsyncEngine], things: Table
) -> None:
    engine = engines(pool_size=1, max_overflow=0)
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        await connection.execute(text("SELECT 1"))
    async with engine.connect() as connection:
        await join(connection, things)


@pytest.mark.parametrize("caller", ["a sessionmaker", "an engine", "a sync session", "nothing"])
async def test_anything_else_is_no_caller(engine: AsyncEngine, sessions: Sessions, caller: str) -> None:
    wrong: Any = {
        "a sessionmaker": sessions,
        "an engine": engine,
        "a sync session": AsyncSession(engine).sync_session,
        "nothing": None,
    }[caller]
    with pytest.raises(TypeError, match=f"not {type(wrong).__name__}$"):
        owner_of(wrong)


async def test_a_table_that_is_not_there_is_named(engine: AsyncEngine, sessions: Sessions) -> None:
    things = Table("missing_things", MetaData(), Column("id", Integer))
    async with sessions() as session:
        with pytest.raises(TablesMissing, match="missing_things"):
            await execute(session, things, an_insert(things), {"id": 1})
    with pytest.raises(TablesMissing, match="missing_things"):
        await transact(sessions, things, lambda connection: connection.execute(an_insert(things), {"id": 1}))
    with pytest.raises(TablesMissing, match="missing_things"):
        await alone(sessions, things, lambda connection: connection.execute(an_insert(things), {"id": 1}))


async def test_a_table_of_other_columns_is_no_missing_table(
    engine: AsyncEngine, sessions: Sessions, things: Table
) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE things RENAME id TO number"))
    update = Statement("UPDATE {things} SET id = :id", {"things": things}, {"id": Integer})
    async with sessions() as session:
        with pytest.raises(ProgrammingError, match='column "id" of relation "things" does not exist'):
            await execute(session, things, update, {"id": 1})


# --- our own


@pytest.mark.parametrize("own", [transact, alone])
async def test_a_sessionmaker_that_begins_the_transaction_is_taken_too(
    engine: AsyncEngine, sessions: Sessions, things: Table, own: Any
) -> None:
    await own(sessions.begin, things, lambda connection: connection.execute(an_insert(things), {"id": 1}))
    assert await rows(engine, "SELECT id FROM things") == [(1,)]


@pytest.mark.parametrize("isolation", [None, "AUTOCOMMIT", "REPEATABLE READ", "SERIALIZABLE"])
async def test_a_transaction_of_our_own_is_read_committed_and_commits(
    engines: Callable[..., AsyncEngine], engine: AsyncEngine, things: Table, isolation: str | None
) -> None:
    options = {} if isolation is None else {"isolation_level": isolation}
    sessions = async_sessionmaker(engines(**options))

    def work(connection: Connection) -> list[Any]:
        assert connection.scalar(text("SHOW transaction_isolation")) == "read committed"
        connection.execute(insert(things).values(id=1))
        return await_only(rows(engine, "SELECT id FROM things"))

    assert await transact(sessions, things, work) == []
    assert await rows(engine, "SELECT id FROM things") == [(1,)]


async def test_an_error_in_a_transaction_of_our_own_rolls_it_back_and_goes_on(
    engine: AsyncEngine, sessions: Sessions, things: Table
) -> None:
    def work(connection: Connection) -> None:
        connection.execute(insert(things).values(id=1))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await transact(sessions, things, work)
    assert await rows(engine, "SELECT id FROM things") == []


async def test_a_statement_alone_commits_by_itself(
    engine: AsyncEngine, sessions: Sessions, things: Table
) -> None:
    def work(connection: Connection) -> None:
        connection.execute(insert(things).values(id=1))
        assert await_only(rows(engine, "SELECT id FROM things")) == [(1,)]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await alone(sessions, things, work)
    assert await rows(engine, "SELECT id FROM things") == [(1,)]


async def test_a_connection_goes_back_to_the_pool_as_it_was(
    engines: Callable[..., AsyncEngine], things: Table
) -> None:
    engine = engines(pool_size=1, max_overflow=0, isolation_level="SERIALIZABLE")
    sessions = async_sessionmaker(engine)

    async def select_alone() -> None:
        await alone(sessions, things, lambda connection: connection.execute(text("SELECT 1")))

    async def select_in_a_transaction() -> None:
        await transact(sessions, things, lambda connection: connection.execute(text("SELECT 1")))

    for select in (select_alone, select_in_a_transaction):
        await select()
        async with engine.connect() as connection:
            assert await connection.scalar(text("SHOW transaction_isolation")) == "serializable"
            await join(connection, things)


# --- errors


async def raised(connection: Any, sql: str) -> DBAPIError:
    with pytest.raises(DBAPIError) as error:
        await connection.execute(text(sql))
    await connection.rollback()
    return error.value


RAISE = "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{}'; END $$"


@pytest.mark.parametrize(
    ("code", "retryable", "unavailable", "passing"),
    [
        ("40001", True, False, True),
        ("40P01", True, False, True),
        ("40002", False, False, False),
        ("23505", False, False, False),
        ("42P01", False, False, False),
        ("22001", False, False, False),
        ("55P03", False, False, True),
        ("57014", False, False, True),
        ("57P03", False, True, True),
        ("08006", False, True, True),
        ("53300", False, True, True),
        ("53100", False, False, True),
        ("58030", False, False, True),
        ("25006", False, False, True),
    ],
)
async def test_an_error_is_told_by_its_code_on_either_driver(
    engine: AsyncEngine, code: str, retryable: bool, unavailable: bool, passing: bool
) -> None:
    async with engine.connect() as connection:
        error = await raised(connection, RAISE.format(code))
    assert sqlstates(error)[0] == code
    assert (is_retryable(error), is_unavailable(error), is_passing(error)) == (
        retryable,
        unavailable,
        passing,
    )
    assert is_retryable(error.orig) is retryable  # type: ignore[arg-type]  # the driver's own, bare
    wrapped = RuntimeError("of the application")
    wrapped.__cause__ = error
    assert is_retryable(wrapped) is retryable


async def test_a_connection_that_was_ended_is_unavailable(
    engine: AsyncEngine, engines: Callable[..., AsyncEngine]
) -> None:
    async with engines().connect() as victim:
        pid = await victim.scalar(text(PID))
        await rows(engine, f"SELECT pg_terminate_backend({pid})")
        with pytest.raises((DBAPIError, asyncpg.InternalClientError)) as error:  # by when asyncpg notices
            await victim.execute(text("SELECT 1"))
    assert is_unavailable(error.value)
    assert not is_retryable(error.value)


@pytest.mark.parametrize(
    ("error", "unavailable"),
    [
        (ConnectionRefusedError(), True),
        (TimeoutError(), True),
        (OSError(), True),
        (asyncpg.InterfaceError("connection is closed"), True),
        (asyncpg.InternalClientError("cannot switch to state 15"), True),
        (asyncpg.exceptions._base.DataError("invalid input for query argument $1"), False),
        (InternalError("ROLLBACK", {}, asyncpg.InternalClientError("cannot switch to state 15")), True),
        (ValueError("40001"), False),
        (RuntimeError("deadlock detected"), False),
        (KeyError("sqlstate"), False),
    ],
    ids=repr,
)
def test_an_error_without_a_code_is_never_told_by_its_message(
    error: BaseException, unavailable: bool
) -> None:
    assert sqlstates(error) == []
    assert is_retryable(error) is False
    assert is_unavailable(error) is unavailable


def test_causes_that_go_in_a_circle_are_followed_once() -> None:
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert sqlstates(first) == []


def test_a_sqlstate_that_is_no_text_does_not_count() -> None:
    error = ValueError()
    error.sqlstate = 40001  # type: ignore[attr-defined]  # somebody's own idea of one
    assert sqlstates(error) == []
