"""The conformance suite itself: it passes what is right and fails what is wrong."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

import pytest

from oncely.errors import PublisherUnavailable, PublishFailed
from oncely.event import Event, uuid7
from oncely.testing import RecordingPublisher
from oncely.testing.conformance import (
    PUBLISHER_CHECKS,
    WITH_BAD_EVENTS,
    WITH_OUTAGES,
    PublisherCase,
)

ALL = PUBLISHER_CHECKS + WITH_BAD_EVENTS + WITH_OUTAGES
Check = Callable[[PublisherCase], Awaitable[None]]


class InMemory:
    """A publisher that is right, or wrong in one way."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.sent: list[Event] = []
        self.away = False

    def case(self) -> PublisherCase:
        return PublisherCase(self.publish, self.received, bad_event, self.unplug)

    async def received(self) -> list[Event]:
        return self.sent

    async def unplug(self) -> None:
        self.away = True

    async def publish(self, events: Sequence[Event]) -> None:
        if self.away:
            self._be_away()
            return
        failures: dict[UUID, Exception] = {}
        unsent = []
        stopped = set()
        for event in reversed(events) if self.fault == "reversed" else events:
            if event.topic == "bad":
                failures[event.id] = ValueError("bad")
                stopped.add(event.key)
            elif event.key is not None and event.key in stopped and self.fault != "overtakes":
                unsent.append(event.id)
            else:
                self.sent.append(event)
        self._raise(failures, unsent)

    def _be_away(self) -> None:
        if self.fault == "swallows outages":
            return
        raise ValueError if self.fault == "blames" else PublisherUnavailable

    def _raise(self, failures: dict[UUID, Exception], unsent: list[UUID]) -> None:
        if not failures or self.fault == "swallows failures":
            return
        if self.fault == "names the rest":
            failures |= dict.fromkeys(unsent, ValueError("not tried"))
        raise PublishFailed(failures, [] if self.fault == "forgets the rest" else unsent)


def bad_event(key: str | None) -> Event:
    return Event(uuid7(), "bad", None, key=key)


@pytest.mark.parametrize("check", ALL)
async def test_a_publisher_that_is_right_passes(check: Check) -> None:
    await check(InMemory().case())


@pytest.mark.parametrize("check", PUBLISHER_CHECKS)
async def test_the_recording_publisher_passes(check: Check) -> None:
    publisher = RecordingPublisher()

    async def received() -> list[Event]:
        return publisher.events

    await check(PublisherCase(publisher, received))


@pytest.mark.parametrize(
    ("fault", "failing"),
    [
        ("reversed", "sends_a_batch_in_order"),
        ("overtakes", "sends_nothing_of_a_key_after_its_failure"),
        ("swallows failures", "names_the_event_that_it_cannot_send"),
        ("forgets the rest", "sends_nothing_of_a_key_after_its_failure"),
        ("names the rest", "sends_nothing_of_a_key_after_its_failure"),
        ("swallows outages", "blames_no_event_when_the_broker_is_away"),
        ("blames", "blames_no_event_when_the_broker_is_away"),
    ],
)
async def test_a_publisher_that_is_wrong_fails(fault: str, failing: str) -> None:
    check = next(check for check in ALL if check.__name__ == failing)
    with pytest.raises(AssertionError):
        await check(InMemory(fault).case())


@pytest.mark.parametrize("check", WITH_BAD_EVENTS + WITH_OUTAGES)
async def test_a_check_says_what_it_needs(check: Check) -> None:
    async def received() -> list[Event]:
        return []

    with pytest.raises(ValueError, match="needs"):
        await check(PublisherCase(RecordingPublisher(), received))
