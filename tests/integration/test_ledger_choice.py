"""What a claim may take: fresh and tried events, held keys, a backlog, rows that somebody has locked."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb
from sqlalchemy import MetaData, event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import Outbox
from oncely.testing import RecordingPublisher
from tests.database import Database
from tests.outboxes import (
    Sessions,
    claim,
    drained,
    emit,
    execute,
    expire_claims,
    fail,
    flat,
    locked,
    payloads,
    rows,
)

HOUR = timedelta(hours=1)
AT_ONCE = timedelta(microseconds=1)

pytestmark = pytest.mark.in_schema


# --- who goes with whom


async def test_tried_events_go_alone_and_take_turns_with_fresh_ones(
    outbox: Outbox, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "tried 1", "tried 2", "tried 3")
    await fail(outbox, sessions, "tried 1", "tried 2", "tried 3", delay=AT_ONCE)
    await emit(outbox, sessions, *range(8))
    batches = await drained(Outbox(MetaData()), sessions, batch=3)
    assert [batch for batch in batches if len(batch) == 1] == [["tried 1"], ["tried 2"], ["tried 3"]]
    assert batches in (
        [["tried 1"], [0, 1, 2], ["tried 2"], [3, 4, 5], ["tried 3"], [6, 7]],
        [[0, 1, 2], ["tried 1"], [3, 4, 5], ["tried 2"], [6, 7], ["tried 3"]],
    )


async def test_an_empty_turn_passes_to_the_other_kind(outbox: Outbox, sessions: Sessions) -> None:
    publish = RecordingPublisher()
    await emit(outbox, sessions, "a", "b")
    await fail(outbox, sessions, "a", "b", delay=AT_ONCE)
    assert payloads(await outbox.relay_once(sessions, publish)) == ["a"]
    assert payloads(await outbox.relay_once(sessions, publish)) == ["b"]
    for number in range(3):
        await emit(outbox, sessions, number)
        assert payloads(await outbox.relay_once(sessions, publish)) == [number]


async def test_a_deferred_event_that_is_due_goes_with_the_fresh_ones_by_its_place(
    outbox: Outbox, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1)
    await emit(outbox, sessions, 2, 3, delay=AT_ONCE)
    await emit(outbox, sessions, 4)
    assert await drained(outbox, sessions, batch=3) == [[1, 2, 3], [4]]


async def test_a_tried_event_holds_its_key_and_no_other(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a1", "a2", key="a")
    await emit(outbox, sessions, "b1", key="b")
    await fail(outbox, sessions, "a1", delay=HOUR)
    await emit(outbox, sessions, "a3", key="a")
    await emit(outbox, sessions, "keyless")
    assert await drained(outbox, sessions) == [["b1", "keyless"]]
    await execute(engine, "UPDATE outbox SET due_at = statement_timestamp() WHERE attempts > 0")
    assert await drained(outbox, sessions) == [["a1"], ["a2", "a3"]]


async def test_a_tried_event_without_a_key_holds_nothing(outbox: Outbox, sessions: Sessions) -> None:
    await emit(outbox, sessions, 1)
    await fail(outbox, sessions, 1, delay=HOUR)
    await emit(outbox, sessions, 2)
    await emit(outbox, sessions, 3, key="")
    assert await drained(outbox, sessions) == [[2, 3]]


async def test_tried_events_of_one_key_go_by_place_and_not_by_when_they_are_due(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1, 2, 3, key="k")
    await fail(outbox, sessions, 1, 2, 3, delay=AT_ONCE)
    await execute(engine, "UPDATE outbox SET due_at = due_at - position * interval '1 hour'")
    assert await drained(outbox, sessions) == [[1], [2], [3]]


async def test_a_dead_event_lets_its_key_go_on(outbox: Outbox, sessions: Sessions) -> None:
    await emit(outbox, sessions, "a1", "a2", key="a")
    await fail(outbox, sessions, "a1", delay=None)
    assert await drained(outbox, sessions) == [["a2"]]


async def test_under_park_a_dead_event_holds_its_key_and_no_other(
    parking: Outbox, sessions: Sessions
) -> None:
    await emit(parking, sessions, "a1", "a2", key="a")
    await emit(parking, sessions, "none")
    await fail(parking, sessions, "a1", "none", delay=None)
    await emit(parking, sessions, "a3", key="a")
    await emit(parking, sessions, "b1", key="b")
    assert await drained(parking, sessions) == [["b1"]]
    async with sessions.begin() as session:
        assert await parking.replay(session) == 2
    assert sorted(await drained(parking, sessions)) == [["a1"], ["a2", "a3"], ["none"]]


async def test_under_park_a_replayed_event_waits_for_a_dead_one_before_it(
    parking: Outbox, outbox: Outbox, sessions: Sessions
) -> None:
    [_, second] = await emit(outbox, sessions, "a1", "a2", key="a")
    await fail(outbox, sessions, "a1", "a2", delay=None)  # dead before parking was asked for
    async with sessions.begin() as session:
        assert await parking.replay(session, ids=[second]) == 1
    assert await drained(parking, sessions) == []
    async with sessions.begin() as session:
        assert await parking.replay(session) == 1
    assert await drained(parking, sessions) == [["a1"], ["a2"]]


async def test_a_late_commit_with_an_earlier_place_is_not_lost(outbox: Outbox, sessions: Sessions) -> None:
    async with sessions() as late:
        await outbox.emit(late, "t", "late", key="k")
        await emit(outbox, sessions, *range(20), key="k")
        assert flat(await drained(outbox, sessions, batch=3)) == list(range(20))
        await late.commit()
    assert await drained(outbox, sessions) == [["late"]]


# --- a backlog that is passed by


async def test_events_behind_a_held_key_are_passed_by_and_leave_in_order_when_the_hold_ends(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "first", key="held")
    await fail(outbox, sessions, "first", delay=HOUR)
    for number in range(0, 60, 3):
        await emit(outbox, sessions, *range(number, number + 3), key="held")
        await emit(outbox, sessions, f"other {number}", key=f"k{number}")
        await outbox.relay_once(sessions, RecordingPublisher())
    floor = outbox.ledger._floor
    assert floor.floor < 5 < 60 < floor.detour
    assert floor.detour_keys == {"held"}
    await execute(engine, "UPDATE outbox SET due_at = statement_timestamp() WHERE attempts > 0")
    assert await drained(outbox, sessions, batch=25) == [
        ["first"],
        list(range(25)),
        list(range(25, 50)),
        list(range(50, 60)),
    ]


async def test_an_event_that_appears_inside_what_is_passed_by_is_not_passed_by(
    outbox: Outbox, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "first", key="held")
    await fail(outbox, sessions, "first", delay=HOUR)
    async with sessions() as late:
        await outbox.emit(late, "t", "late", key="k")
        for number in range(20):
            await emit(outbox, sessions, f"held {number}", key="held")
            await emit(outbox, sessions, number)
            await outbox.relay_once(sessions, RecordingPublisher())
        await late.commit()
    assert await drained(outbox, sessions) == [["late"]]


async def test_a_hold_that_ends_is_noticed_although_another_key_is_passed_by_since(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    for key in ("a", "b"):
        await emit(outbox, sessions, f"{key} first", key=key)
        await fail(outbox, sessions, f"{key} first", delay=HOUR)
        for number in range(5):
            await emit(outbox, sessions, f"{key} {number}", key=key)
            await emit(outbox, sessions, number)
            await outbox.relay_once(sessions, RecordingPublisher())
    assert outbox.ledger._floor.detour_keys == {"a", "b"}
    await execute(engine, "UPDATE outbox SET due_at = statement_timestamp() WHERE key = 'a' AND attempts > 0")
    assert await drained(outbox, sessions) == [["a first"], [f"a {number}" for number in range(5)]]


async def test_a_place_taken_while_a_claim_reaps_is_not_passed_by(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, database: Database
) -> None:
    """The claim has its transaction id by then: a writer's that is newer may still be older in line."""
    await emit(outbox, sessions, "of a dead relay")
    await claim(Outbox(MetaData()), sessions)
    assert await outbox.relay_once(sessions, RecordingPublisher()) == []  # the next turn is the fresh ones
    await expire_claims(engine)
    sql = (
        "INSERT INTO outbox (id, topic, payload) SELECT gen_random_uuid(), 't', %s"
        " WHERE pg_current_xact_id() IS NOT NULL"
    )
    with psycopg.connect(database.dsn()) as late, psycopg.connect(database.dsn(), autocommit=True) as other:

        def write(*arguments: Any) -> None:
            if "INSERT INTO outbox_claims" in arguments[2] and late.info.transaction_status == 0:
                late.execute(sql, [Jsonb("late")])
                other.execute(sql, [Jsonb("early")])

        event.listen(engine.sync_engine, "before_cursor_execute", write)
        await outbox.relay_once(sessions, RecordingPublisher())
        event.remove(engine.sync_engine, "before_cursor_execute", write)
        for number in range(6):
            await emit(outbox, sessions, number)
            await outbox.relay_once(sessions, RecordingPublisher())
        late.commit()
    assert flat(await drained(outbox, sessions))[-1] == "late"


