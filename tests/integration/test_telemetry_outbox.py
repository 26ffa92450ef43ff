"""What an observer is told of an outbox and its relays, on a real PostgreSQL."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import ClaimLost as ClaimLostError
from oncely import Event, NewEvent, Outbox, PublisherUnavailable, PublishFailed, Reject, Relay
from oncely.backoff import Backoff
from oncely.telemetry import (
    BatchClaimed,
    BatchSettled,
    ClaimLost,
    EventDied,
    EventFailed,
    EventsEmitted,
    EventsPublished,
    EventsTakenOver,
    Outage,
)
from oncely.testing import RecordingObserver, RecordingPublisher
from tests.outboxes import Sessions, claim, claiming_is_held_up, emit, execute, expire_claims, sent_sql
from tests.telemetry import Recorder, records_made
from tests.waiting import backend_waits

pytestmark = pytest.mark.in_schema

NO_TIME = timedelta(0)
SECOND = timedelta(seconds=1)


@pytest.fixture
async def outbox(engine: AsyncEngine, metadata: MetaData, observer: Recorder) -> Outbox:
    outbox = Outbox(metadata, observer=observer)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    return outbox


def emitted(topic: str = "t", count: int = 1, repeated: int = 0) -> EventsEmitted:
    return EventsEmitted(outbox="outbox", topic=topic, count=count, repeated=repeated)


def claimed(events: int) -> BatchClaimed:
    return BatchClaimed(outbox="outbox", events=events, duration=NO_TIME)


def settled(*, published: int = 0, failed: int = 0, dead: int = 0, released: int = 0) -> BatchSettled:
    return BatchSettled(
        outbox="outbox", published=published, failed=failed, dead=dead, released=released, duration=NO_TIME
    )


async def test_an_event_is_told_after_the_commit(
    outbox: Outbox, sessions: Sessions, observer: Recorder
) -> None:
    async with sessions.begin() as session:
        await outbox.emit(session, "t", 1)
        assert observer.records == []
    assert observer.records == [emitted()]


@pytest.mark.parametrize("once", ["Relay.run_once", "Outbox.relay_once"])
async def test_the_time_of_a_claim_is_not_told_again_as_that_of_its_batch(
    engine: AsyncEngine, sessions: Sessions, once: str, outbox: Outbox
) -> None:
    told = RecordingObserver()
    watched, publish = Outbox(MetaData(), observer=told), RecordingPublisher()
    await emit(outbox, sessions, 1)
    begun = time.monotonic()
    async with claiming_is_held_up(engine) as claimer:
        relay = Relay(watched, sessions, publish)
        work: Any = relay.run_once() if once == "Relay.run_once" else watched.relay_once(sessions, publish)
        working = asyncio.create_task(work)
        await backend_waits(engine, "advisory")
        await asyncio.sleep(0.2)  # what a claim takes, when others are made before it
        await claimer.rollback()
        await working
    [first], [second] = told.of(BatchClaimed), told.of(BatchSettled)
    assert first.duration >= timedelta(seconds=0.2)
    assert first.duration + second.duration <= timedelta(seconds=time.monotonic() - begun)


async def test_an_event_that_is_rolled_back_is_not_told(
    outbox: Outbox, sessions: Sessions, observer: Recorder
) -> None:
    async with sessions() as session:
        await outbox.emit(session, "rolled back", 1)
        await session.rollback()
        await outbox.emit(session, "closed", 1)
        await session.close()
        await outbox.emit(session, "kept", 1)
        await session.commit()
        await session.commit()
    assert observer.records == [emitted("kept")]


async def test_a_savepoint_that_is_rolled_back_takes_what_was_emitted_in_it(
    outbox: Outbox, sessions: Sessions, observer: Recorder
) -> None:
    async with sessions.begin() as session:
        await outbox.emit(session, "before", 1)
        async with session.begin_nested():
            await outbox.emit(session, "released", 1)
        outer = await session.begin_nested()
        async with session.begin_nested():
            await outbox.emit(session, "released into what is rolled back", 1)
        await outer.rollback()
        await outbox.emit(session, "after", 1)
        assert observer.records == []
    assert observer.records == [emitted("before"), emitted("released"), emitted("after")]


async def test_an_event_whose_commit_fails_is_not_told(
    outbox: Outbox, sessions: Sessions, engine: AsyncEngine, observer: Recorder
) -> None:
    await execute(engine, "CREATE TABLE once (number integer UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    async with sessions() as session:
        await outbox.emit(session, "t", 1)
        await session.execute(text("INSERT INTO once VALUES (1), (1)"))
        with pytest.raises(IntegrityError):
            await session.commit()
    assert observer.records == []


async def test_on_a_bare_connection_an_event_is_told_at_the_statement(
    outbox: Outbox, engine: AsyncEngine, observer: Recorder
) -> None:
    async with engine.connect() as connection:
        await outbox.emit(connection, "t", 1)
        await connection.rollback()
    assert observer.records == [emitted()]


async def test_one_call_tells_of_each_topic_once_and_of_what_was_there_before(
    outbox: Outbox, sessions: Sessions, observer: Recorder
) -> None:
    await emit(outbox, sessions, 1, topic="a", dedup_key="d")
    async with sessions.begin() as session:
        new = [NewEvent("a", 1, dedup_key="d"), NewEvent("b", 2), NewEvent("a", 3), NewEvent("b", 4)]
        await outbox.emit_many(session, new)
        await outbox.emit(session, "a", 1, dedup_key="d")
    assert observer.records == [emitted("a"), emitted("a", 1, 1), emitted("b", 2), emitted("a", 0, 1)]


@pytest.mark.parametrize("by_relay", [True, False], ids=["Relay.run_once", "relay_once"])
async def test_a_batch_that_leaves(
    outbox: Outbox, sessions: Sessions, observer: Recorder, publish: RecordingPublisher, by_relay: bool
) -> None:
    await emit(outbox, sessions, 1, 2, topic="a")
    await emit(outbox, sessions, 3, topic="b")
    observer.records.clear()
    if by_relay:
        await Relay(outbox, sessions, publish).run_once()
    else:
        await outbox.relay_once(sessions, publish)
    assert observer.timeless == [
        claimed(3),
        EventsPublished(outbox="outbox", topic="a", count=2),
        EventsPublished(outbox="outbox", topic="b", count=1),
        settled(published=3),
    ]


async def test_a_pass_that_finds_nothing_tells_nothing(
    outbox: Outbox, sessions: Sessions, observer: Recorder, publish: RecordingPublisher
) -> None:
    await Relay(outbox, sessions, publish).run_once()
    await outbox.relay_once(sessions, publish)
    assert observer.records == []


async def test_failures_and_deaths_are_told_by_the_class_of_the_error_alone(
    outbox: Outbox, sessions: Sessions, observer: Recorder
) -> None:
    async def publish(events: Sequence[Event]) -> None:
        errors = {"bad": ValueError("secret: 4711"), "never": Reject("secret")}
        failures = {event.id: errors[event.topic] for event in events if event.topic in errors}
        raise PublishFailed(failures)

    for topic in ("good", "bad", "never"):
        await emit(outbox, sessions, 1, topic=topic)
    observer.records.clear()
    retry = Backoff(first=SECOND, maximum=SECOND, jitter=0)
    await Relay(outbox, sessions, publish, retry=retry).run_once()
    assert observer.timeless == [
        claimed(3),
        EventsPublished(outbox="outbox", topic="good", count=1),
        EventFailed(outbox="outbox", topic="bad", error="ValueError", attempt=1, retry_in=SECOND),
        EventDied(outbox="outbox", topic="never", error="Reject", attempts=1),
        settled(published=1, failed=1, dead=1),
    ]


async def test_an_event_whose_relays_all_died_is_told_with_the_claims_that_expired(
    outbox: Outbox, sessions: Sessions, engine: AsyncEngine, observer: Recorder, publish: RecordingPublisher
) -> None:
    await emit(outbox, sessions, 1)
    await execute(engine, "UPDATE outbox SET attempts = 3, due_at = statement_timestamp()")
    observer.records.clear()
    await Relay(outbox, sessions, publish, max_attempts=3).run_once()
    assert observer.timeless == [
        claimed(1),
        EventDied(outbox="outbox", topic="t", error="ClaimExpired", attempts=3),
        settled(dead=1),
    ]


async def test_events_of_a_relay_that_did_not_come_back_are_told(
    outbox: Outbox, sessions: Sessions, engine: AsyncEngine, observer: Recorder, publish: RecordingPublisher
) -> None:
    await emit(outbox, sessions, 1, 2)
    await claim(outbox, sessions)
    await expire_claims(engine)
    observer.records.clear()
    await Relay(outbox, sessions, publish).run_once()
    assert observer.timeless == [
        EventsTakenOver(outbox="outbox", count=2),
        claimed(1),
        EventsPublished(outbox="outbox", topic="t", count=1),
        settled(published=1),
    ]


async def test_a_lost_claim_is_told_and_nothing_of_it_is_told_as_published(
    outbox: Outbox, sessions: Sessions, engine: AsyncEngine, observer: Recorder
) -> None:
    async def publish_slowly(events: Sequence[Event]) -> None:
        await execute(engine, "DELETE FROM outbox_claims")

    await emit(outbox, sessions, 1, 2)
    observer.records.clear()
    await Relay(outbox, sessions, publish_slowly).run_once()
    with pytest.raises(ClaimLostError):
        await outbox.relay_once(sessions, publish_slowly)
    lost = ClaimLost(outbox="outbox", events=2)
    assert observer.timeless == [claimed(2), lost, claimed(2), lost]


async def test_a_part_that_left_before_a_failure_is_told_when_it_is_marked(
    outbox: Outbox, sessions: Sessions, observer: Recorder
) -> None:
    async def publish(events: Sequence[Event]) -> None:
        raise PublishFailed({events[1].id: ValueError("no")})

    await emit(outbox, sessions, 1, 2, 3)
    observer.records.clear()
    with pytest.raises(PublishFailed):
        await outbox.relay_once(sessions, publish)
    assert observer.timeless == [
        claimed(3),
        EventsPublished(outbox="outbox", topic="t", count=2),
        settled(published=2, released=1),
    ]


async def test_a_broker_that_is_away_is_told_at_each_try(
    outbox: Outbox, sessions: Sessions, observer: Recorder
) -> None:
    stop = asyncio.Event()

    async def publish(events: Sequence[Event]) -> None:
        if len(observer.of(Outage)) == 2:
            stop.set()
        raise PublisherUnavailable("redis://user:secret@host")

    await emit(outbox, sessions, 1)
    pause = timedelta(milliseconds=1)
    outage = Backoff(first=pause, maximum=pause, jitter=0)
    await Relay(outbox, sessions, publish, outage=outage, listen=False).run(stop)
    told = Outage(
        service="relay", name="outbox", waits_for="broker", error="PublisherUnavailable", retry_in=pause
    )
    assert observer.of(Outage) == [told] * 3


async def test_an_observer_that_raises_changes_nothing_and_is_logged_once_per_kind(
    engine: AsyncEngine, metadata: MetaData, sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(record: object) -> None:
        raise RuntimeError("no such metric")

    outbox = Outbox(metadata, observer=broken)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    publish = RecordingPublisher()
    with caplog.at_level(logging.INFO, "oncely.telemetry"):
        await emit(outbox, sessions, 1)
        await emit(outbox, sessions, 2)
        assert (await Relay(outbox, sessions, publish).run_once()).published == 2
    assert [event.payload for event in publish.events] == [1, 2]
    noted = [entry for entry in caplog.records if entry.name == "oncely.telemetry"]
    assert [(entry.levelname, entry.args) for entry in noted] == [
        ("ERROR", ("EventsEmitted",)),
        ("ERROR", ("BatchClaimed",)),
        ("ERROR", ("EventsPublished",)),
        ("ERROR", ("BatchSettled",)),
    ]
    assert all(entry.exc_info is not None for entry in noted)


async def test_without_an_observer_no_record_is_made_and_with_one_no_statement_is_added(
    engine: AsyncEngine, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(outbox: Outbox) -> list[str]:
        publish = RecordingPublisher()
        with sent_sql(engine) as sent:
            await emit(outbox, sessions, 1, 2)
            await emit(outbox, sessions, 3, dedup_key="d")
            await emit(outbox, sessions, 3, dedup_key="d")
            await outbox.relay_once(sessions, publish, batch=1)
            await Relay(outbox, sessions, publish).run_once()
        return [statement for statement in sent if "NOTIFY" not in statement and "pg_notify" not in statement]

    made = records_made(monkeypatch)
    plain, observed = MetaData(), MetaData()
    outboxes = [Outbox(plain), Outbox(observed, observer=Recorder())]
    async with engine.begin() as connection:
        await connection.run_sync(plain.create_all)
    without = await work(outboxes[0])
    assert made == []
    async with engine.begin() as connection:
        await connection.run_sync(plain.drop_all)
        await connection.run_sync(plain.create_all)
    assert await work(outboxes[1]) == without
    assert made != []
