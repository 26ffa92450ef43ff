"""The caller's transaction: how oncely joins it, when it must refuse to, and which errors mean: again.

Whatever takes a `session` writes in the transaction that the caller owns. It never begins,
commits, rolls back or closes it. Whatever takes a `sessionmaker` does all of that itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeAlias, TypeVar

from sqlalchemy import Connection, CursorResult, Engine, Executable, Table
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from oncely.errors import NoTransaction, TablesMissing

__all__ = [
    "Caller",
    "Sessionmaker",
    "alone",
    "bind_of",
    "check_sessionmaker",
    "execute",
    "is_lock_timeout",
    "is_passing",
    "is_retryable",
    "is_unavailable",
    "join",
    "owner_of",
    "require_transaction",
    "says_what_is_missing",
    "sqlstates",
    "transact",
]

_T = TypeVar("_T")

Caller: TypeAlias = AsyncSession | AsyncConnection | async_scoped_session[AsyncSession]
"""What the functions that join a transaction take as their `session`."""

Sessionmaker: TypeAlias = Callable[[], AbstractAsyncContextManager[AsyncSession]]
"""What the functions that own their transactions take: an `async_sessionmaker`, or alike."""


async def join(caller: Caller, table: Table) -> AsyncConnection:
    """The connection on which the caller's transaction runs, with that transaction begun.

    `table` decides the engine where a session has several. Raises NoTransaction on a connection
    in autocommit, before any SQL.
    """
    caller = owner_of(caller)
    if isinstance(caller, AsyncConnection):
        connection = caller
    else:
        connection = await caller.connection(bind_arguments={"clause": table})
    require_transaction(connection.sync_connection, table)  # type: ignore[arg-type]  # it is started
    return connection


async def execute(
    caller: Caller, table: Table, statement: Executable, parameters: Mapping[str, Any]
) -> CursorResult[Any]:
    """One statement in the caller's transaction: `join` and execute in one step, which is quicker."""

    def joined(owner: Session | Connection) -> CursorResult[Any]:
        connection = owner if isinstance(owner, Connection) else owner.connection({"clause": table})
        require_transaction(connection, table)
        with says_what_is_missing(table):
            return connection.execute(statement, parameters)

    return await owner_of(caller).run_sync(joined)


@contextmanager
def says_what_is_missing(table: Table) -> Iterator[None]:
    """Raises TablesMissing in the place of PostgreSQL's error for a table that is not there."""
    try:
        yield
    except ProgrammingError as error:
        if "42P01" in sqlstates(error):
            raise TablesMissing(table.fullname) from error
        raise


def owner_of(caller: Caller) -> AsyncSession | AsyncConnection:
    """The session or connection itself, out of its scope. TypeError for anything else."""
    owner: object = caller() if isinstance(caller, async_scoped_session) else caller
    if not isinstance(owner, (AsyncSession, AsyncConnection)):
        raise TypeError(
            "session must be an AsyncSession, an async_scoped_session or an AsyncConnection, "
            f"not {type(owner).__name__}"
        )
    return owner


def check_sessionmaker(given: object) -> None:
    """Raise TypeError for what surely makes no AsyncSessions: a session, an engine, a plain sessionmaker."""
    plain = isinstance(given, scoped_session) or (
        isinstance(given, sessionmaker) and not issubclass(given.class_, AsyncSession)
    )
    if plain or not callable(given):
        raise TypeError(
            "sessionmaker must make AsyncSessions, as async_sessionmaker(engine) does, "
            f"and is {type(given).__name__}"
        )


def require_transaction(connection: Connection, table: Table) -> None:
    """Raise NoTransaction, before any SQL, for a connection in autocommit."""
    # The driver's own word: SQLAlchemy reports a transaction and READ COMMITTED there.
    driver = connection.connection.dbapi_connection
    if driver.autocommit:  # type: ignore[union-attr]  # checked out
        raise NoTransaction(
            f"{table.name}: the connection is in autocommit, so this write and yours could not "
            "commit together; use a connection with a transaction"
        )


async def transact(sessionmaker: Sessionmaker, table: Table, work: Callable[[Connection], _T]) -> _T:
    """The result of `work` in a short READ COMMITTED transaction of our own, committed after it.

    READ COMMITTED whatever the engine says: the statements that run here take a lock and then need
    to see what was committed while they waited for it.
    """
    return await _in_session(sessionmaker, table, work, isolation_level="READ COMMITTED")


async def alone(sessionmaker: Sessionmaker, table: Table, work: Callable[[Connection], _T]) -> _T:
    """The result of `work`, whose one statement is a transaction of its own: two round trips fewer."""
    return await _in_session(sessionmaker, table, work, isolation_level="AUTOCOMMIT")


