"""Effects over a wire that loses replies, is cut, or falls silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import EffectLost, EffectPending, EffectUnknown
from oncely.effects import Status, run
from tests.database import Database
from tests.effects import HOUR, Provider, make_effects, pass_time, record_of
from tests.waiting import until
from tests.wire import Wire


@pytest.fixture
async def far(wire: Wire, database: Database) -> AsyncIterator[AsyncEngine]:
    """An engine at the other end of the wire."""
    engine = Database(wire.url, database.schema).engine()
    yield engine
    await engine.dispose()


class Losing:
    """Loses the reply to the next commit of a statement that begins with a word."""

    def __init__(self, engine: AsyncEngine, wire: Wire) -> None:
        self._word: str | None = None
        self._armed = False
        self.lost = 0
        event.listen(engine.sync_engine, "before_cursor_execute", self._statement)
        event.listen(engine.sync_engine, "commit", self._commit)
        self._wire = wire

    def next_commit_of(self, word: str) -> None:
        self._word = word

    def _statement(self, connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        self._armed = self._word is not None and statement.startswith(self._word)

    def _commit(self, connection: Any) -> None:
        if self._armed:
            self._word, self._armed = None, False
            self.lost += 1
            self._wire.lose_next_reply()


async def never(provider_token: str) -> object:
    raise AssertionError("the call was made")


async def test_a_claim_whose_reply_was_lost_looks_like_a_lost_race(
    far: AsyncEngine, engine: AsyncEngine, wire: Wire, driver: str
) -> None:
    effects, provider = await make_effects(far), Provider()
    losing = Losing(far, wire)
    losing.next_commit_of("INSERT")
    with pytest.raises(EffectPending):
        await effects.run("k", never, verify=provider.find)
    assert losing.lost == 1
    await pass_time(effects, engine, HOUR)
    assert await effects.run("k", provider.charge, verify=provider.find) == {"charge": 1}
    assert len(provider.tokens) == 1


async def test_an_end_whose_reply_was_lost_is_recognised_as_ones_own(
    far: AsyncEngine, wire: Wire, driver: str
) -> None:
    effects, provider = await make_effects(far), Provider()
    losing = Losing(far, wire)

    async def call(provider_token: str) -> object:
        losing.next_commit_of("UPDATE")
        return await provider.charge(provider_token)

    assert await effects.run("k", call) == {"charge": 1}
    assert losing.lost == 1
    assert await effects.run("k", never) == {"charge": 1}


async def test_a_takeover_whose_reply_was_lost_makes_no_call(
    far: AsyncEngine, engine: AsyncEngine, wire: Wire, driver: str
) -> None:
    effects, provider = await make_effects(far), Provider()
    losing = Losing(far, wire)

    async def breaks(provider_token: str) -> object:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await effects.run("k", breaks)
    losing.next_commit_of("UPDATE")
    with pytest.raises(EffectPending):
        await effects.run("k", never, verify=provider.find)
    assert losing.lost == 1
    await pass_time(effects, engine, HOUR)
    assert await effects.run("k", provider.charge, verify=provider.find) == {"charge": 1}


async def test_what_a_verifier_found_is_kept_although_the_reply_was_lost(
    far: AsyncEngine, wire: Wire, driver: str
) -> None:
    effects, provider = await make_effects(far), Provider()
    losing = Losing(far, wire)

    async def charged_and_broke(provider_token: str) -> object:
        await provider.charge(provider_token)
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await effects.run("k", charged_and_broke)
    losing.next_commit_of("UPDATE")
    assert await effects.run("k", never, verify=provider.find) == {"charge": 1}
    assert losing.lost == 1


async def test_a_wire_that_is_cut_between_calls_is_tried_once_more(
    far: AsyncEngine, wire: Wire, driver: str
) -> None:
    effects, provider = await make_effects(far), Provider()

    async def call(provider_token: str) -> object:
        wire.cut()
        return await provider.charge(provider_token)

    assert await effects.run("k", call) == {"charge": 1}
    wire.cut()
    assert await effects.run("k", never) == {"charge": 1}


async def test_a_wire_that_is_cut_every_time_is_the_callers_error(
    far: AsyncEngine, engine: AsyncEngine, wire: Wire, driver: str
) -> None:
    effects = await make_effects(far)
    cuts = []

    def cut(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        cuts.append(statement)
        wire.cut()

    event.listen(far.sync_engine, "before_cursor_execute", cut)
    with pytest.raises(DBAPIError) as caught:
        await effects.run("k", never)
    assert caught.value.connection_invalidated
    assert len(cuts) == 2
    assert await effects.bind(engine).get("k") is None


async def test_an_end_that_cannot_be_recorded_for_cut_wires_is_unknown_to_its_caller(
    far: AsyncEngine, engine: AsyncEngine, wire: Wire, driver: str
) -> None:
    effects, provider = await make_effects(far), Provider()

    def cut(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        wire.cut()

    async def call(provider_token: str) -> object:
        event.listen(far.sync_engine, "before_cursor_execute", cut)
        return await provider.charge(provider_token)

    with pytest.raises(EffectUnknown) as caught:
        await effects.run("k", call)
    assert isinstance(caught.value.__cause__, DBAPIError)
    near = effects.bind(engine)
    assert (await record_of(near, "k")).status is Status.PENDING
    await pass_time(near, engine, HOUR)
    assert await near.run("k", never, verify=provider.find) == {"charge": 1}


async def test_a_call_is_stopped_in_time_when_the_database_falls_silent(
    far: AsyncEngine, engine: AsyncEngine, wire: Wire, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "PATIENCE", timedelta(seconds=0.3))
    stale_after = timedelta(seconds=0.9)
    effects = await make_effects(far, stale_after=stale_after)
    near, stopped = effects.bind(engine), []

    async def call(provider_token: str) -> object:
        wire.silence()
        try:
            return await asyncio.Event().wait()
        finally:
            stopped.append(True)

    async with asyncio.timeout(15):
        with pytest.raises(EffectLost) as caught:
            await effects.run("k", call)
    assert stopped == [True]
    assert len(caught.value.__notes__) == 1  # that it could not be written down
    assert (await record_of(near, "k")).status is Status.UNKNOWN


async def test_a_connection_that_fell_silent_does_not_cost_the_claim(
    far: AsyncEngine, engine: AsyncEngine, wire: Wire, driver: str
) -> None:
    effects = await make_effects(far, stale_after=timedelta(seconds=1.2))
    near = effects.bind(engine)

    async def call(provider_token: str) -> object:
        wire.silence()  # for good on what is connected now
        wire.restore()
        claimed = await record_of(near, "k")

        async def is_extended() -> bool:
            record = await record_of(near, "k")
            assert record.status is Status.PENDING
            return record.updated_at > claimed.updated_at

        await until(is_extended)
        return "held"

    assert await effects.run("k", call) == "held"
