"""Dead letters: what an operator sees of dead events, sends again, or throws away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import Event, Outbox
from oncely.ledger import Failure
from oncely.outbox import DeadEvent
from oncely.testing import RecordingPublisher
from tests.outboxes import Sessions, claim, emit, execute, fail, locked, payloads, rows, sent_sql, states

pytestmark = pytest.mark.in_schema

HOUR = timedelta(hours=1)


async def die(
    outbox: Outbox, sessions: Sessions, *names: str, error: str = "ValueError: no", **f: Any
) -> Any:
    """Dead events with these payloads; their ids."""
    ids = await emit(outbox, sessions, *names, **f)
    await fail(outbox, sessions, *names, error=error, delay=None)
    return ids


async def dead(outbox: Outbox, sessions: Sessions, **which: Any) -> list[str]:
    async with sessions() as session:
        return [str(event.payload_json).strip('"') for event in await outbox.dead(session, **which)]


async def replay(outbox: Outbox, sessions: Sessions, **which: Any) -> int:
    async with sessions.begin() as session:
        return await outbox.replay(session, **which)


async def discard(outbox: Outbox, sessions: Sessions, **which: Any) -> int:
    async with sessions.begin() as session:
        return await outbox.discard(session, **which)


async def six(outbox: Outbox, engine: AsyncEngine, sessions: Sessions) -> dict[str, UUID]:
    """Six dead events of two topics and three errors, which died an hour after one another, and others."""
    ids: dict[str, UUID] = {}
    for number, (topic, error) in enumerate(
        [
            ("a", "ValueError: no"),
            ("b", "ValueError: no: and more"),
            ("a", "ValueErrors: no"),
            ("b", "Reject"),
            ("a", "Reject: 'x'"),
            ("b", "ValueError"),
        ]
    ):
        name = f"d{number}"
        [ids[name]] = await die(outbox, sessions, name, topic=topic, error=error)
        await execute(
            engine,
            "UPDATE outbox SET dead_at = CAST('2026-03-01 00:00+00' AS timestamptz) + :hours * interval '1 h'"
            " WHERE id = :id",
            hours=number,
            id=ids[name],
        )
    await emit(outbox, sessions, "failed", topic="a")
    await fail(outbox, sessions, "failed", delay=HOUR)
    await emit(outbox, sessions, "ready", topic="a")
    return ids


def at(hour: int) -> datetime:
    return datetime(2026, 3, 1, hour, tzinfo=UTC)


CHOICES: list[tuple[dict[str, Any], str]] = [
    ({}, "012345"),
    ({"topic": "a"}, "024"),
    ({"topic": "c"}, ""),
    ({"error": "ValueError"}, "015"),
    ({"error": "Reject"}, "34"),
    ({"error": "Value"}, ""),
    ({"error": "ValueError: no"}, ""),
    ({"since": at(2)}, "2345"),
    ({"until": at(2)}, "01"),
    ({"since": at(1), "until": at(4)}, "123"),
    ({"topic": "b", "error": "ValueError", "since": at(1)}, "15"),
    ({"limit": 2}, "01"),
    ({"topic": "b", "limit": 2}, "13"),
]


@pytest.mark.parametrize(("which", "chosen"), CHOICES, ids=str)
async def test_the_same_choice_lists_replays_and_discards_the_same_events(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, which: dict[str, Any], chosen: str
) -> None:
    await six(outbox, engine, sessions)
    names = [f"d{number}" for number in chosen]
    rest = [f"d{number}" for number in "012345" if number not in chosen]
    assert await dead(outbox, sessions, **which) == names
    async with sessions() as session:
        assert await outbox.discard(session, **which) == len(names)
        assert [event.payload_json.strip('"') for event in await outbox.dead(session)] == rest
        await session.rollback()
    assert await replay(outbox, sessions, **which) == len(names)
    assert await dead(outbox, sessions) == rest
    others = await rows(engine, "SELECT payload #>> '{}', attempts FROM outbox WHERE dead_at IS NULL")
    assert set(others) == {(name, 1) for name in names} | {("failed", 1), ("ready", 0)}


async def test_every_choice_works_on_either_driver(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    ids = await six(outbox, engine, sessions)
    which: dict[str, Any] = {"topic": "a", "error": "Reject", "since": at(0), "until": at(9), "limit": 5}
    assert await dead(outbox, sessions, **which) == ["d4"]
    assert await discard(outbox, sessions, ids=ids.values(), **which) == 1
    assert await replay(outbox, sessions, ids=[ids["d1"], ids["d3"]]) == 2
    assert await dead(outbox, sessions) == ["d0", "d2", "d5"]


async def test_ids_choose_dead_events_only(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    ids = await six(outbox, engine, sessions)
    [alive] = await emit(outbox, sessions, "alive")
    before = await states(engine)
    for choice in ([], [alive], [uuid4()]):
        assert await replay(outbox, sessions, ids=choice) == 0
        assert await discard(outbox, sessions, ids=choice) == 0
    assert await states(engine) == before
    assert await discard(outbox, sessions, ids=(ids[name] for name in ("d1", "d5"))) == 2
    assert await dead(outbox, sessions) == ["d0", "d2", "d3", "d4"]


async def test_a_dead_event_is_seen_with_all_that_is_known_of_it(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    [event_id] = await emit(outbox, sessions, {"n": 1}, topic="order.paid", key="c-1")
    for tries in range(2):
        made = await claim(outbox, sessions)
        delay = None if tries else timedelta(microseconds=1)
        await outbox.ledger.settle(
            sessions, made, published=[], failures=[Failure(event_id, f"ValueError: {tries}", delay)]
        )
    [(created_at, dead_at)] = await rows(engine, "SELECT created_at, dead_at FROM outbox")
    async with sessions() as session:
        assert await outbox.dead(session) == [
            DeadEvent(
                id=event_id,
                topic="order.paid",
                key="c-1",
                payload_json='{"n": 1}',
                attempts=2,
                error="ValueError: 1",
                created_at=created_at,
                dead_at=dead_at,
            )
        ]


async def test_the_list_is_a_hundred_long_unless_asked(outbox: Outbox, sessions: Sessions) -> None:
    await die(outbox, sessions, *(f"d{number:03}" for number in range(120)))
    assert await dead(outbox, sessions) == [f"d{number:03}" for number in range(100)]
    assert len(await dead(outbox, sessions, limit=1_000)) == 120


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ({"since": datetime(2026, 1, 1)}, "since is a time without a time zone"),  # noqa: DTZ001
        ({"until": datetime(2026, 1, 1)}, "until is a time without a time zone"),  # noqa: DTZ001
        ({"limit": 0}, "limit must be 1 or more, not 0"),
    ],
)
async def test_a_choice_that_makes_no_sense_is_refused_before_any_sql(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, which: dict[str, Any], message: str
) -> None:
    async with sessions() as session:
        with sent_sql(engine) as sent:
            for act in (outbox.dead, outbox.replay, outbox.discard):
                with pytest.raises(ValueError) as raised:
                    await act(session, **which)
                assert str(raised.value) == message
        assert sent == []


# --- replaying


async def test_a_replayed_event_has_its_id_and_place_and_counts_one_try(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher, driver: str
) -> None:
    [first, second] = await die(outbox, sessions, "a1", "a2", key="a")
    await emit(outbox, sessions, "a3", key="a")
    assert await replay(outbox, sessions) == 2
    assert await states(engine) == {"a1": "open, tried 1", "a2": "open, tried 1", "a3": "open"}
    while await outbox.relay_once(sessions, publish):
        pass
    assert [(event.id, event.payload, event.attempt) for event in publish.events[:2]] == [
        (first, "a1", 2),
        (second, "a2", 2),
    ]
    assert payloads(publish.events) == ["a1", "a2", "a3"]


async def test_a_replayed_event_may_die_again(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await die(outbox, sessions, "a")
    for deaths in range(2, 5):
        assert await replay(outbox, sessions) == 1
        await fail(outbox, sessions, "a", delay=None, error=f"Reject: {deaths}")
        assert await states(engine) == {"a": "dead, tried 2"}
        assert await dead(outbox, sessions, error="Reject") == ["a"]


async def test_under_park_followers_leave_after_the_replayed_event_and_in_order(
    parking: Outbox, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit(parking, sessions, "a1", "a2", "a3", key="a")
    await fail(parking, sessions, "a1", delay=None)
    await emit(parking, sessions, "a4", key="a")
    assert await parking.relay_once(sessions, publish) == []
    assert await replay(parking, sessions) == 1
    while await parking.relay_once(sessions, publish):
        pass
    assert payloads(publish.events) == ["a1", "a2", "a3", "a4"]


async def test_under_park_followers_leave_when_the_dead_event_is_discarded(
    parking: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit(parking, sessions, "a1", "a2", key="a")
    await fail(parking, sessions, "a1", delay=None)
    assert await parking.relay_once(sessions, publish) == []
    assert await discard(parking, sessions) == 1
    assert payloads(await parking.relay_once(sessions, publish)) == ["a2"]
    assert await states(engine) == {"a2": "published"}


async def test_it_is_the_callers_transaction(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await die(outbox, sessions, "a", "b")
    async with sessions() as session:
        assert await outbox.replay(session, limit=1) == 1
        assert await outbox.discard(session) == 1
        assert await outbox.relay_once(sessions, publish) == []
        await session.rollback()
    assert await states(engine) == {"a": "dead, tried 1", "b": "dead, tried 1"}


# --- beside others


async def test_what_somebody_has_locked_is_passed_over(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await die(outbox, sessions, "a", "b", "c")
    async with asyncio.timeout(10), locked(engine, "b"):
        assert await replay(outbox, sessions, limit=2) == 2
        assert await discard(outbox, sessions) == 0
    assert await states(engine) == {"a": "open, tried 1", "b": "dead, tried 1", "c": "open, tried 1"}


async def test_operators_and_relays_at_once_neither_lose_nor_repeat_an_event(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    numbers = [str(number) for number in range(60)]
    await die(outbox, sessions, *numbers)
    left: list[str] = []
    discarded = replayed = 0

    async def publish(events: Sequence[Event]) -> None:
        await asyncio.sleep(0)
        left.extend(payloads(events))

    async def relay() -> None:
        mine = Outbox(MetaData())
        while len(left) + discarded < len(numbers):
            await mine.relay_once(sessions, publish)

    async def operate() -> None:
        nonlocal discarded, replayed
        while discarded + replayed < len(numbers):
            count = await replay(outbox, sessions, limit=5)  # `+= await` would add to an old sum
            replayed += count
            count = await discard(outbox, sessions, limit=2)
            discarded += count

    await asyncio.gather(relay(), relay(), operate(), operate())
    assert len(left) == len(set(left)) == replayed
    assert replayed + discarded == len(numbers)
    assert sorted(await states(engine)) == sorted(left)
