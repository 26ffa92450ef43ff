"""Crash points: which names there are, and when they end the process."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from oncely.testing import STEPS, Steps, crash_at


@pytest.fixture
def signalled() -> list[int]:
    return []


@pytest.fixture(autouse=True)
def _caught(signalled: list[int]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: signalled.append(number))
    yield
    signal.signal(signal.SIGUSR1, before)


def test_the_process_is_signalled_at_the_nth_time_and_only_then(signalled: list[int]) -> None:
    steps = crash_at("relay.settle.before", nth=2, signal=signal.SIGUSR1)
    steps.reached("relay.settle.before")
    steps.reached("relay.settle.after")
    assert signalled == []
    for _ in range(3):
        steps.reached("relay.settle.before")
    assert signalled == [signal.SIGUSR1]


def test_a_name_of_your_own_is_reached_where_you_say(signalled: list[int]) -> None:
    steps = crash_at("shop.card_was_charged", signal=signal.SIGUSR1)
    steps.reached("shop.card_was_charged")
    assert signalled == [signal.SIGUSR1]


@pytest.mark.parametrize(
    "name", ["relay.settle", "relay.settled.before", "webhook.look.between", "inbox.x.after"]
)
def test_a_step_of_oncelys_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"no step '{name}'"):
        crash_at(name)


def test_the_nth_time_is_counted_from_one() -> None:
    with pytest.raises(ValueError, match="nth must be 1 or more, not 0"):
        crash_at("relay.settle.before", nth=0)


async def test_a_handler_that_fails_has_not_reached_after() -> None:
    seen: list[str] = []
    steps = Steps(seen.append)

    async def fail(_: object) -> None:
        raise OSError("no")

    for wrapped in (steps.handler(fail), steps.publisher(fail)):
        with pytest.raises(OSError, match="no"):
            await wrapped(None)  # type: ignore[arg-type]  # they look at nothing
    assert seen == ["consumer.handler.before", "relay.publish.before"]


def test_something_else_is_not_watched() -> None:
    with pytest.raises(TypeError, match="not int"):
        Steps(print).watch(1)  # type: ignore[arg-type]


def test_every_step_says_what_it_is() -> None:
    assert all(description and not description.endswith(".") for description in STEPS.values())
