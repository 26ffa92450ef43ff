"""What was published is sent again, in the order of each key, after a broker has lost what it had."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import Event, Outbox
from oncely.testing import RecordingPublisher
from tests.outboxes import Sessions, drained, emit, execute, fail, flat, payloads, rows, states

pytestmark = pytest.mark.in_schema

LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


async def republish(outbox: Outbox, sessions: Sessions, **which: Any) -> int:
    async with sessions.begin() as session:
        return await outbox.republish(session, **({"since": LONG_AGO} | which))


async def test_republished_events_leave_again_with_their_ids(
    driver: str, outbox: Outbox, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit(outbox, sessions, 1, 2, key="k")
    before = await outbox.relay_once(sessions, publish)
    assert await republish(outbox, sessions) == 2
    assert await outbox.relay_once(sessions, publish) == before
    assert await outbox.relay_once(sessions, publish) == []


async def test_they_leave_before_later_events_of_their_key_also_over_many_batches(
    outbox: Outbox, sessions: Sessions
) -> None:
    numbers = list(range(25))
    await emit(outbox, sessions, *numbers, key="k")
    assert flat(await drained(outbox, sessions)) == numbers
    await emit(outbox, sessions, *range(25, 30), key="k")
    await republish(outbox, sessions)
    assert flat(await drained(outbox, sessions, batch=10)) == list(range(30))


async def test_they_leave_before_later_events_of_their_key_also_beside_many_that_were_due_before(
    outbox: Outbox, sessions: Sessions, engine: AsyncEngine
) -> None:
    await emit(outbox, sessions, "first", key="k")
    assert flat(await drained(outbox, sessions)) == ["first"]
    await emit(outbox, sessions, "second", key="k")
    await emit(outbox, sessions, *range(3), delay=timedelta(hours=1))
    await execute(engine, "UPDATE outbox SET due_at = due_at - interval '2 hours' WHERE due_at IS NOT NULL")
    await republish(outbox, sessions)
    assert flat(await drained(outbox, sessions, batch=2)) == ["first", "second", 0, 1, 2]


async def test_what_is_republished_in_turns_leaves_in_line(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher, engine: AsyncEngine
) -> None:
    for number in range(4):
        await emit(outbox, sessions, number, key="k")
        await outbox.relay_once(sessions, publish)
    [(middle,)] = await rows(engine, "SELECT published_at FROM outbox WHERE payload = '2'")
    await republish(outbox, sessions, since=middle)
    await republish(outbox, sessions, until=middle)
    assert flat(await drained(outbox, sessions, batch=1)) == [0, 1, 2, 3]


async def test_a_relay_that_has_gone_on_finds_them_although_they_lie_behind_its_floor(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher
) -> None:
    for number in range(5):
        await emit(outbox, sessions, number)
        await outbox.relay_once(sessions, publish)
    await republish(outbox, sessions)
    assert payloads(await outbox.relay_once(sessions, publish)) == [0, 1, 2, 3, 4]


async def test_only_what_was_published_in_that_time_and_topic_is_sent_again(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher, engine: AsyncEngine
) -> None:
    published: list[datetime] = []
    for payload, topic in ((1, "t"), (2, "t"), (3, "t"), (4, "other")):
        await emit(outbox, sessions, payload, topic=topic)
        await outbox.relay_once(sessions, publish)
        [(at,)] = await rows(engine, "SELECT max(published_at) FROM outbox")
        published.append(at)
    assert await republish(outbox, sessions, since=published[1], until=published[2]) == 1
    assert payloads(await outbox.relay_once(sessions, publish)) == [2]
    assert await republish(outbox, sessions, since=published[2], until=published[3], topic="t") == 1
    assert await republish(outbox, sessions, topic="nobody's") == 0
    assert payloads(await outbox.relay_once(sessions, publish)) == [3]


async def test_what_is_open_or_dead_is_left_alone(
    outbox: Outbox, sessions: Sessions, engine: AsyncEngine
) -> None:
    await emit(outbox, sessions, "dead", "tried")
    await fail(outbox, sessions, "dead", delay=None)
    await fail(outbox, sessions, "tried", delay=timedelta(hours=1))
    await emit(outbox, sessions, "open")
    before = await states(engine)
    assert await republish(outbox, sessions) == 0
    assert await states(engine) == before


async def test_an_event_that_was_tried_before_it_left_counts_its_tries_anew(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit(outbox, sessions, 1)
    await fail(outbox, sessions, 1, delay=timedelta(0))

    attempts: list[int] = []

    async def note(events: Sequence[Event]) -> None:
        attempts.extend(event.attempt for event in events)

    await outbox.relay_once(sessions, note)
    await republish(outbox, sessions)
    await outbox.relay_once(sessions, note)
    assert attempts == [2, 1]


async def test_a_time_without_a_zone_is_refused_before_any_sql(outbox: Outbox, sessions: Sessions) -> None:
    with pytest.raises(ValueError, match="since"):
        await republish(outbox, sessions, since=datetime(2026, 1, 1))  # noqa: DTZ001  that is the point


async def test_all_of_the_past_is_not_asked_for_by_leaving_the_time_out(
    outbox: Outbox, sessions: Sessions
) -> None:
    with pytest.raises(TypeError, match=r"^since must be a datetime, not NoneType$"):
        await republish(outbox, sessions, since=None)
