"""Gauges: how much waits, looked at every so often and told to an observer.

Everything else is told by whoever does it. What waits is nobody's doing, and to see it costs a look at
the database or at Redis: one for each `interval` and thing that is looked at, however busy the relays are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal, Protocol

from oncely.arguments import check_backoff, check_duration
from oncely.backoff import Backoff
from oncely.errors import PublisherUnavailable
from oncely.loop import one_at_a_time, run_loop, within
from oncely.telemetry.observer import GuardedObserver, Observer
from oncely.telemetry.records import Outage, Record
from oncely.transaction import Sessionmaker, check_sessionmaker, is_passing

__all__ = ["Gauges", "Measurable"]

_log = logging.getLogger(__name__)


class Measurable(Protocol):
    """What can be looked at: an Outbox, a StreamConsumer, Webhooks."""

    async def measure(self, sessionmaker: Sessionmaker) -> Sequence[Record]:
        """How much waits now. Raises PublisherUnavailable when the broker is away."""
        ...


class Gauges:
    """Looks at each of `measured` every `interval`, and tells `observer`. A service, as a Relay is.

        Gauges(observer, sessions, outbox, consumer, webhooks)

    One of them in each deployment is enough; of several, all tell the same. A look that has no answer
    within `timeout` counts as an outage: then the next is made after `outage`'s delay.
    """

    def __init__(
        self,
        observer: Observer,
        sessionmaker: Sessionmaker,
        *measured: Measurable,
        interval: timedelta = timedelta(seconds=15),
        timeout: timedelta = timedelta(seconds=10),
        outage: Backoff = Backoff(),
        grace: timedelta = timedelta(seconds=10),
    ) -> None:
        for name, duration in (("interval", interval), ("timeout", timeout), ("grace", grace)):
            check_duration(duration, name)
        check_backoff(outage, "outage")
        check_sessionmaker(sessionmaker)
        if not measured:
            raise ValueError("there is nothing to measure: give an Outbox, a StreamConsumer or Webhooks")
        for each in measured:
            if not callable(getattr(each, "measure", None)):
                raise TypeError(f"measured is an Outbox, a StreamConsumer or Webhooks, not {each!r}")
        self.sessionmaker = sessionmaker
        self.measured = measured
        self.interval = interval
        self.timeout = timeout
        self.outage = outage
        self.grace = grace
        self.waits_for: Literal["broker", "database"] | None = None
        """What it waits for while it is away."""
        self.last_success: datetime | None = None
        """When it last saw all of them, by this machine's clock."""
        self._observer = GuardedObserver(observer)

    @property
    def name(self) -> str:
        """What a worker's log and health call it."""
        return "Gauges"

    @one_at_a_time
    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Work until `stop` is set or the task is cancelled; what is away is waited for."""
        await run_loop(
            self._tick,
            stop=stop,
            idle=lambda: asyncio.sleep(self.interval.total_seconds()),
            grace=self.grace,
            backoff=self.outage,
            is_outage=_is_outage,
            on_outage=self._note_outage,
        )

    async def run_once(self) -> list[Record]:
        """Look at each of them once; what was told. An outage is raised after the others were looked at."""
        told: list[Record] = []
        outage: Exception | None = None
        for each in self.measured:
            try:
                records = await within(_measure(each, self.sessionmaker), self.timeout)
            except Exception as error:
                if not _is_outage(error):
                    raise
                outage = outage or error
                continue
            told += records
            for record in records:
                self._observer(record)
        if outage is not None:
            raise outage
        return told

    async def _tick(self) -> bool:
        await self.run_once()
        self.waits_for = None
        self.last_success = datetime.now(UTC)
        return False

    def _note_outage(self, error: Exception, delay: timedelta) -> None:
        self.waits_for = "broker" if isinstance(error, PublisherUnavailable) else "database"
        _log.warning("%s down, next look in %.1f s: %r", self.waits_for, delay.total_seconds(), error)
        self._observer(
            Outage(
                service="gauges",
                name="",
                waits_for=self.waits_for,
                error=type(error).__name__,
                retry_in=delay,
            )
        )


async def _measure(measured: Measurable, sessionmaker: Sessionmaker) -> Sequence[Record]:
    return await measured.measure(sessionmaker)


def _is_outage(error: Exception) -> bool:
    return isinstance(error, PublisherUnavailable) or is_passing(error)
