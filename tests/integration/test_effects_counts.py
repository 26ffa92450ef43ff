"""Effects are counted by state, and what a purge would remove; on PostgreSQL and on SQLite."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import EffectFailed, Effects, Retention
from oncely.effects import EffectStats


@pytest.fixture
async def effects(any_engine: AsyncEngine) -> Effects:
    effects = Effects(metadata := MetaData(), stale_after=timedelta(seconds=30), sessionmaker=any_engine)
    async with any_engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    return effects


async def test_records_are_counted_by_state_and_a_stale_one_as_unknown(
    effects: Effects, any_engine: AsyncEngine
) -> None:
    assert await effects.stats() == EffectStats(0, 0, 0, 0)
    for key in ("pending", "stale"):
        assert await effects.claim(key, b"1" * 32) is not None
    async with any_engine.begin() as connection:
        await connection.execute(text("UPDATE effects SET expires_at = created_at WHERE key = 'stale'"))
    for key in ("done", "done too", "done three"):
        await effects.run(key, _done)
    with pytest.raises(RuntimeError):
        await effects.run("unknown", _fails)
    with pytest.raises(EffectFailed):
        await effects.run("failed", _declined)
    assert await effects.stats() == EffectStats(pending=1, unknown=2, failed=1, done=3)
    assert await effects.stats(at_most=1) == EffectStats(pending=1, unknown=1, failed=1, done=1)


async def test_as_many_records_as_are_purgeable_are_purged(effects: Effects) -> None:
    for key in ("one", "two"):
        await effects.run(key, _done)
    await effects.run("kept", _done, ttl=timedelta(days=1))
    with pytest.raises(RuntimeError):
        await effects.run("unknown", _fails)
    assert await effects.purgeable(timedelta(days=1)) == 0
    assert await effects.purgeable(0, at_most=1) == 1
    assert await effects.purgeable(0) == 2
    assert await effects.purge(0) == 2
    with pytest.raises(ValueError, match="only finished records are purged"):
        await effects.purgeable(0, ["unknown"])  # type: ignore[list-item]  # text is taken as well


async def test_retention_prunes_what_is_finished_and_nothing_in_doubt(
    effects: Effects, any_engine: AsyncEngine
) -> None:
    for key in ("one", "two"):
        await effects.run(key, _done)
    await effects.run("kept", _done, ttl=timedelta(days=1))
    with pytest.raises(RuntimeError):
        await effects.run("unknown", _fails)
    sessions = async_sessionmaker(any_engine)
    assert await Retention(sessions, {effects: timedelta(days=1)}).run_once() == {"effects": 0}
    one_by_one = Retention(sessions, {effects: timedelta(0)}, batch=1)
    assert [await one_by_one.run_once() for _ in range(3)] == [{"effects": 1}, {"effects": 1}, {"effects": 0}]
    assert await effects.stats() == EffectStats(pending=0, unknown=1, failed=0, done=1)


async def test_what_is_pruned_comes_back_when_the_transaction_is_rolled_back(
    effects: Effects, any_engine: AsyncEngine
) -> None:
    await effects.run("one", _done)
    async with async_sessionmaker(any_engine)() as session:
        assert await effects.prune(session, older_than=0) == 1
        await session.rollback()
    assert await effects.stats() == EffectStats(pending=0, unknown=0, failed=0, done=1)


async def _done(provider_token: str) -> object:
    return "done"


async def _fails(provider_token: str) -> object:
    raise RuntimeError("no answer")


async def _declined(provider_token: str) -> object:
    raise EffectFailed("declined")
