"""What a publisher has to keep to, as checks that any implementation can be put through.

    CASE = PublisherCase(publish=..., received=..., bad_event=..., unplug=...)

    @pytest.mark.parametrize("check", conformance.PUBLISHER_CHECKS)
    async def test_conforms(check, case): await check(case)

Each check wants a case of its own, to which nothing was published yet. Leave out the checks of
`WITH_BAD_EVENTS` when there is no event that your broker refuses, and those of `WITH_OUTAGES` when
you cannot make it go away. A check that fails raises AssertionError.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from oncely.errors import PublisherUnavailable, PublishFailed
from oncely.event import Event, Publisher, uuid7

__all__ = ["PUBLISHER_CHECKS", "WITH_BAD_EVENTS", "WITH_OUTAGES", "PublisherCase"]


@dataclass(frozen=True)
class PublisherCase:
    """A publisher under test, and how to look behind it.

    `received` returns what has arrived at the broker, in order. `bad_event` makes an event of this
    key that can never be sent. `unplug` makes the broker go away.
    """

    publish: Publisher
    received: Callable[[], Awaitable[list[Event]]]
    bad_event: Callable[[str | None], Event] | None = None
    unplug: Callable[[], Awaitable[object]] | None = None


async def sends_a_batch_in_order(case: PublisherCase) -> None:
    """Everything arrives once, in the order given, also when it is a lot."""
    batch = [_event(number, key=str(number % 3)) for number in range(1000)]
    await case.publish(batch)
    _same(await case.received(), batch)


async def sends_batches_in_order(case: PublisherCase) -> None:
    """A batch comes after the batch before it."""
    batches = [[_event(f"{first} {second}") for second in range(3)] for first in range(3)]
    for batch in batches:
        await case.publish(batch)
    _same(await case.received(), [event for batch in batches for event in batch])


async def sends_all_of_an_event(case: PublisherCase) -> None:
    """Id, topic, key, headers, time and the payload's very text."""
    now = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    full = Event.from_json(uuid7(), "order.paid", '{"b":1.50,"a":["Zoë","😀"]}', '{"h":"1"}', "k", now)
    bare = Event.from_json(uuid7(), "order.paid", "null")
    await case.publish([full, bare])
    received = await case.received()
    _same(received, [full, bare])
    texts = [event.payload_json for event in received]
    _require(texts == [full.payload_json, bare.payload_json], f"payloads arrived as {texts}")


async def sends_an_empty_batch(case: PublisherCase) -> None:
    """Nothing, without an error."""
    await case.publish([])
    _same(await case.received(), [])


async def sends_an_event_again(case: PublisherCase) -> None:
    """A relay that died sends the same event once more; consumers know it by its id."""
    event = _event("again")
    await case.publish([event])
    await case.publish([event])
    received = await case.received()
    _require({one.id for one in received} == {event.id}, f"arrived: {received}")


async def names_the_event_that_it_cannot_send(case: PublisherCase) -> None:
    """PublishFailed names the bad event, and no other; those without its key were sent."""
    bad = _bad(case, None)
    good = [_event("before"), _event("after"), _event("other key", key="other")]
    failed = await _failure(case, [good[0], bad, *good[1:]])
    _require(set(failed.failures) == {bad.id}, f"to blame was {bad.id}, blamed were {failed.failures}")
    _require(not failed.unsent, "events without its key were left unsent")
    _same(await case.received(), good)


async def sends_nothing_of_a_key_after_its_failure(case: PublisherCase) -> None:
    """What follows a failed event of its key is unsent: not failed, and not sent either."""
    bad = _bad(case, "k")
    before, after, last = (_event(payload, key="k") for payload in ("before", "after", "last"))
    other, none = _event("other", key="other"), _event("none")
    failed = await _failure(case, [before, bad, other, after, none, last])
    _require(set(failed.failures) == {bad.id}, f"to blame was {bad.id}, blamed were {failed.failures}")
    _require(failed.unsent == {after.id, last.id}, f"unsent were {after.id}, {last.id}, not {failed.unsent}")
    _same(await case.received(), [before, other, none])


async def goes_on_after_a_failure(case: PublisherCase) -> None:
    """A failure is the batch's, and not the publisher's."""
    await _failure(case, [_bad(case, "k")])
    event = _event("next", key="k")
    await case.publish([event])
    _same(await case.received(), [event])


async def blames_no_event_when_the_broker_is_away(case: PublisherCase) -> None:
    """An outage is PublisherUnavailable, or an OSError such as ConnectionError and TimeoutError."""
    if case.unplug is None:
        raise ValueError("this check needs `unplug`")
    await case.unplug()
    try:
        await case.publish([_event("a"), _event("b")])
    except (PublisherUnavailable, OSError):
        return
    except Exception as error:
        raise AssertionError(f"an outage was reported as {error!r}") from error
    raise AssertionError("the broker was away, and the publisher returned as if it had sent")


PUBLISHER_CHECKS = (
    sends_a_batch_in_order,
    sends_batches_in_order,
    sends_all_of_an_event,
    sends_an_empty_batch,
    sends_an_event_again,
)
"""For every publisher."""

WITH_BAD_EVENTS = (
    names_the_event_that_it_cannot_send,
    sends_nothing_of_a_key_after_its_failure,
    goes_on_after_a_failure,
)
"""For publishers that can refuse an event for its own sake; they need `bad_event`."""

WITH_OUTAGES = (blames_no_event_when_the_broker_is_away,)
"""For brokers that can be made to go away; they need `unplug`."""


def _event(payload: object, *, key: str | None = None) -> Event:
    return Event(uuid7(), "conformance", payload, key=key)


def _bad(case: PublisherCase, key: str | None) -> Event:
    if case.bad_event is None:
        raise ValueError("this check needs `bad_event`")
    return case.bad_event(key)


async def _failure(case: PublisherCase, batch: list[Event]) -> PublishFailed:
    try:
        await case.publish(batch)
    except PublishFailed as failed:
        return failed
    raise AssertionError("a batch with an event that cannot be sent was accepted without a word")


def _same(received: list[Event], expected: list[Event]) -> None:
    for place, (arrived, sent) in enumerate(zip(received, expected, strict=False)):
        _require(
            (arrived.id, arrived.topic, arrived.key, arrived.created_at, arrived.headers, arrived.payload)
            == (sent.id, sent.topic, sent.key, sent.created_at, sent.headers, sent.payload),
            f"in place {place} came {arrived}, not {sent}",
        )
    _require(len(received) == len(expected), f"{len(received)} events arrived, {len(expected)} were to")


def _require(truth: bool, otherwise: str) -> None:
    if not truth:
        raise AssertionError(otherwise)
