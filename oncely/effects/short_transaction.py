"""A short transaction of one statement, as every function of the store level is.

READ COMMITTED on PostgreSQL: whoever waits there for a row then sees what became of it, and loses
instead of failing.

A connection that drops is tried once more. When the first try had been written and only its reply
was lost, the second finds the record changed and says lost: the safe side.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import TypeVar

from sqlalchemy import Table
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from oncely.loop import complete
from oncely.transaction import Sessionmaker

__all__ = ["in_short_transaction"]

SQLITE_PATIENCE = timedelta(seconds=60)
"""How long a cancelled caller waits for SQLite, whose own wait for its lock ends after 5 s by default."""

_T = TypeVar("_T")


async def in_short_transaction(
    sessionmaker: Sessionmaker, table: Table, work: Callable[[AsyncConnection], Awaitable[_T]]
) -> _T:
    """What `work` returns, which executes one statement on the database of `table`."""
    try:
        return await _attempt(sessionmaker, table, work)
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
    return await _attempt(sessionmaker, table, work)


async def _attempt(
    sessionmaker: Sessionmaker, table: Table, work: Callable[[AsyncConnection], Awaitable[_T]]
) -> _T:
    async with sessionmaker() as session:
        dialect = session.get_bind(clause=table).dialect.name
        if dialect not in _ISOLATION:
            raise ValueError(f"effects run on PostgreSQL and SQLite, not on {dialect}")

        async def transaction() -> _T:
            async with session.begin():
                return await work(
                    await session.connection(
                        bind_arguments={"clause": table}, execution_options=_ISOLATION[dialect]
                    )
                )

        if dialect != "sqlite":
            return await transaction()
        # aiosqlite does not survive being cancelled: its thread goes on, and may never be heard of again.
        return await complete(transaction(), patience=SQLITE_PATIENCE)


_ISOLATION: Mapping[str, dict[str, str]] = {
    "postgresql": {"isolation_level": "READ COMMITTED"},
    "sqlite": {},  # its writers follow one another
}