async def bind_of(sessionmaker: Sessionmaker, table: Table) -> Engine | Connection:
    """What leads to the table, where a sessionmaker has several engines. Nothing is asked of it."""
    async with sessionmaker() as session:
        return session.sync_session.get_bind(clause=table)


async def _in_session(
    sessionmaker: Sessionmaker, table: Table, work: Callable[[Connection], _T], *, isolation_level: str
) -> _T:
    # As a whole in SQLAlchemy's greenlet, which is quicker than a switch for each of its steps.
    def in_session(session: Session) -> _T:
        session.twophase = False  # there is nothing to agree on: all of it is in one database
        if not session.in_transaction():
            session.begin()
        connection = session.connection({"clause": table}, {"isolation_level": isolation_level})
        with says_what_is_missing(table):
            result = work(connection)
        session.commit()
        session.close()
        return result

    context = sessionmaker()
    if not isinstance(context, AsyncSession):
        async with context as session:
            return await session.run_sync(in_session)
    # Not `async with`: to leave it takes a task of its own, and there is nothing left to close.
    try:
        return await context.run_sync(in_session)
    except BaseException:
        async with context:
            raise


def is_retryable(error: BaseException) -> bool:
    """Whether the whole transaction may be tried again: PostgreSQL ended it for others' sake.

    True for serialization failures (40001) and deadlocks (40P01), on asyncpg and psycopg, bare or
    wrapped by SQLAlchemy, also as the cause of another error. Roll back first.
    """
    return not _ENDED_FOR_OTHERS.isdisjoint(sqlstates(error))


def is_unavailable(error: BaseException) -> bool:
    """Whether the database could not be reached or ended the connection: nothing is wrong with the work.

    True for a connection that was refused, lost or ended by an operator, for a server that starts or
    stops or has no connection left, and for a pool that gave none in time.
    """
    if isinstance(error, (OSError, PoolTimeout)) or (
        isinstance(error, DBAPIError) and error.connection_invalidated
    ):
        return True
    if any(code[:2] == "08" or code in _NOT_THERE for code in sqlstates(error)):
        return True
    if _is_asyncpgs_own(error):
        return True
    # Without a code, the driver itself speaks: a connection that it found closed, or one that was ended
    # while it was made, over which asyncpg loses its place.
    return isinstance(error, (InterfaceError, OperationalError, InternalError)) and not sqlstates(error)


def _is_asyncpgs_own(error: BaseException) -> bool:
    """Whether asyncpg itself found its connection closed or lost its place in it.

    While a connection is made, SQLAlchemy passes such errors on as they are. Wrong arguments are
    InterfaceErrors too, and ValueErrors.
    """
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    own = {"asyncpg.InterfaceError", "asyncpg.InternalClientError"}
    return not names.isdisjoint(own) and not isinstance(error, ValueError)


def is_passing(error: BaseException) -> bool:
    """Whether a worker should wait and try again: it may go better later, with nothing changed by anybody.

    True for what `is_retryable` and `is_unavailable` say, for a statement that was cancelled or waited
    too long for a lock, for a server without resources or with a failing disk, and for a standby: after
    a failover a connection may lead to one.
    """
    return (
        is_unavailable(error)
        or is_retryable(error)
        or any(code[:2] in ("53", "58") or code in _PASSING for code in sqlstates(error))
    )


def is_lock_timeout(error: BaseException) -> bool:
    """Whether the statement itself waited for a lock for longer than `lock_timeout`."""
    return sqlstates(error)[:1] == ["55P03"]


def sqlstates(error: BaseException) -> list[str]:
    """PostgreSQL's codes for this error and its causes, the error's own first."""
    found: list[str] = []
    seen: set[int] = set()
    pending: list[object] = [error]
    while pending:
        cause = pending.pop(0)
        if not isinstance(cause, BaseException) or id(cause) in seen:
            continue
        seen.add(id(cause))
        code = getattr(cause, "sqlstate", None)
        if isinstance(code, str):
            found.append(code)
        pending += [getattr(cause, "orig", None), cause.__cause__]
    return found


_ENDED_FOR_OTHERS = frozenset({"40001", "40P01"})
# Ended by an operator, a crash or a timeout while idle; starting or stopping; no connection left.
_NOT_THERE = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "53300"})
# Cancelled; a lock not obtained in time; read-only; a plan that a migration has made obsolete.
_PASSING = frozenset({"57014", "55P03", "25006", "0A000"})
