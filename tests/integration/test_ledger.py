"""The ledger: what a claim is, how it ends, and whose clock it goes by."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import Outbox
from oncely.ledger import Failure
from oncely.testing import RecordingPublisher
from tests.outboxes import (
    LEASE,
    Sessions,
    claim,
    claiming_is_held_up,
    drained,
    emit,
    fail,
    payloads,
    rows,
    states,
)
from tests.waiting import backend_waits, until

pytestmark = pytest.mark.in_schema

HOUR = timedelta(hours=1)
AT_ONCE = timedelta(microseconds=1)


async def test_a_claim_has_its_events_a_token_and_nine_tenths_of_its_lease(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
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


async def test_a_claim_names_the_process_that_makes_it_also_after_a_fork(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    await emit(outbox, sessions, 1)
    monkeypatch.setattr("os.getpid", lambda: 4711)
    await claim(outbox, sessions)
    assert await rows(engine, "SELECT split_part(claimed_by, ':', 2) FROM outbox_claims") == [("4711",)]


async def test_without_anything_to_take_there_is_no_claim(outbox: Outbox, sessions: Sessions) -> None:
    assert await outbox.ledger.claim(sessions, limit=10, lease=LEASE) is None


async def test_what_is_claimed_is_not_claimed_again(outbox: Outbox, sessions: Sessions) -> None:
    await emit(outbox, sessions, 1, 2, 3)
    assert payloads((await claim(outbox, sessions, limit=2)).events) == [1, 2]
    assert payloads((await claim(outbox, sessions, limit=2)).events) == [3]
    assert await Outbox(MetaData()).ledger.claim(sessions, limit=2, lease=LEASE) is None


async def test_settling_says_what_became_of_each_event(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
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
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, how: str, driver: str
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
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
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
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
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
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    await emit(outbox, sessions, 1)
    lease = timedelta(milliseconds=300)
    async with claiming_is_held_up(engine) as other:
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
    async with claiming_is_held_up(engine) as other:
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
