"""A relay at work: how it stops, keeps its claim, loses it, and waits for what is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import anyio
import pytest
from sqlalchemy import MetaData, event
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
from sqlalchemy.pool import NullPool

from oncely import Event, Outbox, Relay, RelayResult, TablesMissing
from oncely.testing import RecordingPublisher
from tests.database import Database
from tests.outboxes import Gate, Sessions, claiming_is_held_up, claims, emit, execute, payloads, rows, states
from tests.relays import Broker, hasty, running
from tests.waiting import backend_waits, until

pytestmark = pytest.mark.in_schema

SHORT = timedelta(milliseconds=60)
LEASE = timedelta(milliseconds=600)


async def test_it_moves_everything_and_stops_when_told(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, *range(25))
    publish = RecordingPublisher()
    async with running(hasty(outbox, sessions, publish, batch=10)):
        await until(lambda: len(publish.events) == 25)
    assert payloads(publish.events) == list(range(25))
    assert await claims(engine) == 0


async def test_an_idle_relay_stops_at_once(outbox: Outbox, sessions: Sessions) -> None:
    relay, stop = (
        Relay(outbox, sessions, RecordingPublisher(), poll_interval=timedelta(hours=1)),
        asyncio.Event(),
    )
    work = asyncio.create_task(relay.run(stop))
    await until(lambda: relay.last_success is not None)
    stop.set()
    async with asyncio.timeout(5):
        await work


async def test_a_stop_lets_what_is_in_flight_finish_and_claims_nothing_more(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a", "b")
    gate, stop = Gate(), asyncio.Event()
    work = asyncio.create_task(hasty(outbox, sessions, gate, batch=1).run(stop))
    await gate.entered.wait()
    stop.set()
    gate.opened.set()
    await work
    assert await states(engine) == {"a": "published", "b": "open"}
    assert await claims(engine) == 0


async def test_what_outlives_the_grace_period_is_given_back_unburnt(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a", "b", key="k")
    gate, stop = Gate(), asyncio.Event()
    work = asyncio.create_task(hasty(outbox, sessions, gate, grace=SHORT * 10).run(stop))
    await gate.entered.wait()
    stop.set()
    await work
    assert await states(engine) == {"a": "open", "b": "open"}
    publish = RecordingPublisher()
    assert await hasty(outbox, sessions, publish).run_once() == RelayResult(published=2)
    assert [event.attempt for event in publish.events] == [1, 1]


async def test_cancelled_it_gives_back_what_is_in_flight(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a")
    gate = Gate()
    work = asyncio.create_task(hasty(outbox, sessions, gate).run())
    await gate.entered.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert await states(engine) == {"a": "open"}
    assert await claims(engine) == 0


@pytest.mark.parametrize("once", [False, True])
async def test_cancelled_again_and_again_it_still_gives_back_and_leaves_nothing_running(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, once: bool
) -> None:
    await emit(outbox, sessions, "a")
    entered, ended = asyncio.Event(), []

    async def publish(events: Sequence[Event]) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.02)
            ended.append(True)

    relay, before = hasty(outbox, sessions, publish), asyncio.all_tasks()

    async def work() -> None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await (relay.run_once() if once else relay.run())

    scopes: list[anyio.CancelScope] = []
    task = asyncio.create_task(work())
    await entered.wait()
    scopes[0].cancel()
    await task
    assert ended == [True]
    assert asyncio.all_tasks() <= before
    assert await states(engine) == {"a": "open"}
    assert await claims(engine) == 0


async def test_cancelled_one_by_one_it_marks_what_has_left(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a", "b", "c")
    hanging = asyncio.Event()

    async def publish(events: Sequence[Event]) -> None:
        if len(events) > 1:
            raise ValueError("one of them")
        if events[0].payload == "b":
            hanging.set()
            await asyncio.Event().wait()

    work = asyncio.create_task(hasty(outbox, sessions, publish).run())
    await hanging.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert await states(engine) == {"a": "published", "b": "open", "c": "open"}


@pytest.mark.parametrize("waiting", [["a"], []], ids=["an event", "nothing"])
@pytest.mark.parametrize("once", ["Relay.run_once", "Outbox.relay_once"])
async def test_cancelled_while_it_claims_it_keeps_no_claim(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions, waiting: list[str], once: str
) -> None:
    publish = RecordingPublisher()
    if waiting:
        await emit(outbox, sessions, *waiting)
    async with claiming_is_held_up(engine) as gate:
        of_relay = once == "Relay.run_once"
        claiming: Any = (
            hasty(outbox, sessions, publish).run_once() if of_relay else outbox.relay_once(sessions, publish)
        )
        work = asyncio.create_task(claiming)
        await backend_waits(engine, "advisory")
        work.cancel()
        await gate.rollback()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert await claims(engine) == 0
    assert await states(engine) == dict.fromkeys(waiting, "open")
    assert publish.events == []


async def test_a_publisher_that_does_not_heed_a_cancellation_holds_up_no_stop(
    outbox: Outbox, sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    await emit(outbox, sessions, "a")
    entered, at_last = asyncio.Event(), asyncio.Event()

    async def publish(events: Sequence[Event]) -> None:
        entered.set()
        while not at_last.is_set():
            try:
                await at_last.wait()
            except asyncio.CancelledError:
                continue

    stop = asyncio.Event()
    work = asyncio.create_task(hasty(outbox, sessions, publish, grace=SHORT * 4).run(stop))
    await entered.wait()
    stop.set()
    async with asyncio.timeout(5):
        await work
    at_last.set()
    assert "the publisher goes on although it was cancelled" in caplog.messages


async def test_a_slow_publisher_keeps_its_claim_and_no_transaction(
    driver: str, outbox: Outbox, engines: Callable[..., AsyncEngine], engine: AsyncEngine, sessions: Sessions
) -> None:
    impatient = engines()

    @event.listens_for(impatient.sync_engine, "connect")
    def set_timeout(connection: Any, _: object) -> None:
        connection.cursor().execute("SET idle_in_transaction_session_timeout = 200")
        connection.commit()

    await emit(outbox, sessions, "a", key="k")
    gate = Gate()
    relay = hasty(outbox, async_sessionmaker(impatient), gate, lease=LEASE)
    working = asyncio.create_task(relay.run_once())
    await gate.entered.wait()
    [(first_expiry,)] = await rows(engine, "SELECT expires_at FROM outbox_claims")

    async def long_after() -> bool:
        late = "SELECT statement_timestamp() > CAST(:first AS timestamptz) + interval '200 ms'"
        return bool((await rows(engine, late, first=first_expiry))[0][0])

    await until(long_after)
    await emit(outbox, sessions, "b", key="k")  # an emit is never held up
    await emit(outbox, sessions, "other")
    others = RecordingPublisher()
    assert await hasty(outbox, sessions, others).run_once() == RelayResult(published=1)
    assert payloads(others.events) == ["other"]
    gate.opened.set()
    assert await working == RelayResult(published=1)


async def test_a_relay_that_lost_its_claim_stops_publishing_and_marks_nothing(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    await emit(outbox, sessions, "a")
    cancelled = asyncio.Event()

    async def publish(events: Sequence[Event]) -> None:
        await execute(engine, "DELETE FROM outbox_claims")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    relay = hasty(outbox, sessions, publish, lease=LEASE)
    assert await relay.run_once() == RelayResult(released=1, claim_lost=True)
    assert cancelled.is_set()
    assert await states(engine) == {"a": "open"}
    assert caplog.messages == ["lost a claim of 1 events: what was sent of it may be sent again"]


async def test_a_claim_lost_without_notice_is_noticed_when_it_is_settled(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a", "bad")

    async def publish(events: Sequence[Event]) -> None:
        await execute(engine, "DELETE FROM outbox_claims")
        raise ValueError("no")

    relay = hasty(outbox, sessions, publish)
    assert await relay.run_once() == RelayResult(released=2, claim_lost=True)
    assert await states(engine) == {"a": "open", "bad": "open"}


async def test_a_claim_whose_renewal_finds_its_connection_ended_is_renewed_by_another(
    driver: str,
    outbox: Outbox,
    engine: AsyncEngine,
    engines: Callable[..., AsyncEngine],
    caplog: pytest.LogCaptureFixture,
) -> None:
    of_relay = engines(pool_size=1, max_overflow=0)
    [(pid,)] = await rows(of_relay, "SELECT pg_backend_pid()")
    await emit(outbox, async_sessionmaker(engine), "a")
    gate = Gate()
    working = asyncio.create_task(hasty(outbox, async_sessionmaker(of_relay), gate, lease=LEASE).run_once())
    await gate.entered.wait()
    [(first_expiry,)] = await rows(engine, "SELECT expires_at FROM outbox_claims")
    await rows(engine, "SELECT pg_terminate_backend(:pid, 20000)", pid=pid)

    async def is_renewed() -> bool:
        return (await rows(engine, "SELECT expires_at FROM outbox_claims")) != [(first_expiry,)]

    await until(is_renewed)
    gate.opened.set()
    assert await working == RelayResult(published=1)
    [warning] = caplog.messages
    assert warning.startswith("could not renew a claim: ")


@pytest.mark.parametrize("when", ["renewed", "settled"])
async def test_a_table_that_is_dropped_while_it_publishes_ends_it(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, when: str
) -> None:
    await emit(outbox, sessions, "a")

    async def publish(events: Sequence[Event]) -> None:
        await execute(engine, "DROP TABLE outbox_claims")
        if when == "renewed":
            await asyncio.Event().wait()

    async with asyncio.timeout(10):
        with pytest.raises(TablesMissing):
            await hasty(outbox, sessions, publish, lease=LEASE).run_once()


async def test_a_broker_that_is_down_is_shown_and_waited_for(
    outbox: Outbox, sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    await emit(outbox, sessions, "a")
    broker = Broker()
    broker.away = ConnectionError("nobody is there")
    relay = hasty(outbox, sessions, broker)
    async with running(relay):
        await until(lambda: len(broker.calls) > 3)
        assert relay.waits_for == "broker"
        broker.away = None
        await until(lambda: relay.waits_for is None)
    assert broker.received == ["a"]
    assert caplog.messages[0] == "broker down, next try in 0.0 s: ConnectionError('nobody is there')"


async def test_connections_that_the_server_ended_are_no_reason_to_end(
    driver: str, outbox: Outbox, engines: Callable[..., AsyncEngine], sessions: Sessions
) -> None:
    fresh = engines(poolclass=NullPool)
    publish = RecordingPublisher()
    relay = hasty(outbox, sessions, publish)
    end = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE pid <> pg_backend_pid() AND datname = current_database() AND query !~ 'SCHEMA'"
    )
    async with running(relay):
        for number in range(5):
            await rows(fresh, end)
            await emit(outbox, async_sessionmaker(fresh), number)
            await until(lambda: len(publish.events) > number)  # noqa: B023  awaited at once
        await until(lambda: relay.waits_for is None)
    assert payloads(publish.events) == list(range(5))


async def test_a_claim_that_was_cancelled_on_the_server_is_made_again(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "a")
    publish = RecordingPublisher()
    relay = hasty(outbox, sessions, publish, listen=False)
    async with claiming_is_held_up(engine) as gate, running(relay):
        await backend_waits(engine, "advisory")
        waiting = "SELECT pg_cancel_backend(pid) FROM pg_locks WHERE NOT granted AND locktype = 'advisory'"
        await rows(engine, waiting)
        await until(lambda: relay.waits_for == "database")
        await gate.rollback()
        await until(lambda: len(publish.events) == 1)


async def test_a_missing_table_ends_it(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await execute(engine, "DROP TABLE outbox_claims")
    async with asyncio.timeout(10):
        with pytest.raises(TablesMissing, match="'outbox', or one that belongs to it, does not exist"):
            await hasty(outbox, sessions, RecordingPublisher()).run()


@pytest.mark.parametrize("settings", [{"twophase": True}, {"autobegin": False}, {"expire_on_commit": False}])
async def test_it_takes_whatever_makes_sessions(
    driver: str, outbox: Outbox, engine: AsyncEngine, sessions: Sessions, settings: dict[str, Any]
) -> None:
    await emit(outbox, sessions, "a")
    publish = RecordingPublisher()
    async with running(hasty(outbox, async_sessionmaker(engine, **settings), publish)):
        await until(lambda: len(publish.events) == 1)
        await emit(outbox, sessions, "b")
        await until(lambda: len(publish.events) == 2)
    assert await states(engine) == {"a": "published", "b": "published"}
    assert await rows(engine, "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()") == []


def test_it_runs_again_in_another_loop(database: Database) -> None:
    outbox, publish = Outbox(MetaData()), RecordingPublisher()
    sessions = async_sessionmaker(database.engine(poolclass=NullPool))
    relay = hasty(outbox, sessions, publish)

    async def run(payload: str) -> None:
        async with running(relay):
            await until(lambda: relay.last_success is not None)
            await emit(outbox, sessions, payload)
            await until(lambda: payload in payloads(publish.events))

    async def make() -> None:
        async with sessions.kw["bind"].begin() as connection:
            await connection.run_sync(outbox.table.metadata.create_all)

    asyncio.run(make())
    asyncio.run(run("a"))
    asyncio.run(run("b"))
    assert payloads(publish.events) == ["a", "b"]


async def test_one_connection_is_enough_and_one_to_listen(
    driver: str, outbox: Outbox, engines: Callable[..., AsyncEngine], sessions: Sessions
) -> None:
    small = async_sessionmaker(engines(pool_size=1, max_overflow=0))
    publish = RecordingPublisher()
    async with running(hasty(outbox, small, publish)):
        await emit(outbox, sessions, *range(50))
        await until(lambda: len(publish.events) == 50)
        await emit(outbox, small, "from the same pool")
        await until(lambda: len(publish.events) == 51)


async def test_one_connection_is_enough_to_publish_and_renew(
    outbox: Outbox, engine: AsyncEngine, engines: Callable[..., AsyncEngine], sessions: Sessions
) -> None:
    small, gate = async_sessionmaker(engines(pool_size=1, max_overflow=0)), Gate()
    await emit(outbox, sessions, "a")
    expires_at = "SELECT expires_at FROM outbox_claims"
    async with running(hasty(outbox, small, gate, lease=timedelta(seconds=3))):
        await gate.entered.wait()
        first = await rows(engine, expires_at)
        await until(lambda: _differs(engine, expires_at, first))
        gate.opened.set()
        await until(lambda: len(gate.events) > 0)


async def _differs(engine: AsyncEngine, sql: str, found: list[Any]) -> bool:
    return await rows(engine, sql) != found


@pytest.mark.parametrize(
    "settings",
    [
        {"batch": 0},
        {"max_attempts": 0},
        {"lease": timedelta(0)},
        {"publish_timeout": timedelta(0)},
        {"poll_interval": timedelta(0)},
        {"database_timeout": timedelta(0)},
        {"grace": timedelta(0)},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    outbox, sessions = Outbox(MetaData()), async_sessionmaker()
    with pytest.raises(ValueError, match=next(iter(settings))):
        Relay(outbox, sessions, RecordingPublisher(), **settings)
