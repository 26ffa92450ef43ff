"""Waiting for something to be so, instead of sleeping and hoping that it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = ["backend_waits", "until"]

PATIENCE = 20.0


async def until(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    """Returns when the condition holds; TimeoutError after 20 seconds."""
    async with asyncio.timeout(PATIENCE):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(0.005)


async def backend_waits(engine: AsyncEngine, locktype: str, count: int = 1) -> None:
    """Returns when so many backends of this database wait for a lock of that type (`pg_locks.locktype`)."""
    waiting = text(
        "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)"
        " WHERE NOT granted AND locktype = :locktype AND datname = current_database()"
    )

    async def waits() -> bool:
        async with engine.connect() as connection:
            return bool(await connection.scalar(waiting, {"locktype": locktype}) >= count)

    await until(waits)
