"""What becomes of a batch whose relay died with it."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

import pytest
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import Outbox
from oncely.ledger import Claim, Failure
from oncely.testing import RecordingPublisher
from tests.outboxes import (
    Sessions,
    being_claimed,
    claim,
    drained,
    emit,
    execute,
    expire_claims,
    flat,
    locked,
    payloads,
    rows,
    states,
)
from tests.waiting import backend_waits

HOUR = timedelta(hours=1)
AT_ONCE = timedelta(microseconds=1)

pytestmark = pytest.mark.in_schema


async def abandoned(outbox: Outbox, engine: AsyncEngine, sessions: Sessions, *, limit: int = 100) -> Claim:
    """A claim whose relay died with it, and its lease has ended."""
    made = await claim(outbox, sessions, limit=limit)
    await expire_claims(engine)
    return made


async def lost_in_a_crash(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, *payloads: object
) -> list[UUID]:
    """The events of a claim that the server's crash took along while its relay lived."""
    await emit(outbox, sessions, *payloads)
    made = await claim(outbox, sessions)
    await execute(engine, "DELETE FROM outbox_claims")
    return [event.id for event in made.events]


async def test_before_its_lease_has_ended_nobody_takes_over_a_dead_relays_batch(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1, 2)
    await claim(outbox, sessions, lease=timedelta(seconds=30))
    assert await drained(Outbox(MetaData()), sessions) == []


async def test_what_was_sent_under_a_claim_that_a_crash_took_along_is_marked_without_it(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    ids = await lost_in_a_crash(outbox, engine, sessions, 1, 2)
    assert await outbox.ledger.rescue(sessions, ids) is True
    assert await rows(engine, "SELECT count(*) FROM outbox WHERE published_at IS NOT NULL") == [(2,)]
    assert await outbox.ledger.rescue(sessions, ids) is True


async def test_what_another_relay_has_taken_over_meanwhile_is_not_marked(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    ids = await lost_in_a_crash(outbox, engine, sessions, "claimed anew", "tried")
    await execute(
        engine,
        "UPDATE outbox SET attempts = 1, due_at = now() + interval '1 hour' WHERE payload = '\"tried\"'",
    )
    await claim(Outbox(MetaData()), sessions)
    assert await outbox.ledger.rescue(sessions, ids) is False
    assert await rows(engine, "SELECT count(*) FROM outbox WHERE published_at IS NOT NULL") == [(0,)]


async def test_what_somebody_has_locked_is_not_marked_nor_waited_for(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    """No claim can be made meanwhile: they would all wait for whoever has the lock."""
    ids = await lost_in_a_crash(outbox, engine, sessions, 1, 2)
    async with asyncio.timeout(10), locked(engine, 2):
        assert await outbox.ledger.rescue(sessions, ids) is False
    assert await states(engine) == {"1": "published", "2": "open"}


async def test_what_another_relay_is_taking_over_just_now_is_not_marked(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    ids = await lost_in_a_crash(outbox, engine, sessions, 1)
    async with sessions() as claimer:
        assert payloads(await being_claimed(Outbox(MetaData()), claimer)) == [1]
        rescuing = asyncio.create_task(outbox.ledger.rescue(sessions, ids))
        await backend_waits(engine, "advisory")
        await claimer.commit()
    assert await rescuing is False
    assert await rows(engine, "SELECT count(*) FROM outbox WHERE published_at IS NOT NULL") == [(0,)]


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
