"""Relay: the worker that moves events out of an outbox, alone or beside others of its kind.

A *pass* claims one batch, publishes it and settles it. What can go wrong with a publish is of two kinds:

- the *broker* is away (a connection error, a timeout, PublisherUnavailable). The pass ends, nothing is
  counted against any event, and the relay backs off.
- an *event* is bad (any other error). It is found by publishing one by one, its try is counted, it is
  tried again later by the database's clock, and after `max_attempts` it is dead: kept, listed,
  replayable. `Reject` makes it dead at once.

A bad event may look like a broken broker. So an event that failed alone with the broker's error, and
fails so again after something else passed, is counted.

The claim is renewed while the publisher works. A relay that lost its claim has been replaced: it stops
publishing, marks nothing and says so. Scale-out is more relays, on any number of machines.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal
from uuid import UUID

from oncely.backoff import Backoff
from oncely.errors import PublisherUnavailable, PublishFailed, Reject
from oncely.event import Event, Publisher
from oncely.ledger import Claim, Failure
from oncely.loop import complete, run_loop
from oncely.outbox import Outbox, sent
from oncely.transaction import Sessionmaker, is_unavailable
from oncely.wakeup import WINDOW

__all__ = ["Relay", "RelayResult"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RelayResult:
    """What one pass did with the events it claimed.

    `failed` will be tried again, `dead` will not, `released` were given back untried or unmarked.
    `claim_lost`: the claim had expired, nothing was marked. `outage` is the broker's error that ended
    the pass.
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

    `batch` events are claimed at a time for `lease`, which is renewed while the publisher works, for
    `publish_timeout` at most. The outbox is looked at every `poll_interval`, and at once when a commit
    wakes the relay by NOTIFY: `listen=False` where a pooler stands before the server, or `listen_url`
    for a way past it. `retry` spaces the tries of an event, `outage` the passes while the broker or the
    database is away. After a stop, what is in flight has `grace` to finish, or it is released.
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
        grace: timedelta = timedelta(seconds=10),
        listen: bool = True,
        listen_url: str | None = None,
    ) -> None:
        if batch < 1 or max_attempts < 1:
            raise ValueError(f"batch ({batch}) and max_attempts ({max_attempts}) must be 1 or more")
        durations = {"lease": lease, "publish_timeout": publish_timeout, "poll_interval": poll_interval}
        for name, duration in durations.items():
            if duration <= timedelta(0):
                raise ValueError(f"{name} must be positive, not {duration}")
        self.outbox = outbox
        self.sessionmaker = sessionmaker
        self.publish = publish
        self.batch = batch
        self.lease = lease
        self.publish_timeout = publish_timeout
        self.poll_interval = poll_interval
        self.retry = retry
        self.outage = outage
        self.max_attempts = max_attempts
        self.grace = grace
        self.listen = listen
        self.listen_url = listen_url
        self.waits_for: Literal["broker", "database"] | None = None
        """What the relay waits for while it is away."""
        self.last_success: datetime | None = None
        """When the last pass ended well, by this machine's clock."""
        self._woken = asyncio.Event()
        self._look_again: list[float] = []
        # Events that failed alone with the broker's error, and how many publishes had passed until then.
        self._accused: dict[UUID, int] = {}
        self._passed = 0
        self._outages = 0

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Work until `stop` is set or the task is cancelled.

        A broker or a database that is away is waited for; every other error from the database ends the
        relay, since it is a bug or a missing migration.
        """
        work = asyncio.ensure_future(
            run_loop(
                self._tick,
                stop=stop,
                idle=self._idle,
                grace=self.grace,
                backoff=self.outage,
                is_outage=lambda error: isinstance(error, _BrokerAway) or is_unavailable(error),
                on_outage=self._note_outage,
            )
        )
        listening = None
        if self.listen:
            listening = asyncio.ensure_future(
                self.outbox.wakeup.listen(
                    self.sessionmaker, self._wake, url=self.listen_url, backoff=self.outage
                )
            )
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait({work})
            raise
        finally:
            if listening is not None:
                listening.cancel()
                await asyncio.wait({listening})

    async def run_once(self) -> RelayResult:
        """One pass: claim a batch, publish it, settle it. Nothing was claimed: all counts are 0.

        Cancelled, it gives back what it holds, unburnt. Errors of the database go on.
        """

        async def give_back(claim: Claim | None) -> None:
            if claim is not None:
                await self.outbox.ledger.release(self.sessionmaker, claim)

        claiming = self.outbox.ledger.claim(self.sessionmaker, limit=self.batch, lease=self.lease)
        claim = await complete(claiming, patience=self.grace, undo=give_back)
        if claim is None:
            return RelayResult()
        attempt = _Attempt(claim)
        try:
            await self._publish(attempt)
        except asyncio.CancelledError:
            # What is known to have left is marked; the rest is offered again at once.
            await complete(self._settle(attempt), patience=self.grace)
            raise
        return await complete(self._settle(attempt), patience=self.grace)

    async def _tick(self) -> bool:
        result = await self.run_once()
        if result.outage is not None:
            self._outages += 1
            raise _BrokerAway(result.outage)
        self.waits_for = None
        self._outages = 0
        self.last_success = datetime.now(UTC)
        return result.claimed > 0

    async def _idle(self) -> None:
        """Until a commit wakes us, a window after that, or the next poll."""
        now = time.monotonic()
        until = min([now + self.poll_interval.total_seconds(), *self._look_again[:1]])
        try:
            await asyncio.wait_for(self._woken.wait(), max(0.0, until - now))
        except TimeoutError:
            self._look_again = [moment for moment in self._look_again if moment > until]
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

    async def _publish(self, attempt: _Attempt) -> None:
        """Publish the claimed events, keeping the claim; what became of each is noted in `attempt`."""
        for event in attempt.claim.events:
            if event.attempt > self.max_attempts:
                # Its claim expired again and again: whoever publishes it does not live to tell.
                attempt.fail(event, "RelayDied: no relay survived its publishing", None)
        if not attempt.open:
            return
        publishing = asyncio.ensure_future(self._publish_open(attempt))
        keeping = asyncio.ensure_future(self._keep(attempt.claim))
        try:
            await asyncio.wait({publishing, keeping}, return_when=asyncio.FIRST_COMPLETED)
            if publishing.done():
                publishing.result()
            elif keeping.exception() is None:
                attempt.claim_lost = True
            else:
                keeping.result()
        finally:
            for task in (publishing, keeping):
                task.cancel()
            await asyncio.wait({publishing, keeping}, timeout=self.grace.total_seconds())

    async def _keep(self, claim: Claim) -> None:
        """Renew the claim in good time; returns when it is lost."""
        deadline = claim.deadline
        interval = self.lease.total_seconds() / 3
        while True:
            await asyncio.sleep(interval)
            try:
                renewed = await self.outbox.ledger.renew(self.sessionmaker, claim, lease=self.lease)
                if renewed is None:
                    return
                deadline = renewed
            except Exception as error:
                if not is_unavailable(error):
                    raise
                if time.monotonic() > deadline:
                    return  # nobody has confirmed the claim for a whole lease
                _log.warning("could not renew a claim: %r", error)
                interval = min(interval, 1.0)

    async def _publish_open(self, attempt: _Attempt) -> None:
        """As a batch first; one by one where the batch does not tell which event is bad."""
        try:
            async with asyncio.timeout(self.publish_timeout.total_seconds()):
                await self.publish(attempt.open)
        except PublishFailed as failed:
            left = sent(attempt.open, failed)
            for event in attempt.open:
                if (error := failed.failures.get(event.id)) is not None:
                    self._count(attempt, event, error)
            attempt.publish(left)
            self._passed += bool(left)
            if not left and not attempt.failures:
                attempt.outage = failed  # it sent nothing and blames nobody
        except _BROKER_AWAY as error:
            if len(attempt.open) == 1:
                self._judge(attempt, attempt.open[0], error)
            elif self._outages > 0:
                await self._one_by_one(attempt)
            else:
                attempt.outage = error
        except Exception as error:  # noqa: BLE001  the user's publisher may raise anything; it is counted and kept
            if len(attempt.open) == 1:
                self._count(attempt, attempt.open[0], error)
            else:
                await self._one_by_one(attempt)
        else:
            attempt.publish(attempt.open)
            self._passed += 1

    async def _one_by_one(self, attempt: _Attempt) -> None:
        """Publish each open event alone, in order; after the failure of a key nothing more of it.

        When an event fails with the broker's error, the next one shows whether it was the broker.
        """
        broken: set[str] = set()
        doubted: tuple[Event, Exception] | None = None
        for event in attempt.open:
            if event.key in broken:
                continue
            try:
                async with asyncio.timeout(self.publish_timeout.total_seconds()):
                    await self.publish([event])
            except _BROKER_AWAY as error:
                if doubted is not None:
                    attempt.outage = error
                    return
                doubted = (event, error)
            except PublishFailed as failed:
                self._count(attempt, event, failed.failures.get(event.id, failed))
            except Exception as error:  # noqa: BLE001  as above
                self._count(attempt, event, error)
            else:
                attempt.publish([event])
                self._passed += 1
                if doubted is not None:
                    self._count(attempt, *doubted)
                    doubted = None
                continue
            if event.key is not None:
                broken.add(event.key)
        if doubted is not None:
            self._judge(attempt, *doubted)

    def _judge(self, attempt: _Attempt, event: Event, error: Exception) -> None:
        """An event failed alone with the broker's error: whose fault is it?"""
        passed_then = self._accused.get(event.id)
        if passed_then is not None and self._passed > passed_then:
            self._count(attempt, event, error)
            return
        if len(self._accused) >= 1_000:
            self._accused.clear()
        self._accused[event.id] = self._passed
        attempt.outage = error

    def _count(self, attempt: _Attempt, event: Event, error: Exception) -> None:
        """The event's try has failed: note when it is tried again, if it is."""
        self._accused.pop(event.id, None)
        final = isinstance(error, Reject) or event.attempt >= self.max_attempts
        attempt.fail(event, _describe(error), None if final else self.retry.delay(event.attempt))

    async def _settle(self, attempt: _Attempt) -> RelayResult:
        claim, failures = attempt.claim, attempt.failures
        dead = sum(failure.delay is None for failure in failures)
        released = len(attempt.open)
        if attempt.claim_lost:
            settled = False
        elif not released and not failures:
            settled = await self.outbox.ledger.settle(self.sessionmaker, claim)
        else:
            settled = await self.outbox.ledger.settle(
                self.sessionmaker, claim, published=attempt.published, failures=failures
            )
        if not settled:
            _log.warning("lost a claim of %d events: they will be published again", len(claim.events))
            return RelayResult(released=len(claim.events), claim_lost=True, outage=attempt.outage)
        for failure in failures:
            if failure.delay is None:
                _log.error("event %s is dead: %s", failure.event_id, failure.error)
        return RelayResult(
            published=len(attempt.published),
            failed=len(failures) - dead,
            dead=dead,
            released=released,
            outage=attempt.outage,
        )


@dataclass(slots=True)
class _Attempt:
    """A claim and what became of its events: `open` are those that neither left nor failed so far."""

    claim: Claim
    open: list[Event] = field(init=False)
    published: list[UUID] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    claim_lost: bool = False
    outage: Exception | None = None

    def __post_init__(self) -> None:
        self.open = list(self.claim.events)

    def publish(self, events: Sequence[Event]) -> None:
        self.published += [event.id for event in events]
        self._close({event.id for event in events})

    def fail(self, event: Event, error: str, delay: timedelta | None) -> None:
        self.failures.append(Failure(event.id, error, delay))
        self._close({event.id})

    def _close(self, ids: set[UUID]) -> None:
        self.open = [event for event in self.open if event.id not in ids]


class _BrokerAway(Exception):
    """Ends a tick because of the broker; the cause is the publisher's error."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(repr(cause))
        self.__cause__ = cause


_BROKER_AWAY = (OSError, TimeoutError, PublisherUnavailable)  # ConnectionError is an OSError
_LONGEST_ERROR = 500


def _describe(error: Exception) -> str:
    """The error's class and its message, bounded, in a form that a text column takes."""
    text = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
