"""Delivery: a claimed batch on its way to the publisher, and who is to blame when it does not get there.

What can go wrong with a publish is of two kinds:

- the *broker* is away (a connection error, a timeout, PublisherUnavailable). That is an outage: it ends
  the pass, and counts against no event.
- an *event* is bad (any other error). It is found by publishing one by one, its try is counted, it is
  tried again later by the database's clock, and after `max_attempts` it is dead. `Reject` makes it dead
  at once.

A bad event may look like a broken broker. When a batch fails in an outage that lasts, its events are
published one by one, twice as many in each pass, until one gets through. Then it was not the broker, and
those that failed before it, and do so again after it, are counted. An event that is published alone
anyway is counted when it fails so a second time, with anything having passed in between.

Order: after the failure of an event nothing more of its key is published in that pass.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from uuid import UUID

from oncely.backoff import Backoff
from oncely.description import describe
from oncely.errors import PublisherUnavailable, PublishFailed, Reject
from oncely.event import Event, Publisher
from oncely.ledger import Claim, Failure
from oncely.loop import is_cancelled
from oncely.outbox import sent

__all__ = ["Courier", "Delivery"]


class Delivery:
    """A claim and what became of its events: `open` are those that neither left nor failed so far.

    `deadline` (on the monotonic clock, in seconds) moves when the claim is renewed. `lost` says that the
    claim is another's by now, `outage` is the broker's error that ended the pass.
    """

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.begun = time.monotonic()
        self.deadline = claim.deadline
        self.open: dict[UUID, Event] = {event.id: event for event in claim.events}
        self.published: list[UUID] = []
        self.failures: list[Failure] = []
        self.lost = False
        self.outage: Exception | None = None

    @property
    def in_time(self) -> bool:
        """Whether the claim is ours for certain."""
        return not self.lost and time.monotonic() < self.deadline

    def note_published(self, events: Iterable[Event]) -> None:
        """Note that these have left."""
        for event in events:
            del self.open[event.id]
            self.published.append(event.id)

    def note_failed(self, event: Event, error: str | None, delay: timedelta | None) -> None:
        """Note that the event's try has failed: it is tried again after `delay`, or dead without one."""
        del self.open[event.id]
        self.failures.append(Failure(event.id, error, delay))


class Courier:
    """Takes deliveries to one publisher, and remembers from pass to pass whom it suspects."""

    def __init__(
        self, publish: Publisher, *, publish_timeout: timedelta, retry: Backoff, max_attempts: int
    ) -> None:
        self._publish = publish
        self._publish_timeout = publish_timeout
        self._retry = retry
        self._max_attempts = max_attempts
        self._outages = 0
        """How many deliveries in a row have ended in an outage."""
        self._passed = 0
        """How many calls of the publisher have sent something."""
        self._accused: dict[UUID, int] = {}
        """Events that failed with the broker's error, and what `_passed` was then; the latest last."""

    async def deliver(self, delivery: Delivery) -> None:
        """Publish what is open; what became of each event is noted in the delivery.

        Nothing that the publisher raises goes on. Cancelled, it leaves noted what had left by then.
        """
        for event in delivery.claim.events:
            # Its claims expired again and again: no relay that published it lived to tell. The first
            # try proves nothing: it was that of a whole batch, or stands for the replay of a dead event.
            if event.attempt > max(self._max_attempts, 2):
                delivery.note_failed(event, None, None)
        if not delivery.open:
            return
        await self._deliver_together(delivery)
        self._outages = self._outages + 1 if delivery.outage is not None else 0

    async def _deliver_together(self, delivery: Delivery) -> None:
        events = list(delivery.open.values())
        try:
            await self._send(events)
        except PublishFailed as failed:
            self._sort(delivery, events, failed)
        except Exception as error:  # noqa: BLE001  the user's publisher may raise anything; it is kept
            if len(events) == 1:
                self._judge(delivery, events[0], error)
            elif _is_outage(error) and not self._outages:
                delivery.outage = error
            else:
                await self._deliver_one_by_one(delivery, events)
        else:
            self._note_passed(delivery, events)

    def _sort(self, delivery: Delivery, events: Sequence[Event], failed: PublishFailed) -> None:
        """The publisher says which events have left and which have not."""
        left = sent(events, failed)
        if left:
            self._note_passed(delivery, left)
        named = [event for event in events if event.id in failed.failures]
        for event in named:
            self._judge(delivery, event, failed.failures[event.id])
        if not left and not named:
            delivery.outage = failed

    async def _deliver_one_by_one(self, delivery: Delivery, events: Sequence[Event]) -> None:
        broken: set[str] = set()
        doubted: list[tuple[Event, Exception]] = []
        for event in events:
            if not delivery.in_time or len(doubted) >= 2 ** max(1, self._outages):
                break
            if event.key is not None and event.key in broken:
                continue
            error = await self._deliver_alone(delivery, event)
            if error is None:
                for each, _ in doubted:
                    if (again := await self._deliver_alone(delivery, each)) is not None:
                        self._count(delivery, each, again)
                doubted.clear()
                continue
            if event.key is not None:
                broken.add(event.key)
            if _is_outage(error):
                doubted.append((event, error))
            else:
                self._count(delivery, event, error)
        for event, error in doubted:
            self._judge(delivery, event, error)

    async def _deliver_alone(self, delivery: Delivery, event: Event) -> Exception | None:
        """None when the event has left, else why not."""
        try:
            await self._send([event])
        except PublishFailed as failed:
            return failed.failures.get(event.id, failed)
        except Exception as error:  # noqa: BLE001  as above
            return error
        self._note_passed(delivery, [event])
        return None

    async def _send(self, events: Sequence[Event]) -> None:
        try:
            async with asyncio.timeout(self._publish_timeout.total_seconds()):
                # A task of its own: a publisher that cancels its task (a leaked timeout) ends only that.
                await asyncio.ensure_future(self._publish(events))
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            # It was not us who were cancelled, but something that the publisher waited for.
            raise PublisherUnavailable("the publisher was cancelled from within") from error

    def _note_passed(self, delivery: Delivery, events: Sequence[Event]) -> None:
        self._passed += 1
        delivery.note_published(events)
        if self._accused:
            for event in events:
                self._accused.pop(event.id, None)

    def _judge(self, delivery: Delivery, event: Event, error: Exception) -> None:
        """Whose fault is it that this one event failed?"""
        if _is_outage(error):
            passed_then = self._accused.pop(event.id, self._passed)
            if passed_then == self._passed:
                if len(self._accused) >= _MOST_ACCUSED:
                    del self._accused[next(iter(self._accused))]
                self._accused[event.id] = self._passed
                delivery.outage = error
                return
        self._count(delivery, event, error)

    def _count(self, delivery: Delivery, event: Event, error: Exception) -> None:
        """The event's try has failed: note when it is tried again, if it is."""
        self._accused.pop(event.id, None)
        final = isinstance(error, Reject) or event.attempt >= self._max_attempts
        reason = describe(error, longest=_LONGEST_ERROR)
        delivery.note_failed(event, reason, None if final else self._retry.delay(event.attempt))


_MOST_ACCUSED = 1_000
_LONGEST_ERROR = 500  # characters


def _is_outage(error: Exception) -> bool:
    """Whether the error speaks of the broker: it is away, or took nothing and blames nobody."""
    if isinstance(error, PublishFailed):
        return not error.failures
    if isinstance(error, ExceptionGroup):  # of a publisher that sends with several tasks
        return all(map(_is_outage, error.exceptions))
    return isinstance(error, (OSError, PublisherUnavailable))  # ConnectionError, TimeoutError are OSErrors
