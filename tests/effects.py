"""What the tests of effects share: a table that is there, time that passes, a provider that counts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy import MetaData, func, update
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely.effects import NOT_HAPPENED, EffectRecord, Effects

__all__ = ["HOUR", "Provider", "make_effects", "no_writes", "pass_time", "record_of"]

HOUR = timedelta(hours=1)


async def make_effects(
    engine: AsyncEngine, *, stale_after: timedelta = HOUR, metadata: MetaData | None = None, **options: Any
) -> Effects:
    """Effects on an engine, with their table made."""
    metadata = metadata if metadata is not None else MetaData()
    effects = Effects(metadata, stale_after=stale_after, sessionmaker=engine, **options)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    return effects


async def pass_time(effects: Effects, engine: AsyncEngine, by: timedelta) -> None:
    """Every stored time goes back by so much: to the records, time has passed."""
    times = [effects.table.c[name] for name in ("created_at", "updated_at", "expires_at")]
    if engine.dialect.name == "sqlite":
        modifier = f"{-by.total_seconds():+.3f} seconds"
        earlier: dict[Any, Any] = {
            time: func.strftime("%Y-%m-%d %H:%M:%f000", time, modifier) for time in times
        }
    else:
        earlier = {time: time - by for time in times}
    async with engine.begin() as connection:
        await connection.execute(update(effects.table).values(earlier))


@asynccontextmanager
async def no_writes(effects: Effects, engine: AsyncEngine) -> AsyncIterator[None]:
    """The table can be read but not written inside the block: writers wait until its end."""
    async with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            await connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            await connection.exec_driver_sql(f"LOCK TABLE {effects.table.name} IN EXCLUSIVE MODE")
        yield
        await connection.rollback()


async def record_of(effects: Effects, key: str) -> EffectRecord:
    """The record of a key that has one."""
    record = await effects.get(key)
    assert record is not None
    return record


class Provider:
    """The other side: charges a card at every request, and remembers by which token it was asked."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    async def charge(self, provider_token: str) -> dict[str, Any]:
        self.tokens.append(provider_token)
        return {"charge": len(self.tokens)}

    async def find(self, key: str, args: Any, *, provider_token: str) -> Any:
        """A verifier: the charge that was made with this token."""
        if provider_token in self.tokens:
            return {"charge": self.tokens.index(provider_token) + 1}
        return NOT_HAPPENED
