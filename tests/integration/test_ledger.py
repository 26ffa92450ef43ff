"""The ledger: what a claim may take, how it ends, and what becomes of it when its relay dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.types.json import Jsonb
from sqlalchemy import MetaData, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import Outbox
from oncely.ledger import Claim, Failure
from oncely.testing import RecordingPublisher
from tests.database import Database
from tests.outboxes import (
    LEASE,
    Sessions,
    claim,
    emit,
    execute,
    expire_claims,
    fail,
    locked,
    payloads,
    rows,
    states,
)
from tests.waiting import backend_waits, until

HOUR = timedelta(hours=1)
AT_ONCE = timedelta(microseconds=1)


@pytest.fixture
def database(schema: Database) -> Database:
    return schema


@pytest.fixture
async def parking(outbox: Outbox) -> Outbox:
    """The same tables, with dead events that hold back the later ones of their key."""
    return Outbox(MetaData(), on_dead="park")


async def drained(outbox: Outbox, sessions: Sessions, *, batch: int = 100) -> list[list[Any]]:
    """What one relay publishes, pass by pass, until two passes in a row find nothing."""
    publish, empty = RecordingPublisher(), 0
    while empty < 2:
        empty = 0 if await outbox.relay_once(sessions, publish, batch=batch) else empty + 1
    return [payloads(batch) for batch in publish.batches]


def flat(batches: list[list[Any]]) -> list[Any]:
    return [payload for batch in batches for payload in batch]


# --- claiming and settling


async def test_a_claim_has_its_events_a_token_and_nine_tenths_of_its_lease(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    ids = await emit(outbox, sessions, 1, 2, key="k")
    await emit(outbox, sessions, 3)
    before = time.monotonic()
    made = await claim(outbox, sessions, limit=10, lease=timedelta(seconds=20))
    assert payloads(made.events) == [1, 2, 3]
    assert before + 18 <= made.deadline <= time.monotonic() + 18
    [row] = await rows(
        engine,
        "SELECT token, event_ids, keys, low, claimed_by, expires_at - statement_timestamp()"
        " FROM outbox_claims",
    )
    token, event_ids, keys, low, claimed_by, left = row
    assert (token, event_ids[:2], keys, low) == (made.token, ids, ["k"], 1)
    assert claimed_by.split(":")[1].isdecimal()
    assert timedelta(seconds=15) < left <= timedelta(seconds=20)


async def test_without_anything_to_take_there_is_no_claim(outbox: Outbox, sessions: Sessions) -> None:
    assert await outbox.ledger.claim(sessions, limit=10, lease=LEASE) is None


async def test_what_is_claimed_is_not_claimed_again(outbox: Outbox, sessions: Sessions) -> None:
    await emit(outbox, sessions, 1, 2, 3)
    assert payloads((await claim(outbox, sessions, limit=2)).events) == [1, 2]
    assert payloads((await claim(outbox, sessions, limit=2)).events) == [3]
    assert await Outbox(MetaData()).ledger.claim(sessions, limit=2, lease=LEASE) is None


async def test_settling_says_what_became_of_each_event(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "sent", "failed", "dead", "untried", "dead untried", "neither")
    made = await claim(outbox, sessions)
    sent, failed, dead, untried, dead_untried, _ = (event.id for event in made.events)
    settled = await outbox.ledger.settle(
        sessions,
        made,
        published=[sent],
        failures=[
            Failure(failed, "ValueError: é\n", HOUR),
            Failure(dead, "Reject: no", None),
            Failure(untried, None, HOUR),
            Failure(dead_untried, None, None),
        ],
    )
    assert settled is True
    assert await states(engine) == {
        "sent": "published",
        "failed": "waiting, tried 1",
        "dead": "dead, tried 1",
        "untried": "waiting",
        "dead untried": "dead",
        "neither": "open",
    }
    assert dict(await rows(engine, "SELECT payload #>> '{}', last_error FROM outbox")) == {
        "sent": None,
        "failed": "ValueError: é\n",
        "dead": "Reject: no",
        "untried": None,
        "dead untried": None,
        "neither": None,
    }


async def test_settling_is_about_the_claims_own_events_only(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    [_, other] = await emit(outbox, sessions, "mine", "other")
    made = await claim(outbox, sessions, limit=1)
    assert await outbox.ledger.settle(
        sessions, made, published=[other], failures=[Failure(other, "no", HOUR), Failure(uuid4(), "no", HOUR)]
    )
    assert await states(engine) == {"mine": "open", "other": "open"}


@pytest.mark.parametrize("how", ["settle", "settle partly", "release", "renew"])
async def test_a_claim_that_has_ended_can_do_nothing_more(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, how: str
) -> None:
    await emit(outbox, sessions, 1)
    lost = await claim(outbox, sessions)
    await outbox.ledger.release(sessions, lost)
    others = await claim(Outbox(MetaData()), sessions)
    ledger = outbox.ledger
    if how == "settle":
        assert await ledger.settle(sessions, lost) is False
    elif how == "settle partly":
        failures = [Failure(others.events[0].id, "no", None)]
        assert await ledger.settle(sessions, lost, published=[], failures=failures) is False
    elif how == "release":
        assert await ledger.release(sessions, lost) is False
    else:
        assert await ledger.renew(sessions, lost, lease=LEASE) is None
    assert await states(engine) == {"1": "open, claimed"}


async def test_releasing_leaves_everything_as_it_was(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "ready")
    await emit(outbox, sessions, "was deferred", delay=AT_ONCE)
    asked = "SELECT id, position, due_at, attempts, last_error, published_at, dead_at FROM outbox ORDER BY 2"
    before = await rows(engine, asked)
    made = await claim(outbox, sessions)
    assert await outbox.ledger.release(sessions, made) is True
    assert await rows(engine, asked) == before
    assert payloads((await claim(outbox, sessions)).events) == ["ready", "was deferred"]


async def test_renewing_moves_the_end_of_the_lease(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1)
    made = await claim(outbox, sessions, lease=timedelta(milliseconds=1))
    before = time.monotonic()
    deadline = await outbox.ledger.renew(sessions, made, lease=timedelta(seconds=100))
    assert deadline is not None
    assert before + 90 <= deadline <= time.monotonic() + 90
    [(left,)] = await rows(engine, "SELECT expires_at - statement_timestamp() FROM outbox_claims")
    assert timedelta(seconds=95) < left <= timedelta(seconds=100)
    assert await Outbox(MetaData()).ledger.claim(sessions, limit=1, lease=LEASE) is None


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


# --- rows that somebody has locked


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


# --- dead relays


async def abandoned(outbox: Outbox, engine: AsyncEngine, sessions: Sessions, *, limit: int = 100) -> Claim:
    """A claim whose relay died with it, and its lease has ended."""
    made = await claim(outbox, sessions, limit=limit)
    await expire_claims(engine)
    return made


async def test_before_its_lease_has_ended_nobody_takes_over_a_dead_relays_batch(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1, 2)
    await claim(outbox, sessions, lease=timedelta(seconds=30))
    assert await drained(Outbox(MetaData()), sessions) == []


async def test_a_dead_relay_beside_a_live_one_is_the_only_one_taken_over(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "dead relay's", "live relay's")
    await claim(outbox, sessions, limit=1)
    await expire_claims(engine)
    live = Outbox(MetaData())
    async with locked(engine, "dead relay's"):  # it cannot be taken over by this claim already
        made = await claim(live, sessions, limit=1)
    assert await drained(outbox, sessions) == [["dead relay's"]]
    assert await states(engine) == {"dead relay's": "published, tried 1", "live relay's": "open, claimed"}
    assert await live.ledger.settle(sessions, made) is True


async def test_a_dead_relays_batch_is_taken_over_one_by_one_each_with_one_try_counted(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit(outbox, sessions, "a1", "a2", key="a")
    await emit(outbox, sessions, "x")
    await abandoned(outbox, engine, sessions)
    await emit(outbox, sessions, "a3", key="a")
    await emit(outbox, sessions, "y")
    other = Outbox(MetaData())
    assert payloads(await other.relay_once(sessions, publish)) in (["a1"], ["x"])
    assert {state for name, state in (await states(engine)).items() if name in ("a1", "a2", "x")} == {
        "published, tried 1",
        "open, tried 1",
    }
    errors = await rows(
        engine, "SELECT DISTINCT split_part(last_error, ':', 1) FROM outbox WHERE attempts > 0"
    )
    assert errors == [("ClaimExpired",)]
    assert [event.attempt for event in publish.events] == [2]
    taken_over = flat(await drained(other, sessions))
    assert taken_over.index("a2") < taken_over.index("a3")
    assert await states(engine) == {
        "a1": "published, tried 1",
        "a2": "published, tried 1",
        "x": "published, tried 1",
        "a3": "published",
        "y": "published",
    }


async def test_an_event_that_kills_whoever_publishes_it_is_counted_each_time(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "deadly", key="a")
    await emit(outbox, sessions, "neighbour", key="b")
    made = await abandoned(outbox, engine, sessions)
    assert [event.attempt for event in made.events] == [1, 1]
    attempts: dict[str, list[int]] = {"deadly": [], "neighbour": []}
    for _ in range(4):
        [event] = (await claim(outbox, sessions)).events
        attempts[event.payload].append(event.attempt)
        if event.payload == "neighbour":
            [(token,)] = await rows(engine, "SELECT token FROM outbox_claims")
            assert await outbox.ledger.settle(sessions, Claim(token, [event], 0.0))
        else:
            await expire_claims(engine)
    assert attempts == {"deadly": [2, 3, 4], "neighbour": [2]}


async def test_a_batch_of_one_is_a_try_of_that_event(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1)
    for tries in range(1, 4):
        await abandoned(outbox, engine, sessions, limit=1)
        [event] = (await claim(outbox, sessions, limit=1)).events
        assert event.attempt == tries + 1
        [(token,)] = await rows(engine, "SELECT token FROM outbox_claims")
        await outbox.ledger.release(sessions, Claim(token, [event], 0.0))


async def test_a_relay_that_settles_late_but_before_anybody_noticed_is_in_time(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1)
    made = await abandoned(outbox, engine, sessions)
    assert await outbox.ledger.settle(sessions, made) is True
    assert await states(engine) == {"1": "published"}


async def test_what_a_relay_had_settled_before_it_died_stays_so(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    """A claim row that was left behind by hand: its events are published or dead already."""
    [sent, dead] = await emit(outbox, sessions, "sent", "dead")
    made = await claim(outbox, sessions)
    await outbox.ledger.settle(sessions, made, published=[sent], failures=[Failure(dead, "no", None)])
    await execute(
        engine,
        "INSERT INTO outbox_claims (token, claimed_by, expires_at, event_ids, keys)"
        " VALUES (gen_random_uuid(), 'x:1', now() - interval '1 hour', ARRAY(SELECT id FROM outbox), '{}')",
    )
    assert await drained(outbox, sessions) == []
    assert await states(engine) == {"sent": "published", "dead": "dead, tried 1"}
    assert await rows(engine, "SELECT count(*) FROM outbox_claims") == [(0,)]


async def test_a_dead_relays_batch_waits_while_somebody_has_locked_one_of_its_events(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a1", "a2", key="a")
    await claim(outbox, sessions)
    await emit(outbox, sessions, "b1", key="b")
    await claim(outbox, sessions)
    await expire_claims(engine)
    await emit(outbox, sessions, "a3", key="a")
    async with asyncio.timeout(10), locked(engine, "a1"):
        assert await drained(outbox, sessions) == [["b1"]]
        assert (await states(engine))["a2"] == "open, claimed"
    assert await drained(outbox, sessions) == [["a1"], ["a2"], ["a3"]]


async def test_a_claim_that_is_being_settled_is_not_taken_over(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1)
    made = await abandoned(outbox, engine, sessions)
    async with locked(engine, 1):
        settling = asyncio.create_task(outbox.ledger.settle(sessions, made))
        await backend_waits(engine, "transactionid")  # it has deleted the claim, and is not done
        assert await drained(Outbox(MetaData()), sessions) == []
    assert await settling is True
    assert await states(engine) == {"1": "published"}


async def test_no_more_than_twenty_dead_relays_are_taken_over_at_once(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, *range(25))
    for _ in range(25):
        await claim(outbox, sessions, limit=1)
    await expire_claims(engine)
    await claim(outbox, sessions, limit=1)
    assert await rows(engine, "SELECT count(*) FROM outbox_claims WHERE expires_at < now()") == [(5,)]
    await claim(outbox, sessions, limit=1)
    assert await rows(engine, "SELECT count(*) FROM outbox_claims WHERE expires_at < now()") == [(0,)]


async def test_a_claim_is_seen_however_many_came_and_went_after_it(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "held", key="held")
    made = await claim(Outbox(MetaData()), sessions)
    await emit(outbox, sessions, "after", key="held")
    for number in range(10):
        await emit(outbox, sessions, number)
        assert payloads(await outbox.relay_once(sessions, RecordingPublisher())) == [number]
    assert await drained(outbox, sessions) == []
    await outbox.ledger.release(sessions, made)
    assert await drained(outbox, sessions) == [["held", "after"]]


# --- clocks


@pytest.mark.parametrize("skew", [3600, -3600])
async def test_a_relay_whose_clock_is_an_hour_off_claims_neither_early_nor_late(
    outbox: Outbox,
    engine: AsyncEngine,
    sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    skew: int,
) -> None:
    right, wrong = Outbox(MetaData()), Outbox(MetaData())
    await emit(outbox, sessions, "leased")
    await emit(outbox, sessions, "in half an hour", delay=timedelta(minutes=30))
    await emit(outbox, sessions, "tried", key="k")
    lease = timedelta(seconds=60)
    made = await claim(right, sessions, limit=1, lease=lease)
    await fail(right, sessions, "tried", delay=timedelta(minutes=30))
    with monkeypatch.context() as patched:
        real, real_nanoseconds = time.time, time.time_ns
        patched.setattr(time, "time", lambda: real() + skew)
        patched.setattr(time, "time_ns", lambda: real_nanoseconds() + skew * 10**9)
        assert abs(time.time() - real() - skew) < 1
        assert await drained(wrong, sessions) == []  # nothing is due yet, nobody's lease has ended
        await emit(wrong, sessions, "of the wrong clock")
        await emit(wrong, sessions, "delayed by the wrong clock", delay=timedelta(minutes=30))
        others = await claim(wrong, sessions, lease=lease)
        assert payloads(others.events) == ["of the wrong clock"]
        assert 53 < others.deadline - time.monotonic() <= 54
    left = "SELECT max(expires_at - statement_timestamp()), min(expires_at - statement_timestamp())"
    [(longest, shortest)] = await rows(engine, f"{left} FROM outbox_claims")
    assert timedelta(seconds=55) < shortest <= longest <= lease
    [(due,)] = await rows(
        engine, "SELECT due_at - statement_timestamp() FROM outbox WHERE payload #>> '{}' LIKE 'delayed%'"
    )
    assert timedelta(minutes=29) < due <= timedelta(minutes=30)
    assert await drained(right, sessions) == []
    assert await right.ledger.settle(sessions, made) is True
    assert await wrong.ledger.settle(sessions, others) is True


async def test_a_lease_counts_from_the_claim_and_not_from_when_it_began_to_wait(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1)
    lease = timedelta(milliseconds=300)
    async with engine.connect() as other:
        lock = "SELECT pg_advisory_xact_lock(1869505381, 'outbox_claims'::regclass::oid::int4)"
        await other.execute(text(lock))
        claiming = asyncio.create_task(claim(outbox, sessions, lease=lease))
        await backend_waits(engine, "advisory")
        await other.execute(text("SELECT pg_sleep(0.35)"))
        before = await other.scalar(text("SELECT clock_timestamp()"))
    made = await claiming
    [(expires_at,)] = await rows(engine, "SELECT expires_at FROM outbox_claims")
    assert expires_at >= before + lease
    # The relay itself counts from before it waited, so it stops too early rather than too late.
    assert made.deadline < time.monotonic()


async def test_an_event_is_due_by_the_clock_of_now_and_not_of_the_transactions_begin(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    """The claim waits for its turn in an open transaction; what became due meanwhile is due."""
    async with engine.connect() as other:
        lock = "SELECT pg_advisory_xact_lock(1869505381, 'outbox_claims'::regclass::oid::int4)"
        await other.execute(text(lock))
        await emit(outbox, sessions, 1, delay=timedelta(milliseconds=150))
        claiming = asyncio.create_task(claim(outbox, sessions))
        await backend_waits(engine, "advisory")
        await other.execute(text("SELECT pg_sleep(0.16)"))
    assert payloads((await claiming).events) == [1]


# --- many at once


async def test_claims_of_many_relays_at_once_never_overlap(
    outbox: Outbox, engines: Callable[..., AsyncEngine], sessions: Sessions
) -> None:
    theirs = async_sessionmaker(engines(pool_size=8))
    for key in ("k0", "k1", "k2", "k3", None):
        await emit(outbox, sessions, *(f"{key} {number}" for number in range(16)), key=key)
    taken: list[Any] = []
    at_work: set[str] = set()

    async def relay() -> None:
        mine = Outbox(MetaData())
        while len(taken) < 80:
            made = await mine.ledger.claim(theirs, limit=3, lease=LEASE)
            if made is None:
                continue
            keys = {event.key for event in made.events if event.key is not None}
            assert not keys & at_work
            at_work.update(keys)
            await asyncio.sleep(0.001)
            taken.extend(payloads(made.events))
            at_work.difference_update(keys)
            assert await mine.ledger.settle(theirs, made)

    await asyncio.gather(*(relay() for _ in range(8)))
    assert len(taken) == len(set(taken)) == 80


async def test_a_lost_claim_is_found_by_waiting_for_nothing_but_the_lease(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit(outbox, sessions, 1, key="k")
    await claim(outbox, sessions, lease=timedelta(milliseconds=50))
    other = Outbox(MetaData())

    async def taken_over() -> bool:
        return bool(await other.relay_once(sessions, publish))

    await until(taken_over)
    assert [event.attempt for event in publish.events] == [2]
