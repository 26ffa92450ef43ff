"""What the tests of the relay have in common: a broker that fails as told, and relays in a hurry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from oncely import Event, Outbox, Relay
from oncely.backoff import Backoff
from oncely.event import Publisher
from tests.outboxes import Sessions

__all__ = ["AT_ONCE", "Broker", "hasty", "running"]

AT_ONCE = Backoff(first=timedelta(milliseconds=1), maximum=timedelta(milliseconds=1), factor=1)


class Broker:
    """Takes what it is given, and fails as `faults` say, by payload: for a batch and for one alone.

    The batch fails as a whole, without a word about whom it was for, and before any of it was sent.
    """

    def __init__(self, **faults: Exception | Callable[[], Exception | None]) -> None:
        self.faults = faults
        self.away: Exception | None = None
        self.calls: list[list[object]] = []
        self.received: list[object] = []

    async def __call__(self, events: Sequence[Event]) -> None:
        self.calls.append([event.payload for event in events])
        if self.away is not None:
            raise self.away
        for each in events:
            fault = self.faults.get(str(each.payload))
            error = fault if isinstance(fault, Exception) or fault is None else fault()
            if error is not None:
                raise error
        self.received += [each.payload for each in events]


def hasty(outbox: Outbox, sessions: Sessions, publish: Publisher, **settings: Any) -> Relay:
    """A relay that waits for nothing; `settings` are Relay's."""
    hurry: dict[str, Any] = {"poll_interval": timedelta(milliseconds=20), "retry": AT_ONCE, "outage": AT_ONCE}
    return Relay(outbox, sessions, publish, **(hurry | settings))


@asynccontextmanager
async def running(*relays: Relay) -> AsyncIterator[None]:
    """These relays at work, until the end of the block; an error that ended one of them goes on."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for relay in relays:
            group.create_task(relay.run(stop))
        try:
            yield
        finally:
            stop.set()