# --- what is read of it


@pytest.mark.parametrize("count", [200, 201])
async def test_a_large_claim_has_all_its_events_in_line(
    outbox: Outbox, sessions: Sessions, count: int, driver: str
) -> None:
    """Of more than 200 they are read by a statement of their own."""
    await emit(outbox, sessions, *range(count), key="k", headers={"h": "v"})
    made = await claim(outbox, sessions, limit=1_000)
    assert [(event.payload, event.headers) for event in made.events] == [
        (number, {"h": "v"}) for number in range(count)
    ]


@pytest.mark.parametrize("deleted", [1, 201])
async def test_what_is_deleted_by_hand_while_it_is_claimed_is_not_published(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, database: Database, deleted: int, driver: str
) -> None:
    ids = await emit(outbox, sessions, *range(201), key="k")
    read = str(outbox.ledger._chooser._read.compile(engine.sync_engine)).split()

    def delete(*arguments: Any) -> None:
        if arguments[2].split() == read:
            with psycopg.connect(database.dsn(), autocommit=True) as other:
                other.execute("DELETE FROM outbox WHERE id = ANY (%s)", [ids[:deleted]])

    event.listen(engine.sync_engine, "before_cursor_execute", delete)
    try:
        assert flat(await drained(outbox, sessions, batch=1_000)) == list(range(deleted, 201))
    finally:
        event.remove(engine.sync_engine, "before_cursor_execute", delete)
    await emit(outbox, sessions, "later", key="k")
    assert flat(await drained(outbox, sessions)) == ["later"]


