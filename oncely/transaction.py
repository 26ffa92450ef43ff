"""The caller's transaction: how oncely joins it, and when it must refuse to.

Whatever takes a `session` writes in the transaction that the caller owns. It never begins,
commits, rolls back or closes it. Whatever takes a `sessionmaker` does all of that itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

from sqlalchemy import Table
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

from oncely.errors import NoTransaction

__all__ = ["Caller", "Sessionmaker", "begin", "join"]

Caller: TypeAlias = AsyncSession | AsyncConnection | async_scoped_session[AsyncSession]
"""What the functions that join a transaction take as their `session`."""

Sessionmaker: TypeAlias = Callable[[], AbstractAsyncContextManager[AsyncSession]]
"""What the functions that own their transactions take: an `async_sessionmaker`, or alike."""


async def join(caller: Caller, table: Table) -> AsyncConnection:
    """The connection on which the caller's transaction runs, with that transaction begun.

    `table` decides the engine where a session has several. Raises NoTransaction on a connection
    in autocommit, before any SQL.
    """
    if isinstance(caller, AsyncConnection):
        connection = caller
    else:
        connection = await caller.connection(bind_arguments={"clause": table})
    # The driver's own word: SQLAlchemy reports a transaction and READ COMMITTED there.
    driver = connection.sync_connection.connection.dbapi_connection  # type: ignore[union-attr]  # checked out
    if driver.autocommit:  # type: ignore[union-attr]  # checked out
        raise NoTransaction(
            f"{table.name}: the connection is in autocommit, so this write and yours could not "
            "commit together; use a connection with a transaction"
        )
    return connection


@asynccontextmanager
async def begin(sessionmaker: Sessionmaker, table: Table) -> AsyncIterator[AsyncConnection]:
    """A short READ COMMITTED transaction of our own, committed at the end of the block.

    READ COMMITTED whatever the engine says: the statements that run here take a lock and then need
    to see what was committed while they waited for it.
    """
    async with sessionmaker() as session, session.begin():
        yield await session.connection(
            bind_arguments={"clause": table}, execution_options={"isolation_level": "READ COMMITTED"}
        )
