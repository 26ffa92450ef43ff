"""Relay: the worker that moves events out of an outbox, alone or beside others of its kind.

A *pass* claims one batch, delivers it and settles the claim; no transaction is open while the publisher
works. Who is to blame when an event does not get through, and what follows, is the delivery's matter.

The claim is a lease. It is renewed while the publisher works. A relay that could not have it confirmed
for a whole lease, or was told that it is gone, has been replaced: it stops publishing, marks nothing and
says so. A call to the database that is not answered is given up, since the database may have vanished
without a word. Scale-out is more relays, on any number of machines.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from oncely.arguments import check_async, check_backoff, check_count, check_duration, check_takes
from oncely.backoff import Backoff
from oncely.delivery import Courier, Delivery
from oncely.event import Publisher
from oncely.ledger import Claim
from oncely.loop import complete, end, one_at_a_time, run_loop, within
from oncely.outbox import Outbox
from oncely.telemetry.batches import tell_claimed, tell_lost, tell_settled, traced
from oncely.telemetry.records import Outage
from oncely.transaction import Sessionmaker, check_sessionmaker, is_passing
from oncely.wakeup import WINDOW

__all__ = ["Relay", "RelayResult"]

_log = logging.getLogger(__name__)

_MOST_LOGGED = 5


@dataclass(frozen=True, slots=True)
class RelayResult:
    """What one pass did with the events it claimed.

    `failed` will be tried again, `dead` will not, `released` were given back untried or unmarked.
    `claim_lost`: nothing was marked, since the claim had gone to others or may have. `outage` is the
    broker's error that ended the pass.
    """

    published: int = 0
    failed: int = 0
    dead: int = 0
    released: int = 0
    claim_lost: bool = False
    outage: Exception | None = None

    @property
    def claimed(self) -> int:
        """How many events the pass had claimed."""
        return self.published + self.failed + self.dead + self.released


class Relay:
    """Moves the events of `outbox` to `publish` until it is stopped.

    `batch` events are claimed at a time for `lease`, which is renewed while the publisher works;
    `publish_timeout` bounds one call of it. The outbox is looked at every `poll_interval`, and at once
    when a commit wakes the relay by NOTIFY: `listen=False` where a pooler stands before the server, or
    `listen_url` for a way past it. `retry` spaces the tries of an event, `outage` the passes while the
    broker or the database is away; a database that has not answered for `database_timeout` is. After a
    stop, what is in flight has `grace` to finish, and as long again to be given back.
    """

    def __init__(
        self,
        outbox: Outbox,
        sessionmaker: Sessionmaker,
        publish: Publisher,
        *,
        batch: int = 500,
        lease: timedelta = timedelta(seconds=30),
        publish_timeout: timedelta = timedelta(minutes=5),
        poll_interval: timedelta = timedelta(seconds=1),
        retry: Backoff = Backoff(),
        outage: Backoff = Backoff(first=timedelta(milliseconds=200), maximum=timedelta(seconds=30)),
        max_attempts: int = 10,
        database_timeout: timedelta = timedelta(seconds=10),
        grace: timedelta = timedelta(seconds=10),
        listen: bool = True,
        listen_url: str | None = None,
    ) -> None:
        if not isinstance(outbox, Outbox):
            raise TypeError(f"outbox must be an Outbox, not {type(outbox).__name__}")
        check_async(publish, "publish")
        check_takes(publish, "publish", "events")
        check_sessionmaker(sessionmaker)
        check_count(batch, "batch")
        check_count(max_attempts, "max_attempts")
        check_backoff(retry, "retry")
        check_backoff(outage, "outage")
        durations = {
            "lease": lease,
            "publish_timeout": publish_timeout,
            "poll_interval": poll_interval,
            "database_timeout": database_timeout,
            "grace": grace,
        }
        for name, duration in durations.items():
            check_duration(duration, name)
        self.outbox = outbox
        self.sessionmaker = sessionmaker
        self.batch = batch
        self.lease = lease
        self.poll_interval = poll_interval
        self.outage = outage
        self.database_timeout = database_timeout
        self.grace = grace
        self.listen = listen
        self.listen_url = listen_url
        self.waits_for: Literal["broker", "database"] | None = None
        """What the relay waits for while it is away."""
        self.last_success: datetime | None = None
        """When the last pass ended well, by this machine's clock."""
        self._observer = outbox.observer
        self._name = outbox.table.fullname
        self._courier = Courier(
            traced(publish, outbox.observer, self._name),
            publish_timeout=publish_timeout,
            retry=retry,
            max_attempts=max_attempts,
        )
        # What ends within the grace period is done in up to three steps of this length.
        self._patience = grace / 4
        self._woken = asyncio.Event()
        self._look_again: list[float] = []

    @property
    def name(self) -> str:
        return f"Relay {self.outbox.table.fullname}"

    @one_at_a_time
    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Work until `stop` is set or the task is cancelled.

        A broker or a database that is away is waited for; an error from the database that no waiting
        mends (a missing table, a missing right) ends the relay.
        """
        self._woken = asyncio.Event()  # of the loop that runs now
        listening = None
        if self.listen:
            listening = asyncio.ensure_future(
                self.outbox.wakeup.listen(
                    self.sessionmaker, self._wake, url=self.listen_url, backoff=self.outage
                )
            )
        try:
            await run_loop(
                self._tick,
                stop=stop,
                idle=self._idle,
                grace=self.grace,
                backoff=self.outage,
                is_outage=lambda error: isinstance(error, _BrokerAway) or is_passing(error),
                on_outage=self._note_outage,
            )
        finally:
            if listening is not None:
                await end(listening, patience=self.grace)

    async def run_once(self) -> RelayResult:
        """One pass: claim a batch, publish it, settle it. Nothing was claimed: all counts are 0.

        Cancelled, it marks what is known to have left and gives back the rest, unburnt. Errors of the
        database go on, but for those that waiting mends while the lease lasts.
        """

        async def give_back(claim: Claim | None) -> None:
            if claim is not None:
                await self.outbox.ledger.release(self.sessionmaker, claim)

        begun = time.monotonic()
        claiming = self.outbox.ledger.claim(self.sessionmaker, limit=self.batch, lease=self.lease)
        claim = await complete(
            within(claiming, self.database_timeout), patience=self._patience, undo=give_back
        )
        if claim is None:
            return RelayResult()
        if self._observer is not None:
            tell_claimed(self._observer, self._name, claim.events, since=begun)
        delivery = Delivery(claim)
        try:
            await self._deliver(delivery)
        except BaseException as error:
            try:
                await complete(self._settle(delivery), patience=self._patience)
            except Exception as second:  # noqa: BLE001  the first error matters more, and takes this one along
                error.add_note(f"the claim could not be settled and waits for its lease to end: {second!r}")
            raise
        return await complete(self._settle(delivery), patience=self._patience)

    async def _tick(self) -> bool:
        result = await self.run_once()
        if result.outage is not None:
            raise _BrokerAway(result.outage)
        self.waits_for = None
        self.last_success = datetime.now(UTC)
        return result.claimed > 0

    async def _idle(self) -> None:
        """Until a commit wakes us, a window after that, or the next poll."""
        now = time.monotonic()
        until = min([now + self.poll_interval.total_seconds(), *self._look_again[:1]])

        def look() -> None:
            self._look_again = [moment for moment in self._look_again if moment > until]
            self._woken.set()

        # Not wait_for: the task it makes would stand between a commit and its events.
        timer = asyncio.get_running_loop().call_later(until - now, look)
        try:
            await self._woken.wait()
        finally:
            timer.cancel()
        self._woken.clear()

    def _wake(self) -> None:
        now = time.monotonic()
        window = WINDOW.total_seconds()
        self._look_again = [now + window, now + 2 * window]
        self._woken.set()

    def _note_outage(self, error: Exception, delay: timedelta) -> None:
        self.waits_for = "broker" if isinstance(error, _BrokerAway) else "database"
        cause = error.__cause__ if isinstance(error, _BrokerAway) else error
        _log.warning("%s down, next try in %.1f s: %r", self.waits_for, delay.total_seconds(), cause)
        self._tell_outage(cause, delay)

    def _tell_outage(self, cause: BaseException | None, delay: timedelta) -> None:
        if self._observer is not None and self.waits_for is not None:
            self._observer(
                Outage(
                    service="relay",
                    name=self._name,
                    waits_for=self.waits_for,
                    error=type(cause).__name__,
                    retry_in=delay,
                )
            )

    async def _deliver(self, delivery: Delivery) -> None:
        """Deliver the claimed events, keeping the claim meanwhile."""
        delivering = asyncio.ensure_future(self._courier.deliver(delivery))
        keeping = asyncio.ensure_future(self._keep(delivery))
        tasks = {delivering, keeping}
        try:
            while not (delivering.done() or keeping.done() or delivery.deadline <= time.monotonic()):
                left = delivery.deadline - time.monotonic()
                await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if delivering.done():
                delivering.result()
            elif keeping.done() and (error := keeping.exception()) is not None:
                raise error
            else:
                delivery.lost = True
        finally:
            if not await end(delivering, keeping, patience=self._patience):
                _log.error("the publisher goes on although it was cancelled")

    async def _keep(self, delivery: Delivery) -> None:
        """Renew the claim in good time; returns when it is gone."""
        pause = self.lease / 3
        while True:
            await asyncio.sleep(pause.total_seconds())
            renewing = self.outbox.ledger.renew(self.sessionmaker, delivery.claim, lease=self.lease)
            try:
                renewed = await within(renewing, self.database_timeout)
            except Exception as error:
                if not is_passing(error):
                    raise
                _log.warning("could not renew a claim: %r", error)
                pause = min(pause, self.outage.first)
            else:
                if renewed is None:
                    return
                delivery.deadline = renewed

    async def _settle(self, delivery: Delivery) -> RelayResult:
        settled = not delivery.lost and await self._mark(delivery)
        if not settled:
            count = len(delivery.claim.events)
            if self._observer is not None:
                tell_lost(self._observer, self._name, delivery.claim.events)
            _log.warning("lost a claim of %d events: what was sent of it may be sent again", count)
            return RelayResult(released=count, claim_lost=True, outage=delivery.outage)
        if self._observer is not None:
            tell_settled(
                self._observer,
                self._name,
                delivery.claim.events,
                published=delivery.published,
                failures=delivery.failures,
                since=delivery.begun,
            )
        dead = [failure for failure in delivery.failures if failure.delay is None]
        for failure in dead:
            _log.error(
                "event %s is dead: %s",
                failure.event_id,
                failure.error or "its claims expired again and again",
            )
        retried = [(each, each.delay) for each in delivery.failures if each.delay is not None]
        for failure, delay in retried[:_MOST_LOGGED]:
            seconds = delay.total_seconds()
            _log.warning("event %s failed, next try in %.1f s: %s", failure.event_id, seconds, failure.error)
        if len(retried) > _MOST_LOGGED:
            _log.warning("and %d more events failed", len(retried) - _MOST_LOGGED)
        return RelayResult(
            published=len(delivery.published),
            failed=len(retried),
            dead=len(dead),
            released=len(delivery.open),
            outage=delivery.outage,
        )

    async def _mark(self, delivery: Delivery) -> bool:
        """Settle the claim, again and again while the database is away. False when the claim was lost.

        When an answer was lost, so that the claim may have been settled already, the events tell. When the
        server has crashed and taken the claim along, what was sent is marked without it.
        """
        ledger, claim, sessions = self.outbox.ledger, delivery.claim, self.sessionmaker
        whole = not delivery.open and not delivery.failures
        published = None if whole else delivery.published
        failed = 0
        while True:
            try:
                settling = ledger.settle(sessions, claim, published=published, failures=delivery.failures)
                if await within(settling, self.database_timeout):
                    return True
                if not failed:
                    return False
                finding_out = (ledger.rescue if whole else ledger.marked)(sessions, delivery.published)
                return await within(finding_out, self.database_timeout)
            except Exception as error:
                if not is_passing(error):
                    raise
                self.waits_for = "database"
                _log.warning("could not settle a claim: %r", error)
                if time.monotonic() >= delivery.deadline:
                    return False
                failed += 1
                delay = self.outage.delay(failed)
                self._tell_outage(error, delay)
                await asyncio.sleep(delay.total_seconds())


class _BrokerAway(Exception):
    """Ends a tick because of the broker; the cause is the publisher's error."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(repr(cause))
        self.__cause__ = cause
