"""relay_once: one batch, in order, marked when and only when it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import ClaimLost, Event, Outbox, PublishFailed
from oncely.testing import RecordingPublisher
from tests.outboxes import Gate, Refusing, Sessions, claims, emit, expire_claims, payloads, rows, states

pytestmark = pytest.mark.in_schema


# --- what it does


async def test_it_publishes_in_line_and_no_more_than_a_batch(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher, driver: str
) -> None:
    await emit(outbox, sessions, *range(5), key="k")
    await emit(outbox, sessions, *range(5, 8))
    returned = []
    while batch := await outbox.relay_once(sessions, publish, batch=3):
        returned.append(batch)
    assert [payloads(batch) for batch in returned] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert publish.batches == returned
    assert set((await states(engine)).values()) == {"published"}
    assert await claims(engine) == 0


async def test_what_it_marked_is_not_offered_again(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit(outbox, sessions, 1)
    await emit(outbox, sessions, 2, delay=timedelta(microseconds=1))
    assert payloads(await outbox.relay_once(sessions, publish)) == [1, 2]
    asked = "SELECT published_at <= clock_timestamp(), due_at IS NULL, attempts, last_error FROM outbox"
    assert await rows(engine, asked) == [(True, True, 0, None)] * 2
    assert await outbox.relay_once(sessions, publish) == []
    assert len(publish.batches) == 1


async def test_with_nothing_to_send_the_publisher_is_not_called(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit(outbox, sessions, "tomorrow", delay=timedelta(days=1))
    assert await outbox.relay_once(sessions, publish) == []
    assert publish.batches == []
    assert await claims(engine) == 0


async def test_an_uncommitted_event_is_not_seen(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher
) -> None:
    async with sessions() as session:
        await outbox.emit(session, "t", 1)
        assert await outbox.relay_once(sessions, publish) == []
        await session.commit()
    assert payloads(await outbox.relay_once(sessions, publish)) == [1]


async def test_no_transaction_is_open_while_it_publishes(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1)
    gate = Gate()
    relay = asyncio.create_task(outbox.relay_once(sessions, gate))
    await gate.entered.wait()
    open_ = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
    assert await rows(engine, open_) == [(0,)]
    gate.opened.set()
    assert payloads(await relay) == [1]


# --- failures


async def test_a_publisher_that_raises_leaves_everything_as_it_was(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    await emit(outbox, sessions, 1, 2, key="k")
    await emit(outbox, sessions, 3)
    refusing = Refusing(ValueError("one"), ConnectionError("two"), TimeoutError("three"), KeyboardInterrupt())
    for error in list(refusing.errors):
        with pytest.raises(type(error)) as raised:
            await outbox.relay_once(sessions, refusing)
        assert raised.value is error
        assert await states(engine) == {"1": "open", "2": "open", "3": "open"}
        assert await rows(engine, "SELECT DISTINCT due_at, last_error FROM outbox") == [(None, None)]
    assert payloads(await outbox.relay_once(sessions, refusing)) == [1, 2, 3]
    assert [event.attempt for event in refusing.events] == [1, 1, 1]


async def test_of_a_batch_that_was_sent_in_part_that_part_is_marked(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher, driver: str
) -> None:
    await emit(outbox, sessions, "a1", "a2", "a3", key="a")
    await emit(outbox, sessions, "b1", "b2", key="b")
    await emit(outbox, sessions, "c1", "c2")

    async def send_a_part(events: Sequence[Event]) -> None:
        # It says nothing of a3, which it did not try, and names b2 as not tried.
        by_payload = {event.payload: event.id for event in events}
        raise PublishFailed({by_payload["a2"]: ValueError("no")}, unsent=[by_payload["b2"]])

    with pytest.raises(PublishFailed) as raised:
        await outbox.relay_once(sessions, send_a_part)
    assert list(map(str, raised.value.failures.values())) == ["no"]
    assert await states(engine) == {
        "a1": "published",
        "a2": "open",
        "a3": "open",
        "b1": "published",
        "b2": "open",
        "c1": "published",
        "c2": "published",
    }
    assert await claims(engine) == 0
    assert payloads(await outbox.relay_once(sessions, publish)) == ["a2", "a3", "b2"]


async def test_a_batch_of_which_nothing_was_sent_is_not_marked(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1, 2)

    async def send_nothing(events: Sequence[Event]) -> None:
        raise PublishFailed({events[0].id: ValueError("no")}, unsent=[event.id for event in events])

    with pytest.raises(PublishFailed):
        await outbox.relay_once(sessions, send_nothing)
    assert await states(engine) == {"1": "open", "2": "open"}


# --- leases


async def test_a_publisher_that_outlives_the_lease_is_cancelled_and_nothing_is_marked(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    await emit(outbox, sessions, 1)
    gate = Gate()
    with pytest.raises(TimeoutError):
        await outbox.relay_once(sessions, gate, lease=timedelta(milliseconds=150))
    assert gate.entered.is_set()
    assert await states(engine) == {"1": "open"}


def replaced(outbox: Outbox, engine: AsyncEngine, sessions: Sessions, error: Exception | None = None) -> Any:
    """A publisher that stalls until another relay has taken its batch over; the other fails to send it."""

    async def publish(events: Sequence[Event]) -> None:
        await expire_claims(engine)
        with pytest.raises(ValueError, match="the other"):
            await Outbox(MetaData()).relay_once(sessions, Refusing(ValueError("the other")))
        if error is not None:
            raise error

    return publish


async def test_a_relay_that_was_replaced_marks_nothing_and_says_so(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    ids = await emit(outbox, sessions, 1, 2)
    with pytest.raises(ClaimLost) as raised:
        await outbox.relay_once(sessions, replaced(outbox, engine, sessions))
    assert raised.value.event_ids == tuple(ids)
    assert await states(engine) == {"1": "open, tried 1", "2": "open, tried 1"}


async def test_a_relay_that_was_replaced_and_sent_a_part_says_both(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    [first, _] = await emit(outbox, sessions, 1, 2)
    failed = PublishFailed({first: ValueError("no")})
    with pytest.raises(PublishFailed) as raised:
        await outbox.relay_once(sessions, replaced(outbox, engine, sessions, failed))
    assert raised.value.__notes__ == [
        "the claim had expired: what was sent is not marked and will be sent again"
    ]
    assert await states(engine) == {"1": "open, tried 1", "2": "open, tried 1"}


async def test_a_relay_that_was_replaced_and_failed_says_what_failed(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1, 2)
    with pytest.raises(ZeroDivisionError):
        await outbox.relay_once(sessions, replaced(outbox, engine, sessions, ZeroDivisionError()))
    assert await states(engine) == {"1": "open, tried 1", "2": "open, tried 1"}


# --- side by side


async def test_two_relays_take_different_events(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, *range(20))
    gates = [Gate(), Gate()]
    relays = [asyncio.create_task(Outbox(MetaData()).relay_once(sessions, gate, batch=10)) for gate in gates]
    for gate in gates:
        await gate.entered.wait()
        gate.opened.set()
    taken = [payloads(await relay) for relay in relays]
    assert sorted(taken) == [list(range(10)), list(range(10, 20))]


async def test_an_event_waits_while_another_relay_has_one_of_its_key(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit(outbox, sessions, "a1", key="a")
    gate = Gate()
    relay = asyncio.create_task(outbox.relay_once(sessions, gate))
    await gate.entered.wait()
    await emit(outbox, sessions, "a2", key="a")
    await emit(outbox, sessions, "b1", key="b")
    other = Outbox(MetaData())
    assert payloads(await other.relay_once(sessions, publish)) == ["b1"]
    assert await other.relay_once(sessions, publish) == []
    gate.opened.set()
    await relay
    assert payloads(await other.relay_once(sessions, publish)) == ["a2"]


async def test_the_events_of_each_key_leave_in_order_by_two_relays(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, driver: str
) -> None:
    for number in range(60):
        await emit(outbox, sessions, (number % 5, number), key=f"k{number % 5}")
    left: list[list[int]] = []

    async def publish(events: Sequence[Event]) -> None:
        for event in events:
            await asyncio.sleep(0)
            left.append(event.payload)

    async def relay() -> None:
        mine = Outbox(MetaData())
        while len(left) < 60:
            await mine.relay_once(sessions, publish, batch=4)

    await asyncio.gather(relay(), relay())
    assert len(left) == 60
    for key in range(5):
        of_key = [number for k, number in left if k == key]
        assert of_key == sorted(of_key)


async def test_a_slow_publisher_stops_neither_emits_nor_other_relays_and_loses_no_connection(
    outbox: Outbox, engines: Callable[..., AsyncEngine], driver: str, publish: RecordingPublisher
) -> None:
    settings: dict[str, Any] = (
        {"server_settings": {"idle_in_transaction_session_timeout": "1500", "lock_timeout": "5000"}}
        if driver == "asyncpg"
        else {}
    )
    engine = engines(connect_args=settings)
    sessions = async_sessionmaker(engine)
    await emit(outbox, sessions, "slow", key="k")
    gate = Gate()
    relay = asyncio.create_task(outbox.relay_once(sessions, gate))
    await gate.entered.wait()
    for number in range(4):
        await emit(outbox, sessions, f"quick {number}", key=f"k{number}")
        assert payloads(await outbox.relay_once(sessions, publish)) == [f"quick {number}"]
        async with engine.connect() as connection:
            await connection.execute(text("SELECT pg_sleep(0.4)"))
    gate.opened.set()
    assert payloads(await relay) == ["slow"]
    assert set((await states(engine)).values()) == {"published"}
