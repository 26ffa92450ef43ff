"""Effects when the database stands still, connections drop, callers give up and owners race."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import EffectFailed, EffectLost, EffectUnknown
from oncely.effects import Status
from tests.effects import HOUR, Provider, make_effects, no_writes, pass_time, record_of
from tests.waiting import until

pytestmark = pytest.mark.parametrize("any_database", ["asyncpg", "aiosqlite"], indirect=True)


def statement_begins(engine: AsyncEngine, word: str) -> asyncio.Event:
    """Set when a statement that begins with `word` is sent the next time."""
    begins = asyncio.Event()

    def look(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith(word):
            begins.set()

    event.listen(engine.sync_engine, "before_cursor_execute", look)
    return begins


async def never(provider_token: str) -> object:
    raise AssertionError("the call was made")


async def test_a_call_is_stopped_when_its_claim_cannot_be_extended_in_time(
    any_engine: AsyncEngine,
) -> None:
    stale_after = timedelta(seconds=0.6)
    effects = await make_effects(any_engine, stale_after=stale_after)
    loop, spans = asyncio.get_running_loop(), []

    async def call(provider_token: str) -> object:
        begun = loop.time()
        async with no_writes(effects, any_engine):
            try:
                return await asyncio.Event().wait()
            except asyncio.CancelledError:
                spans.append(loop.time() - begun)
                raise

    with pytest.raises(EffectLost):
        await effects.run("k", call)
    # At the end of the first claim: no extension got through.
    assert 0.3 < spans[0] < 5
    assert (await record_of(effects, "k")).status is Status.UNKNOWN


async def test_an_extension_that_was_held_up_past_the_lease_reports_the_loss(
    any_engine: AsyncEngine,
) -> None:
    effects = await make_effects(any_engine, stale_after=timedelta(seconds=0.3))
    token = await effects.claim("k", b"args")
    assert token is not None
    updating = statement_begins(any_engine, "UPDATE")
    async with no_writes(effects, any_engine):
        extending = asyncio.create_task(effects.extend("k", token, HOUR))
        await updating.wait()

        async def is_stale() -> bool:
            return (await record_of(effects, "k")).status is Status.UNKNOWN

        await until(is_stale)
    assert await extending is False
    assert (await record_of(effects, "k")).status is Status.UNKNOWN


async def test_an_extension_that_was_held_up_within_the_lease_counts(any_engine: AsyncEngine) -> None:
    effects = await make_effects(any_engine)
    token = await effects.claim("k", b"args")
    assert token is not None
    updating = statement_begins(any_engine, "UPDATE")
    async with no_writes(effects, any_engine):
        extending = asyncio.create_task(effects.extend("k", token, HOUR))
        await updating.wait()
    assert await extending is True


async def test_a_claim_that_came_too_late_is_given_back_without_a_call(any_engine: AsyncEngine) -> None:
    effects = await make_effects(any_engine, stale_after=timedelta(seconds=0.1))
    inserting = statement_begins(any_engine, "INSERT")
    async with no_writes(effects, any_engine):
        running = asyncio.create_task(effects.run("k", never))
        await inserting.wait()
        await asyncio.sleep(0.2)  # longer than the claim
    with pytest.raises(EffectLost):
        await running
    assert await effects.get("k") is None


async def test_a_run_cancelled_while_it_claims_leaves_nothing(any_engine: AsyncEngine) -> None:
    effects = await make_effects(any_engine)
    inserting = statement_begins(any_engine, "INSERT")
    async with no_writes(effects, any_engine):
        running = asyncio.create_task(effects.run("k", never))
        await inserting.wait()
        running.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await effects.get("k") is None


async def test_a_run_cancelled_while_it_takes_over_leaves_the_outcome_unknown(
    any_engine: AsyncEngine,
) -> None:
    effects, provider = await make_effects(any_engine), Provider()

    async def fails(provider_token: str) -> object:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await effects.run("k", fails)
    updating = statement_begins(any_engine, "UPDATE")
    async with no_writes(effects, any_engine):
        running = asyncio.create_task(effects.run("k", never, verify=provider.find))
        await updating.wait()
        running.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await record_of(effects, "k")).status is Status.UNKNOWN
    assert await effects.run("k", provider.charge, verify=provider.find) == {"charge": 1}


async def test_a_run_cancelled_while_it_records_the_result_has_it_recorded(any_engine: AsyncEngine) -> None:
    effects, provider = await make_effects(any_engine), Provider()
    charged = asyncio.Event()

    async def call(provider_token: str) -> object:
        charge = await provider.charge(provider_token)
        charged.set()
        await may_return.wait()
        return charge

    may_return = asyncio.Event()
    running = asyncio.create_task(effects.run("k", call))
    await charged.wait()
    updating = statement_begins(any_engine, "UPDATE")
    async with no_writes(effects, any_engine):
        may_return.set()
        await updating.wait()
        running.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await effects.run("k", never) == {"charge": 1}


async def test_when_the_end_cannot_be_recorded_the_outcome_is_unknown(any_engine: AsyncEngine) -> None:
    effects = await make_effects(any_engine)

    async def drop() -> None:
        async with any_engine.begin() as connection:
            await connection.run_sync(effects.table.metadata.drop_all)

    async def returns(provider_token: str) -> object:
        await drop()
        return 1

    async def fails(provider_token: str) -> object:
        await drop()
        raise EffectFailed("declined")

    async def breaks(provider_token: str) -> object:
        await drop()
        raise ConnectionResetError

    for call in (returns, fails):
        with pytest.raises(EffectUnknown) as caught:
            await effects.run("k", call)
        assert isinstance(caught.value.__cause__, DBAPIError)
        async with any_engine.begin() as connection:
            await connection.run_sync(effects.table.metadata.create_all)
    with pytest.raises(ConnectionResetError) as broken:
        await effects.run("k", breaks)
    assert len(broken.value.__notes__) == 1


async def test_an_extension_racing_a_takeover_leaves_one_owner_in_100_rounds(
    any_engine: AsyncEngine,
) -> None:
    effects = await make_effects(any_engine, stale_after=timedelta(milliseconds=40))
    chance = random.Random(7)

    async def round_of(key: str, pause: float) -> bool:
        token = await effects.claim(key, b"args")
        assert token is not None
        asked = asyncio.Event()

        async def own() -> bool:
            await asyncio.sleep(pause)
            try:
                return await effects.extend(key, token, HOUR)
            finally:
                asked.set()

        async def take() -> str | None:
            while True:
                over = asked.is_set()
                record = await record_of(effects, key)
                if record.status is Status.UNKNOWN:
                    return await effects.take(record, Status.PENDING)
                if over:
                    return None

        extended, taken = await asyncio.gather(own(), take())
        assert extended != (taken is not None)
        assert (await record_of(effects, key)).token == (taken or token)
        assert await effects.finish(key, token, Status.DONE) is extended
        return extended

    extended = 0
    for batch in range(20):
        pauses = [chance.uniform(0, 0.08) for _ in range(5)]
        rounds = await asyncio.gather(*(round_of(f"{batch}.{n}", pause) for n, pause in enumerate(pauses)))
        extended += sum(rounds)
    assert 0 < extended < 100


async def test_a_late_finish_racing_a_takeover_leaves_one_winner(any_engine: AsyncEngine) -> None:
    effects = await make_effects(any_engine)
    for round_number in range(50):
        key = f"k{round_number}"
        token = await effects.claim(key, b"args")
        assert token is not None
        await pass_time(effects, any_engine, HOUR)
        read = await record_of(effects, key)
        finished, *taken = await asyncio.gather(
            effects.finish(key, token, Status.DONE, result="the owner's"),
            effects.take(read, Status.DONE, result="a taker's"),
            effects.take(read, Status.PENDING),
        )
        assert [finished, *(bool(each) for each in taken)].count(True) == 1
        record = await record_of(effects, key)
        assert (record.result == "the owner's") == finished
        await effects.delete(key)


async def test_two_purges_at_once_share_the_work(any_engine: AsyncEngine) -> None:
    effects = await make_effects(any_engine)
    for number in range(40):
        token = await effects.claim(f"k{number}", b"args")
        assert token is not None
        if number % 4:
            await effects.finish(f"k{number}", token, Status.DONE)
    purged = await asyncio.gather(*(effects.purge(0, limit=10) for _ in range(6)))
    purged.append(await effects.purge(0))
    assert sum(purged) == 30
    assert len(await effects.records(list(Status))) == 10
