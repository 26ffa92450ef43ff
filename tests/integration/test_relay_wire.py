"""The wire between relay and database is cut, loses an answer, or falls silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from oncely import Event, Outbox, RelayResult
from oncely.testing import RecordingPublisher
from tests.database import Database
from tests.outboxes import Sessions, emit, payloads, states
from tests.relays import hasty, running
from tests.waiting import until
from tests.wire import Wire

pytestmark = pytest.mark.in_schema

QUICK = {"database_timeout": timedelta(milliseconds=300), "lease": timedelta(seconds=20)}


@pytest.fixture
async def wired(database: Database, wire: Wire) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    """Sessions whose connections go over the wire; `sessions` and `engine` go past it."""
    engine = replace(database, url=wire.url).engine()
    yield async_sessionmaker(engine)
    wire.cut()  # or it would be waited for while it is silent
    await engine.dispose()


async def test_a_cut_between_publish_and_settle_is_mended_without_a_duplicate(
    driver: str, outbox: Outbox, wire: Wire, wired: Sessions, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a", "b")

    async def publish(events: Sequence[Event]) -> None:
        wire.cut()

    assert await hasty(outbox, wired, publish).run_once() == RelayResult(published=2)
    assert await states(engine) == {"a": "published", "b": "published"}


async def test_an_answer_to_the_settling_that_got_lost_is_no_lost_claim(
    driver: str, outbox: Outbox, wire: Wire, wired: Sessions, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a", "b")

    async def publish(events: Sequence[Event]) -> None:
        wire.lose_next_reply()

    assert await hasty(outbox, wired, publish).run_once() == RelayResult(published=2)
    assert await states(engine) == {"a": "published", "b": "published"}


async def test_a_claim_whose_answer_got_lost_is_given_back(
    driver: str, outbox: Outbox, wire: Wire, wired: Sessions, engine: AsyncEngine, sessions: Sessions
) -> None:
    publish = RecordingPublisher()
    relay = hasty(outbox, wired, publish, listen=False)
    await relay.run_once()
    await emit(outbox, sessions, "a", "b")
    wire.lose_reply_to(rb"(?<!READ )COMMIT")
    async with running(relay):
        await until(lambda: len(publish.events) == 2)
    assert [event.attempt for event in publish.events] == [1, 1]


async def test_a_database_that_fell_silent_is_noticed_and_found_again(
    driver: str, outbox: Outbox, wire: Wire, wired: Sessions, sessions: Sessions
) -> None:
    publish = RecordingPublisher()
    relay = hasty(outbox, wired, publish, **QUICK)
    async with running(relay):
        await emit(outbox, sessions, "before")
        await until(lambda: len(publish.events) == 1)
        wire.silence()
        await until(lambda: relay.waits_for == "database")
        await emit(outbox, sessions, "meanwhile")
        wire.restore()
        await until(lambda: len(publish.events) == 2)
    assert payloads(publish.events) == ["before", "meanwhile"]


async def test_a_relay_whose_database_is_away_for_longer_than_the_lease_has_lost_its_claim(
    driver: str, outbox: Outbox, wire: Wire, wired: Sessions, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a")
    cancelled = asyncio.Event()

    async def publish(events: Sequence[Event]) -> None:
        wire.silence()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    relay = hasty(
        outbox, wired, publish, database_timeout=timedelta(seconds=20), lease=timedelta(milliseconds=600)
    )
    assert await relay.run_once() == RelayResult(released=1, claim_lost=True)
    assert cancelled.is_set()
    assert await states(engine) == {"a": "open, claimed"}  # until its lease ends


async def test_a_settling_that_finds_no_database_for_a_lease_says_that_the_claim_is_lost(
    outbox: Outbox, wire: Wire, wired: Sessions, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a")

    async def publish(events: Sequence[Event]) -> None:
        wire.silence()

    quick = {"database_timeout": timedelta(seconds=1), "lease": timedelta(seconds=2)}
    assert await hasty(outbox, wired, publish, **quick).run_once() == RelayResult(released=1, claim_lost=True)
    wire.restore()
    publish_again = RecordingPublisher()
    async with running(hasty(outbox, sessions, publish_again)):
        await until(lambda: len(publish_again.events) == 1)
    assert await states(engine) == {"a": "published, tried 1"}


async def test_a_relay_stops_although_the_database_is_silent(
    driver: str, outbox: Outbox, wire: Wire, wired: Sessions, sessions: Sessions
) -> None:
    relay, stop = (
        hasty(outbox, wired, RecordingPublisher(), grace=timedelta(milliseconds=400)),
        asyncio.Event(),
    )
    work = asyncio.create_task(relay.run(stop))
    await until(lambda: relay.last_success is not None)
    wire.silence()
    stop.set()
    async with asyncio.timeout(10):
        await work
