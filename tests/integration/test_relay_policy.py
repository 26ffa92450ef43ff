"""What becomes of events that the relay could not publish, as the tables tell it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import Event, Outbox, PublishFailed, Reject, RelayResult
from oncely.backoff import Backoff
from oncely.testing import RecordingPublisher
from tests.outboxes import Sessions, emit, execute, expire_claims, payloads, rows, sent_sql, states
from tests.relays import Broker, hasty, running
from tests.waiting import until

pytestmark = pytest.mark.in_schema

LATER = Backoff(first=timedelta(hours=1), maximum=timedelta(hours=4), jitter=0)


async def test_a_pass_says_what_became_of_what_it_claimed(
    driver: str, outbox: Outbox, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a", "bad", "rejected", key=None)
    await emit(outbox, sessions, "bad too", "behind it", key="k")
    no = ValueError("no")
    broker = Broker(bad=no, rejected=Reject("never"), **{"bad too": no})
    relay = hasty(outbox, sessions, broker, retry=LATER)
    assert await relay.run_once() == RelayResult(published=1, failed=2, dead=1, released=1)
    assert await relay.run_once() == RelayResult()


async def test_a_failed_event_waits_on_the_databases_clock(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "bad")
    relay = hasty(outbox, sessions, Broker(bad=ValueError("no")), retry=LATER)
    await relay.run_once()
    waits = "SELECT round(extract(epoch FROM due_at - now()) / 3600), attempts, last_error FROM outbox"
    assert await rows(engine, waits) == [(1, 1, "ValueError: no")]
    await execute(engine, "UPDATE outbox SET due_at = now()")
    await relay.run_once()
    assert await rows(engine, waits) == [(2, 2, "ValueError: no")]


async def test_after_the_last_try_an_event_is_dead_and_can_be_replayed(
    driver: str, outbox: Outbox, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "bad")
    broker = Broker(bad=ValueError("no"))
    relay = hasty(outbox, sessions, broker, max_attempts=3)
    await drain(relay.run_once)
    assert broker.calls == [["bad"]] * 3
    async with sessions() as session, session.begin():
        [dead] = await outbox.dead(session)
        assert (dead.attempts, dead.error) == (3, "ValueError: no")
        assert await outbox.replay(session) == 1
    broker.faults.clear()
    assert await relay.run_once() == RelayResult(published=1)


async def test_an_outage_burns_no_attempt(outbox: Outbox, engine: AsyncEngine, sessions: Sessions) -> None:
    await emit(outbox, sessions, *"abc")
    broker = Broker()
    broker.away = ConnectionError("nobody is there")
    relay = hasty(outbox, sessions, broker, max_attempts=1)
    for _ in range(20):
        assert await relay.run_once() == RelayResult(released=3, outage=broker.away)
    assert await states(engine) == {"a": "open", "b": "open", "c": "open"}
    broker.away = None
    assert await relay.run_once() == RelayResult(published=3)


async def test_a_bad_event_that_looks_like_an_outage_does_not_stop_the_others_and_dies(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "bad", "also bad", *range(20))
    away = ConnectionError("its own server")
    broker = Broker(bad=away, **{"also bad": away})
    relay = hasty(outbox, sessions, broker, max_attempts=3)
    for number in range(30):
        await relay.run_once()
        await emit(outbox, sessions, f"fresh {number}")
    await relay.run_once()
    found = await states(engine)
    assert (found.pop("bad"), found.pop("also bad")) == ("dead, tried 3", "dead, tried 3")
    assert set(found.values()) == {"published"}


async def test_an_event_that_kills_the_process_is_published_alone_and_dies(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a", "deadly", "b")
    calls: list[list[Any]] = []
    killed: list[asyncio.Task[RelayResult]] = []

    async def live_or_die() -> RelayResult | None:
        """One pass of a new relay. One that does not survive it is stopped in its tracks; its lease ends."""
        died = asyncio.Event()

        async def publish(events: Sequence[Event]) -> None:
            calls.append(payloads(events))
            if "deadly" in calls[-1]:
                died.set()
                await asyncio.Event().wait()

        living = asyncio.create_task(hasty(outbox, sessions, publish, max_attempts=3).run_once())
        dying = asyncio.create_task(died.wait())
        await asyncio.wait({living, dying}, return_when=asyncio.FIRST_COMPLETED)
        if living.done():
            dying.cancel()
            return await living
        killed.append(living)
        await expire_claims(engine)
        return None

    while await live_or_die() != RelayResult():
        assert len(calls) < 10
    for relay in killed:
        relay.cancel()
    await asyncio.wait(killed)
    assert calls[0] == ["a", "deadly", "b"]
    assert sorted(calls[1:]) == [["a"], ["b"], ["deadly"], ["deadly"]]
    assert await states(engine) == {
        "a": "published, tried 1",
        "deadly": "dead, tried 3",
        "b": "published, tried 1",
    }
    async with sessions() as session:
        [dead] = await outbox.dead(session, error="ClaimExpired")
    assert dead.payload_json == '"deadly"'


async def test_retries_do_not_starve_fresh_events_nor_fresh_ones_retries(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    bad = [f"bad {number}" for number in range(40)]
    await emit(outbox, sessions, *bad)
    broker = Broker(**dict.fromkeys(bad, ValueError("no")))
    relay = hasty(outbox, sessions, broker, batch=50, max_attempts=1_000)
    await relay.run_once()  # all of them have failed, and are due again at once
    await emit(outbox, sessions, *range(500))
    broker.calls.clear()
    for _ in range(20):
        await relay.run_once()
    assert [len(call) for call in broker.calls] == [50, 1] * 10
    assert broker.received == list(range(500))
    assert len({call[0] for call in broker.calls if len(call) == 1}) == 10  # another one each time


async def test_an_event_goes_out_with_one_claim_and_one_settling_a_batch(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, *range(1_000))
    relay = hasty(outbox, sessions, RecordingPublisher(), batch=500)
    with sent_sql(engine) as sent:
        assert [(await relay.run_once()).published for _ in range(3)] == [500, 500, 0]
    kinds = ["".join(word for word in WORDS if word in sql) for sql in sent]
    choose, batch = ["pg_advisory_xact_lock", "INSERT INTO"], [_READ, "DELETE FROM"]
    first = ["pg_terminate_backend"]  # of one who stalls with the lock, for whoever has not had it yet
    assert kinds == [*first, *choose, *batch, *choose, *batch, *choose]


_READ = "WHERE id = ANY ((SELECT event_ids FROM outbox_claims"
WORDS = ("pg_terminate_backend", "pg_advisory_xact_lock", "INSERT INTO", _READ, "DELETE FROM")


async def test_no_time_of_this_machine_reaches_the_database(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "good", "bad")
    parameters: list[Any] = []

    def note(*arguments: Any) -> None:
        parameters.extend(arguments[3])

    event.listen(engine.sync_engine, "before_cursor_execute", note)
    relay = hasty(outbox, sessions, Broker(bad=ValueError("no")), retry=LATER)
    assert (await relay.run_once()).claimed == 2
    flat = [item for each in parameters for item in (each if isinstance(each, list) else [each])]
    assert not [item for item in flat if isinstance(item, (datetime, float))]
    assert any(isinstance(item, timedelta) for item in flat)


async def test_events_of_five_megabytes_and_of_unknown_shape_go_out_beside_their_neighbours(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a", "x" * 5_000_000, "spoilt", "b", headers={"h": "1"})
    spoil = "UPDATE outbox SET headers = '[1]' WHERE payload = '\"spoilt\"'"
    await execute(engine, spoil)

    async def publish(events: Sequence[Event]) -> None:
        failures = {event.id: TypeError("headers") for event in events if event.headers != {"h": "1"}}
        if failures:
            raise PublishFailed(dict(failures))

    relay = hasty(outbox, sessions, publish, retry=LATER)
    assert await relay.run_once() == RelayResult(published=3, failed=1)


async def test_it_works_on_while_a_migration_changes_the_table(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    broker = RecordingPublisher()
    relay = hasty(outbox, sessions, broker)
    changes = [
        "ALTER TABLE outbox ADD COLUMN tenant text DEFAULT 'x'",
        "DROP INDEX outbox_pending_idx",
        "CREATE INDEX outbox_pending_idx ON outbox (position) WHERE due_at IS NULL",
        "ALTER TABLE outbox ALTER COLUMN topic TYPE varchar(100)",
    ]
    async with running(relay):
        for number, change in enumerate(changes):
            await emit(outbox, sessions, number)
            await until(lambda: len(broker.events) == number + 1)  # noqa: B023  awaited at once
            await execute(engine, change)
        await emit(outbox, sessions, "last")
        await until(lambda: len(broker.events) == 5)
    assert payloads(broker.events) == [0, 1, 2, 3, "last"]


async def test_it_leaves_nothing_behind_on_a_connection_and_reads_named_columns(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    """So that it works through a pooler in transaction mode."""
    await emit(outbox, sessions, "good", "bad")
    relay = hasty(outbox, sessions, Broker(bad=ValueError("no")), listen=False)
    with sent_sql(engine) as sent:
        async with running(relay):
            await until(lambda: relay.last_success is not None and len(sent) > 20)
    assert [sql for sql in sent if sql.startswith(("SET", "LISTEN", "PREPARE", "DECLARE"))] == []
    assert [sql for sql in sent if "pg_advisory_lock" in sql or "set_config(name, value, false)" in sql] == []


async def drain(run_once: Callable[[], Any]) -> None:
    """Passes until there is nothing to claim, some milliseconds apart for what is retried."""

    async def nothing_left() -> bool:
        result: RelayResult = await run_once()
        return result == RelayResult()

    await until(nothing_left)
