"""The parts of a consumer that need no Redis: routes, held keys, lanes, waits between attempts."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import timedelta
from functools import partial, wraps
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from oncely.event import Event
from oncely.streams import StreamConsumer
from oncely.streams.batch import lanes_of
from oncely.streams.entry import Entry
from oncely.streams.handling import Handling, Routes
from oncely.streams.held import HeldKeys


async def one(event: Event) -> None: ...
async def two(event: Event) -> None: ...


async def three(number: int, event: Event) -> None: ...
def plain(event: Event) -> None: ...


class Plain:
    def __call__(self, event: Event) -> None: ...


class Called:
    async def __call__(self, event: Event) -> None: ...
    async def method(self, event: Event) -> None: ...


@wraps(one)
def decorated(event: Event) -> Awaitable[None]:
    return one(event)


def entry(number: int, key: str | None = "k") -> Entry:
    fields = [] if key is None else [b"key", key.encode()]
    return Entry(f"5-{number}".encode(), fields, 1, counted=True)


def numbers(lanes: list[list[Entry]]) -> list[list[int]]:
    return [[entry.position[1] for entry in lane] for lane in lanes]


def test_a_topic_finds_its_handlers_in_the_order_of_subscription() -> None:
    routes = Routes()
    routes.add("order.*", one)
    routes.add("order.paid", two)
    routes.add("*", one)
    assert routes.find("order.paid") == (one, two, one)
    assert routes.find("order.") == (one, one)
    assert routes.find("order") == (one,)
    assert routes.find("orders.paid") == (one,)
    routes.add("order", two)
    assert routes.find("order") == (one, two)


@pytest.mark.parametrize("topic", ["", "*.paid", "a*b", "**"])
def test_a_topic_that_could_be_misread_is_refused(topic: str) -> None:
    with pytest.raises(ValueError):
        Routes().add(topic, one)


def test_topics_are_not_remembered_without_bound() -> None:
    routes = Routes()
    routes.add("*", one)
    for number in range(5000):
        assert routes.find(str(number)) == (one,)
    assert len(routes._found) <= 1000


def test_a_topic_without_a_handler_is_logged_once_and_not_without_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    routes = Routes()
    for number in range(5000):
        for _ in range(2):
            assert routes.find(str(number)) == ()
    assert len(caplog.records) == 1000
    assert (
        caplog.records[0].getMessage() == "no handler for topic '0': its events are acknowledged and skipped"
    )


@pytest.mark.parametrize(
    "handler", ["handler", plain, lambda event: one(event), Plain(), Plain, partial(plain)]
)
def test_what_is_no_async_function_is_refused_as_a_handler(handler: Any) -> None:
    with pytest.raises(TypeError, match="a handler must be an async function"):
        Routes().add("order", handler)


HANDLERS = [one, partial(one), partial(partial(three), 3), Called(), Called().method, decorated, AsyncMock()]


@pytest.mark.parametrize("handler", HANDLERS)
def test_an_async_function_may_come_in_many_forms(handler: Any) -> None:
    routes = Routes()
    routes.add("order", handler)
    assert routes.find("order") == (handler,)


def test_around_is_async() -> None:
    not_async: Any = plain
    with pytest.raises(TypeError, match="around must be an async function"):
        Handling(not_async, None, None)


@pytest.mark.parametrize("name", ["stream", "group", "consumer"])
def test_names_are_text(name: str) -> None:
    for wrong, error in (("", ValueError), (b"orders", TypeError)):
        with pytest.raises(error, match=name):
            StreamConsumer(Redis(), **{"stream": "s", name: wrong})  # type: ignore[arg-type]  # that is the mistake


def test_a_handler_timeout_lets_a_handler_begin() -> None:
    with pytest.raises(ValueError, match="handler_timeout"):
        Handling(None, None, timedelta(0))


def test_subscribe_is_a_function_and_a_decorator() -> None:
    consumer = StreamConsumer(Redis(), stream="s")
    assert consumer.subscribe("order", one) is one
    assert consumer.subscribe("order")(two) is two
    assert consumer._handling.routes.find("order") == (one, two)


def test_entries_of_a_key_share_a_lane_and_others_have_their_own() -> None:
    lanes = lanes_of([entry(1, "a"), entry(2, None), entry(3, "b"), entry(4, "a"), entry(5, None)])
    assert numbers(lanes) == [[1, 4], [2], [3], [5]]


def test_what_comes_after_a_head_waits_until_it_is_settled() -> None:
    held = HeldKeys()
    held.hold(b"k", b"5-3", [entry(4)])
    assert held.keeps(entry(9))
    assert held.keeps(entry(7))
    assert not held.keeps(entry(3))  # the head, tried again
    assert not held.keeps(entry(2))  # before the head
    assert not held.keeps(entry(8, "other"))
    assert not held.keeps(entry(8, None))
    assert held.pop_ready() == []
    held.settled([b"5-3"])
    assert numbers(held.pop_ready()) == [[4, 7, 9]]
    assert not held
    assert not held.keeps(entry(10))


def test_what_is_ready_and_not_yet_run_still_comes_before_what_is_new() -> None:
    held = HeldKeys()
    held.hold(b"k", b"5-3", [entry(4)])
    held.settled([b"5-3"])
    assert held.keeps(entry(10))
    assert numbers(held.pop_ready()) == [[4, 10]]


def test_a_key_waits_for_all_of_its_heads() -> None:
    held = HeldKeys()
    held.hold(b"k", b"5-3", [entry(4)])
    held.hold(b"k", b"5-1", [])
    assert held.keeps(entry(2))
    held.settled([b"5-3"])
    assert held.pop_ready() == []
    held.settled([b"5-1"])
    assert numbers(held.pop_ready()) == [[2, 4]]


def test_a_later_head_waits_for_an_earlier_one() -> None:
    held = HeldKeys()
    held.hold(b"k", b"5-1", [])
    held.hold(b"k", b"5-3", [])
    assert held.keeps(entry(3))
    assert not held.keeps(entry(1))
    held.settled([b"5-1"])
    assert numbers(held.pop_ready()) == [[3]]


def test_a_follower_that_was_stolen_is_waited_for() -> None:
    held = HeldKeys()
    held.hold(b"k", b"5-3", [entry(4), entry(5)])
    held.stolen([b"5-4"])
    held.settled([b"5-3"])
    assert held.heads == [b"5-4"]
    held.settled([b"5-4"])
    assert numbers(held.pop_ready()) == [[5]]


def test_a_follower_does_not_wait_for_a_later_one_that_was_stolen_since_its_thief_may_wait_for_it() -> None:
    held = HeldKeys()
    held.hold(b"k", b"5-3", [entry(4), entry(5), entry(6)])
    held.stolen([b"5-5"])
    held.settled([b"5-3"])
    assert [entry.id for entry in held.ready] == [b"5-4"]
    assert numbers(held.pop_ready()) == [[4]]
    assert held.heads == [b"5-5"]
    held.settled([b"5-5"])
    assert numbers(held.pop_ready()) == [[6]]


def test_letting_go_returns_what_waited() -> None:
    held = HeldKeys()
    held.hold(b"k", b"5-3", [entry(4)])
    assert [entry.id for entry in held.clear()] == [b"5-4"]
    assert not held


def test_positions_compare_as_numbers() -> None:
    assert Entry(b"9-10", [], 1, counted=True).position > Entry(b"9-9", [], 1, counted=True).position
    assert Entry(b"10-0", [], 1, counted=True).position > Entry(b"9-9", [], 1, counted=True).position


def test_the_attributes_of_a_consumer_are_what_it_was_given() -> None:
    consumer = StreamConsumer(
        Redis(),
        stream="orders",
        group="mailer",
        consumer="one",
        retry_after_ms=5,
        max_attempts=2,
        concurrency=3,
        dead_letter_stream="dead",
    )
    assert (
        consumer.stream,
        consumer.group,
        consumer.consumer,
        consumer.retry_after_ms,
        consumer.max_attempts,
        consumer.concurrency,
        consumer.dead_letter_stream,
    ) == ("orders", "mailer", "one", 5, 2, 3, "dead")


def test_what_is_not_given_has_its_default() -> None:
    first, second = (StreamConsumer(Redis(), stream="orders") for _ in range(2))
    assert (first.group, first.retry_after_ms, first.max_attempts, first.concurrency) == (
        "workers",
        30_000,
        5,
        16,
    )
    assert first.dead_letter_stream == "orders:dead"
    assert first.consumer != second.consumer


@pytest.mark.parametrize("name", ["count", "retry_after_ms", "max_attempts", "concurrency", "backoff_factor"])
def test_settings_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        StreamConsumer(Redis(), stream="s", **{name: 0})  # type: ignore[arg-type]  # one of them


def test_waits_grow_by_the_factor_up_to_the_maximum() -> None:
    def due(**options: Any) -> list[int]:
        return list(StreamConsumer(Redis(), stream="s", retry_after_ms=100, **options)._group.due)

    assert due() == [100, 100]  # the last holds for all later ones, which are not worth sending
    assert due(max_attempts=1_000_000) == [100, 100]
    assert due(backoff_factor=2) == [100, 100, 200, 400, 800, 1600]
    assert due(backoff_factor=10, backoff_maximum=timedelta(seconds=5)) == [100, 100, 1000, 5000]
    assert due(backoff_maximum=timedelta(milliseconds=1)) == [100, 100]
    assert due(backoff_factor=10, max_attempts=400)[-1] == 3_600_000


def test_what_waits_here_is_not_waited_for_here() -> None:
    """Given back unhandled and taken over again, it lines up behind another that then fails."""
    held = HeldKeys()
    first, second, third = entry(1), entry(2), entry(3)
    for given_back in (second, third):
        held.hold(b"k", given_back.id, ())
    lane = [each for each in (first, second, third) if not held.keeps(each)]
    held.hold(b"k", first.id, lane[1:])  # the first of them fails
    assert held.ready == []
    held.settled([first.id])
    assert numbers(held.pop_ready()) == [[2, 3]]


@given(
    st.lists(
        st.tuples(st.sampled_from(["hold", "take", "steal", "settle", "pop"]), st.integers(1, 5)), max_size=40
    )
)
def test_nothing_waits_for_itself_whatever_happens(steps: list[tuple[str, int]]) -> None:
    held = HeldKeys()
    for what, number in steps:
        if what == "hold":
            held.hold(b"k", entry(number).id, [entry(later) for later in range(number + 1, 6)])
        elif what == "take" and entry(number).id not in held:
            held.keeps(entry(number))
        elif what == "steal":
            held.stolen([entry(number).id])
        elif what == "settle":
            held.settled([entry(number).id])
        elif what == "pop":
            held.pop_ready()
        assert not set(held.heads) & {each.id for each in held.followers}
    waiting = sorted(each.id for each in held.followers)
    held.settled(held.heads)
    assert [each.id for lane in held.pop_ready() for each in lane] == waiting
