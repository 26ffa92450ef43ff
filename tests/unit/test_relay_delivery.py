"""Who is to blame when a batch does not get through, and what follows."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID, uuid4

import pytest

from oncely.backoff import Backoff
from oncely.delivery import Courier, Delivery
from oncely.errors import PublisherUnavailable, PublishFailed, Reject
from oncely.event import Event, Publisher, uuid7
from oncely.ledger import Claim
from tests.relays import Broker

RETRY = Backoff(first=timedelta(seconds=1), maximum=timedelta(seconds=4), jitter=0)
AWAY = ConnectionError("nobody is there")


class Mute(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def event(payload: object, key: str | None = None, *, attempt: int = 1) -> Event:
    return Event(uuid7(), "t", payload, key=key, attempt=attempt)


def delivery(*events: Event) -> Delivery:
    return Delivery(Claim(uuid4(), list(events), math.inf))


def courier(publish: Publisher, *, max_attempts: int = 3, **settings: timedelta) -> Courier:
    settings = {"publish_timeout": timedelta(minutes=1)} | settings
    return Courier(publish, retry=RETRY, max_attempts=max_attempts, **settings)


def outcome(done: Delivery) -> dict[str, str]:
    """What became of each event, by payload: published, open, dead, or when it is tried again."""
    names = {event.id: str(event.payload) for event in done.claim.events}
    found = {names[event_id]: "published" for event_id in done.published}
    found |= {names[event_id]: "open" for event_id in done.open}
    for failure in done.failures:
        found[names[failure.event_id]] = (
            "dead" if failure.delay is None else f"again in {failure.delay.total_seconds():g} s"
        )
    return {name: found[name] for name in names.values()}


async def test_a_batch_goes_out_with_one_call() -> None:
    broker, batch = Broker(), delivery(event("a"), event("b"))
    await courier(broker).deliver(batch)
    assert broker.calls == [["a", "b"]]
    assert outcome(batch) == {"a": "published", "b": "published"}


@pytest.mark.parametrize(
    "error", [ConnectionError(), TimeoutError(), OSError("no route"), PublisherUnavailable()]
)
async def test_a_broker_that_is_away_ends_the_pass_and_counts_against_nobody(error: Exception) -> None:
    broker, batch = Broker(a=error), delivery(event("a"), event("b"))
    await courier(broker).deliver(batch)
    assert batch.outage is error
    assert broker.calls == [["a", "b"]]
    assert outcome(batch) == {"a": "open", "b": "open"}


async def test_a_rejected_event_is_not_the_death_of_one_before_it_that_the_broker_did_not_take() -> None:
    events = event("a"), event("b")
    courier_ = courier(Broker(a=AWAY, b=Reject("never")))
    await courier_.deliver(delivery(*events))  # an outage: the next time they go one by one
    batch = delivery(*events)
    await courier_.deliver(batch)
    assert outcome(batch) == {"a": "open", "b": "dead"}
    assert batch.outage is AWAY


async def test_a_publisher_that_takes_too_long_is_away() -> None:
    async def publish(events: Sequence[Event]) -> None:
        await asyncio.Event().wait()

    batch = delivery(event("a"), event("b"))
    await courier(publish, publish_timeout=timedelta(milliseconds=1)).deliver(batch)
    assert type(batch.outage) is TimeoutError
    assert outcome(batch) == {"a": "open", "b": "open"}


async def test_a_bad_event_is_found_by_publishing_one_by_one() -> None:
    broker, batch = Broker(b=ValueError("no")), delivery(event("a"), event("b"), event("c"))
    await courier(broker).deliver(batch)
    assert broker.calls == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    assert outcome(batch) == {"a": "published", "b": "again in 1 s", "c": "published"}
    assert [failure.error for failure in batch.failures] == ["ValueError: no"]


async def test_nothing_more_of_its_key_goes_out_after_a_failure() -> None:
    broker = Broker(k1=ValueError("no"))
    batch = delivery(event("k1", "k"), event("other", "o"), event("k2", "k"), event("none"))
    await courier(broker).deliver(batch)
    assert broker.received == ["other", "none"]
    assert outcome(batch) == {"k1": "again in 1 s", "other": "published", "k2": "open", "none": "published"}


async def test_each_try_waits_longer_and_the_last_one_is_the_end() -> None:
    broker = Broker(a=ValueError("no"))
    said = []
    for attempt in (1, 2, 3):
        batch = delivery(event("a", attempt=attempt))
        await courier(broker).deliver(batch)
        said.append(outcome(batch)["a"])
    assert said == ["again in 1 s", "again in 2 s", "dead"]


async def test_a_rejected_event_is_dead_at_once() -> None:
    broker, batch = Broker(b=Reject("never")), delivery(event("a"), event("b"))
    await courier(broker).deliver(batch)
    assert outcome(batch) == {"a": "published", "b": "dead"}
    assert [failure.error for failure in batch.failures] == ["Reject: never"]


async def test_an_event_that_no_relay_survived_is_dead_without_another_try() -> None:
    broker, batch = Broker(), delivery(event("a", attempt=4))
    await courier(broker).deliver(batch)
    assert broker.calls == []
    assert outcome(batch) == {"a": "dead"}
    assert [failure.error for failure in batch.failures] == [None]  # its last error stays


async def test_an_event_has_a_try_of_its_own_before_it_dies_of_expired_claims() -> None:
    broker, batch = Broker(), delivery(event("of an expired batch, or replayed", attempt=2))
    await courier(broker, max_attempts=1).deliver(batch)
    assert set(outcome(batch).values()) == {"published"}


async def test_what_a_publisher_did_send_is_marked() -> None:
    sent, bad, behind, unsent = event("sent"), event("bad", "k"), event("behind", "k"), event("unsent")

    async def publish(events: Sequence[Event]) -> None:
        raise PublishFailed({bad.id: ValueError("no")}, [unsent.id])

    batch = delivery(sent, bad, behind, unsent)
    await courier(publish).deliver(batch)
    assert outcome(batch) == {"sent": "published", "bad": "again in 1 s", "behind": "open", "unsent": "open"}
    assert batch.outage is None


async def test_a_rejected_event_among_others_is_dead() -> None:
    sent, bad = event("sent"), event("bad")

    async def publish(events: Sequence[Event]) -> None:
        raise PublishFailed({bad.id: Reject("never")})

    batch = delivery(sent, bad)
    await courier(publish).deliver(batch)
    assert outcome(batch) == {"sent": "published", "bad": "dead"}


async def test_a_publisher_that_sent_nothing_and_blames_nobody_is_away() -> None:
    async def publish(events: Sequence[Event]) -> None:
        raise PublishFailed({}, [event.id for event in events])

    batch = delivery(event("a"), event("b"))
    await courier(publish).deliver(batch)
    assert isinstance(batch.outage, PublishFailed)
    assert outcome(batch) == {"a": "open", "b": "open"}


@pytest.mark.parametrize("named", [{}, {uuid4(): ValueError("whose?")}])
async def test_a_publisher_that_names_none_of_the_batch_has_sent_nothing_for_certain(
    named: dict[UUID, Exception],
) -> None:
    async def publish(events: Sequence[Event]) -> None:
        raise PublishFailed(named)

    batch = delivery(event("a"), event("b"))
    await courier(publish).deliver(batch)
    assert isinstance(batch.outage, PublishFailed)
    assert outcome(batch) == {"a": "open", "b": "open"}


async def test_one_by_one_an_event_that_was_left_unsent_is_no_event_that_failed() -> None:
    async def publish(events: Sequence[Event]) -> None:
        if len(events) > 1:
            raise ValueError("one of them is bad")
        if events[0].payload == "unsent":
            raise PublishFailed({}, [events[0].id])

    batch = delivery(event("a"), event("unsent"))
    await courier(publish).deliver(batch)
    assert isinstance(batch.outage, PublishFailed)
    assert outcome(batch) == {"a": "published", "unsent": "open"}


async def test_an_outage_reported_event_by_event_counts_against_nobody() -> None:
    async def publish(events: Sequence[Event]) -> None:
        raise PublishFailed({event.id: ConnectionError() for event in events})

    postman = courier(publish)
    for _ in range(5):
        batch = delivery(event("a"), event("b"))
        await postman.deliver(batch)
        assert isinstance(batch.outage, ConnectionError)
        assert outcome(batch) == {"a": "open", "b": "open"}


async def test_an_event_named_with_the_brokers_error_is_counted_when_it_fails_so_again_among_others() -> None:
    bad = event("bad")

    async def publish(events: Sequence[Event]) -> None:
        raise PublishFailed({bad.id: ConnectionError("its own server")})

    postman, first, second = courier(publish), delivery(event("a"), bad), delivery(event("b"), bad)
    await postman.deliver(first)
    assert outcome(first) == {"a": "published", "bad": "open"}
    await postman.deliver(second)
    assert outcome(second) == {"b": "published", "bad": "again in 1 s"}


@pytest.mark.parametrize("count", [1, 2, 3, 10, 99])
async def test_bad_events_that_look_like_a_broken_broker_do_not_stop_the_others(count: int) -> None:
    bad = [f"bad{number}" for number in range(count)]
    broker = Broker(**dict.fromkeys(bad, AWAY))
    postman = courier(broker)
    events = [event(name) for name in [*bad, "good"]]
    batch = delivery(*events)
    for _ in range(10):
        batch = delivery(*events)
        await postman.deliver(batch)
        if "good" in broker.received:
            break
    assert outcome(batch) == dict.fromkeys(bad, "again in 1 s") | {"good": "published"}


async def test_an_outage_that_lasts_is_probed_by_more_events_each_time_and_counts_against_nobody() -> None:
    broker = Broker()
    broker.away = AWAY
    postman = courier(broker)
    tried = []
    for _ in range(5):
        batch = delivery(*(event(number) for number in range(10)))
        before = len(broker.calls)
        await postman.deliver(batch)
        tried.append(len(broker.calls) - before)
        assert batch.outage is AWAY
        assert set(outcome(batch).values()) == {"open"}
    assert tried == [1, 1 + 2, 1 + 4, 1 + 8, 1 + 10]


async def test_events_that_failed_just_before_the_broker_came_back_are_not_counted() -> None:
    broker = Broker()
    broker.away = AWAY
    postman = courier(broker)
    for _ in range(3):
        await postman.deliver(delivery(*(event(number) for number in range(10))))
    calls = len(broker.calls)

    async def publish(events: Sequence[Event]) -> None:
        if len(broker.calls) == calls + 4:  # the batch and three alone have failed
            broker.away = None
        await broker(events)

    postman._publish = publish
    batch = delivery(*(event(number) for number in range(5)))
    await postman.deliver(batch)
    assert batch.outage is None
    assert broker.received == [3, 0, 1, 2, 4]
    assert set(outcome(batch).values()) == {"published"}


async def test_order_by_key_holds_when_the_broker_comes_back_in_the_middle() -> None:
    answers = iter([AWAY, AWAY, AWAY])

    async def publish(events: Sequence[Event]) -> None:
        if (error := next(answers, None)) is not None:
            raise error
        received.extend(event.payload for event in events)

    received: list[object] = []
    postman = courier(publish)
    await postman.deliver(delivery(event("a")))
    batch = delivery(event("k1", "k"), event("k2", "k"), event("other"))
    await postman.deliver(batch)
    assert received == ["other", "k1"]
    assert outcome(batch) == {"k1": "published", "k2": "open", "other": "published"}


async def test_a_lone_event_with_the_brokers_error_is_counted_once_something_else_has_passed() -> None:
    broker = Broker(bad=AWAY)
    postman, bad = courier(broker), event("bad")
    seen = []
    for batch in (delivery(bad), delivery(bad), delivery(event("good")), delivery(bad)):
        await postman.deliver(batch)
        seen.append((list(outcome(batch).values()), batch.outage is not None))
    assert seen == [(["open"], True), (["open"], True), (["published"], False), (["again in 1 s"], False)]


async def test_a_lone_event_that_got_through_is_no_longer_suspected() -> None:
    broker = Broker()
    postman, lone = courier(broker), event("lone")
    broker.away = AWAY
    await postman.deliver(delivery(lone))
    broker.away = None
    await postman.deliver(delivery(lone))
    assert postman._accused == {}


async def test_suspects_are_remembered_up_to_a_bound() -> None:
    broker = Broker()
    broker.away = AWAY
    postman = courier(broker)
    for _ in range(1_200):
        await postman.deliver(delivery(event("a")))
    assert len(postman._accused) == 1_000


async def test_a_cancellation_from_within_the_publisher_is_no_cancellation_of_the_relay() -> None:
    async def publish(events: Sequence[Event]) -> None:
        raise asyncio.CancelledError

    batch = delivery(event("a"), event("b"))
    await courier(publish).deliver(batch)
    assert isinstance(batch.outage, PublisherUnavailable)
    assert outcome(batch) == {"a": "open", "b": "open"}


async def test_cancelled_it_has_noted_what_had_left() -> None:
    hanging = asyncio.Event()

    async def publish(events: Sequence[Event]) -> None:
        if len(events) > 1:
            raise ValueError("which one?")
        if events[0].payload == "b":
            hanging.set()
            await asyncio.Event().wait()

    batch = delivery(event("a"), event("b"), event("c"))
    delivering = asyncio.create_task(courier(publish).deliver(batch))
    await hanging.wait()
    delivering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivering
    assert outcome(batch) == {"a": "published", "b": "open", "c": "open"}


async def test_one_by_one_it_stops_when_the_claim_is_not_ours_for_certain() -> None:
    async def publish(events: Sequence[Event]) -> None:
        if len(events) > 1:
            raise ValueError("which one?")
        batch.deadline = -math.inf

    batch = delivery(event("a"), event("b"))
    await courier(publish).deliver(batch)
    assert outcome(batch) == {"a": "published", "b": "open"}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError(), "ValueError: "),
        (ValueError("a\0b"), "ValueError: a\N{REPLACEMENT CHARACTER}b"),
        (ValueError("\ud800"), "ValueError: ?"),
        (Mute(), "Mute: (its message raised ZeroDivisionError)"),
        (ValueError("x" * 10_000), "ValueError: " + "x" * 488),
    ],
)
async def test_an_error_is_kept_in_a_form_that_can_be_stored(error: Exception, text: str) -> None:
    batch = delivery(event("a"))
    await courier(Broker(a=error)).deliver(batch)
    assert [failure.error for failure in batch.failures] == [text]


@pytest.mark.parametrize(
    ("errors", "became"),
    [
        ([AWAY, TimeoutError(), ExceptionGroup("inner", [AWAY])], "open"),
        ([AWAY, ValueError()], "again in 1 s"),
    ],
)
async def test_a_group_of_errors_is_an_outage_when_each_of_them_is(
    errors: list[Exception], became: str
) -> None:
    batch = delivery(event("a"))
    await courier(Broker(a=ExceptionGroup("several", errors))).deliver(batch)
    assert outcome(batch) == {"a": became}
