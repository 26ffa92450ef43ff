"""What is told of a relay's batch: claimed, then settled or lost; and the publisher, traced."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from oncely.event import Event, Publisher
from oncely.telemetry.observer import GuardedObserver
from oncely.telemetry.records import (
    BatchClaimed,
    BatchSettled,
    ClaimLost,
    EventDied,
    EventFailed,
    EventsPublished,
)

if TYPE_CHECKING:
    from oncely.ledger import Failure

__all__ = ["tell_claimed", "tell_lost", "tell_settled", "traced"]


def tell_claimed(observer: GuardedObserver, outbox: str, events: Sequence[Event], *, since: float) -> None:
    """Tell that these were claimed; `since` is the monotonic time, in seconds, at which that began."""
    observer(BatchClaimed(outbox=outbox, events=len(events), duration=_since(since)))


def tell_settled(
    observer: GuardedObserver,
    outbox: str,
    events: Sequence[Event],
    *,
    published: Collection[UUID],
    failures: Sequence[Failure] = (),
    since: float,
) -> None:
    """Tell what became of a claimed batch, once that is marked; what is not named was given back."""
    by_id = {event.id: event for event in events}
    for topic, count in Counter(by_id[event_id].topic for event_id in published).items():
        observer(EventsPublished(outbox=outbox, topic=topic, count=count))
    dead = 0
    for failure in failures:
        event = by_id[failure.event_id]
        # Of a text that begins with the error's class, the class; without a text there was no try.
        error = "ClaimExpired" if failure.error is None else failure.error.partition(":")[0]
        if failure.delay is None:
            dead += 1
            attempts = event.attempt if failure.error is not None else event.attempt - 1
            observer(EventDied(outbox=outbox, topic=event.topic, error=error, attempts=attempts))
        else:
            observer(
                EventFailed(
                    outbox=outbox,
                    topic=event.topic,
                    error=error,
                    attempt=event.attempt,
                    retry_in=failure.delay,
                )
            )
    observer(
        BatchSettled(
            outbox=outbox,
            published=len(published),
            failed=len(failures) - dead,
            dead=dead,
            released=len(events) - len(published) - len(failures),
            duration=_since(since),
        )
    )


def tell_lost(observer: GuardedObserver, outbox: str, events: Sequence[Event]) -> None:
    """Tell that the claim on these was lost, so that nothing was marked."""
    observer(ClaimLost(outbox=outbox, events=len(events)))


def traced(publish: Publisher, observer: GuardedObserver | None, outbox: str) -> Publisher:
    """The publisher, each call of it inside what a tracer stands around it."""
    if observer is None or not observer.traces:
        return publish

    async def publish_traced(events: Sequence[Event]) -> None:
        with observer.publishing(outbox, events):
            await publish(events)

    return publish_traced


def _since(moment: float) -> timedelta:
    return timedelta(seconds=time.monotonic() - moment)