# --- rows that somebody has locked


async def test_a_claim_locks_nothing_where_nobody_else_has(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1, 2)
    assert payloads((await claim(outbox, sessions)).events) == [1, 2]
    assert await rows(engine, "SELECT DISTINCT xmax::text FROM outbox") == [("0",)]


async def test_a_locked_event_and_what_comes_after_it_in_its_key_stay_and_the_rest_goes(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a1", "a2", "a3", key="a")
    await emit(outbox, sessions, "b1", key="b")
    await emit(outbox, sessions, "x", "y")
    async with asyncio.timeout(10), locked(engine, "a2", "x"):
        assert await drained(outbox, sessions) == [["a1", "b1", "y"]]
    assert await drained(outbox, sessions) == [["a2", "a3", "x"]]


async def test_a_locked_event_that_is_let_go_is_sent_in_its_place(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, *range(10), key="k")
    await emit(outbox, sessions, "x")
    async with asyncio.timeout(10), locked(engine, 3):
        for number in range(20, 30):  # the floor may not pass it meanwhile
            await emit(outbox, sessions, number)
            await outbox.relay_once(sessions, RecordingPublisher())
    assert await drained(outbox, sessions) == [[3, 4, 5, 6, 7, 8, 9]]


@pytest.mark.parametrize("batch", [1, 2, 5])
async def test_more_locked_events_than_a_batch_do_not_stop_the_others(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, batch: int
) -> None:
    await emit(outbox, sessions, "x1", "x2", "x3", "x4", "x5", "x6")
    await emit(outbox, sessions, *(f"a{number}" for number in range(10)), key="a")
    await emit(outbox, sessions, "b1", "b2", key="b")
    async with asyncio.timeout(10), locked(engine, "x1", "x2", "x3", "x4", "x5", "x6", "a0"):
        assert flat(await drained(outbox, sessions, batch=batch)) == ["b1", "b2"]
        for number in range(10):  # the floor may not pass them meanwhile
            await emit(outbox, sessions, number)
            assert payloads(await outbox.relay_once(sessions, RecordingPublisher(), batch=batch)) == [number]
    expected = [f"x{number}" for number in range(1, 7)] + [f"a{number}" for number in range(10)]
    assert flat(await drained(outbox, sessions, batch=batch)) == expected


async def test_the_floor_does_not_pass_what_a_claim_looked_around(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "before", key="k")
    other = Outbox(MetaData())
    held = await claim(other, sessions)
    await emit(outbox, sessions, "x", key="k")
    for number in range(5):  # places beyond x are seen while nobody has it locked
        await emit(outbox, sessions, number)
        assert payloads(await outbox.relay_once(sessions, RecordingPublisher())) == [number]
    assert await other.ledger.settle(sessions, held)
    async with asyncio.timeout(10), locked(engine, "x"):
        await emit(outbox, sessions, 5)
        assert payloads(await outbox.relay_once(sessions, RecordingPublisher(), batch=1)) == [5]
    assert await drained(outbox, sessions) == [["x"]]


async def test_locked_tried_events_do_not_stop_the_fresh_ones(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    tried = [f"tried {number}" for number in range(10)]
    await emit(outbox, sessions, *tried)
    await fail(outbox, sessions, *tried, delay=AT_ONCE)
    async with asyncio.timeout(10), locked(engine, *tried[:9]):
        for number in range(4):
            await emit(outbox, sessions, number)
            left = payloads(await outbox.relay_once(sessions, RecordingPublisher()))
            assert left in ([number], ["tried 9"])
            if left != [number]:
                assert payloads(await outbox.relay_once(sessions, RecordingPublisher())) == [number]


async def test_an_event_that_a_foreign_key_refers_to_is_not_held_up_by_it(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    first, second = await emit(outbox, sessions, "a1", "a2", key="a")
    await execute(engine, "CREATE TABLE child (event_id uuid REFERENCES outbox)")
    other = Outbox(MetaData())
    async with asyncio.timeout(10), engine.connect() as referring:
        for event_id in (first, second):
            await referring.execute(text("INSERT INTO child VALUES (:id)"), {"id": event_id})
        await claim(outbox, sessions)
        await expire_claims(engine)
        assert await drained(other, sessions) == [["a1"], ["a2"]]


async def test_an_event_deleted_while_it_was_chosen_is_only_missing(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a1", "a2", key="a")
    await emit(outbox, sessions, "b1", key="b")
    async with locked(engine, "a1") as other:
        await other.execute(text("DELETE FROM outbox WHERE payload #>> '{}' = 'a1'"))
        assert await drained(outbox, sessions) == [["b1"]]
        await other.commit()
    assert await drained(outbox, sessions) == [["a2"]]
