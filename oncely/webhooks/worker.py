"""The webhook worker: takes what is due, and makes the attempts beside one another.

It has `concurrency` places, and one origin gets `per_endpoint` of them at most, so an endpoint that does
not answer holds its share and nothing more. A place that becomes free is given to the next origin in
turn. Scale-out is more workers, on any number of machines; a share is each worker's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, TypeAlias

from oncely.arguments import check_backoff, check_callable, check_count, check_duration, check_kind
from oncely.backoff import Backoff
from oncely.errors import SigningScopeUnknown
from oncely.loop import complete, end, is_cancelled, one_at_a_time, run_loop, within
from oncely.telemetry.records import Outage, WebhooksExpired
from oncely.transaction import Sessionmaker, check_sessionmaker, is_passing
from oncely.webhooks.delivery import Courier, WebhookAttempt
from oncely.webhooks.leases import EXPIRY_BATCH, Claimed, Lease
from oncely.webhooks.outbox import Webhooks
from oncely.webhooks.outcome import describe
from oncely.webhooks.sending import WebhookSender

__all__ = ["OnAttempt", "Resolver", "WebhookRun", "WebhookWorker"]

_log = logging.getLogger(__name__)

Resolver: TypeAlias = Callable[[str], Awaitable[WebhookSender]]
"""The sender for a signing scope, asked for every attempt, so that credentials rotate. It raises
SigningScopeUnknown for a scope that will never have any; anything else is tried again later."""

OnAttempt: TypeAlias = Callable[[WebhookAttempt], object]
"""Told of every attempt; plain or async."""


@dataclass(frozen=True, slots=True)
class WebhookRun:
    """How many attempts of one pass ended how (see `Outcome`); `overdue` ones expired without another."""

    delivered: int = 0
    retried: int = 0
    rejected: int = 0
    expired: int = 0
    quarantined: int = 0
    released: int = 0
    lost: int = 0
    overdue: int = 0

    @property
    def attempts(self) -> int:
        """All but the overdue ones."""
        failed = self.retried + self.rejected + self.expired + self.quarantined
        return self.delivered + failed + self.released + self.lost


class WebhookWorker:
    """Sends the webhooks of one table until it is stopped.

    Exactly one of `sender`, with credentials that are fixed, and `resolver`, which gives a sender for a
    signing scope. `lease` must be 5 seconds longer than the sender's deadline, or more. `retry` spaces
    the attempts of a webhook, `outage` the passes while the database is away: when it says nothing for
    `database_timeout`, it is. The table is looked at every `poll_interval`, and whenever a place becomes
    free. After a stop, what is in flight has `grace` to finish; then what was not sent is given back.

    `on_attempt` is told of each attempt, whose place stays taken until it returns; it may turn off an
    endpoint that said "HTTP 410".
    """

    def __init__(
        self,
        webhooks: Webhooks,
        sessionmaker: Sessionmaker,
        *,
        sender: WebhookSender | None = None,
        resolver: Resolver | None = None,
        concurrency: int = 32,
        per_endpoint: int = 4,
        lease: timedelta = timedelta(seconds=30),
        poll_interval: timedelta = timedelta(seconds=1),
        retry: Backoff = Backoff(
            first=timedelta(seconds=5), maximum=timedelta(hours=6), factor=3, jitter=0.3
        ),
        outage: Backoff = Backoff(first=timedelta(milliseconds=200), maximum=timedelta(seconds=30)),
        database_timeout: timedelta = timedelta(seconds=5),
        grace: timedelta = timedelta(seconds=10),
        on_attempt: OnAttempt | None = None,
    ) -> None:
        check_kind(webhooks, Webhooks, "webhooks")
        check_sessionmaker(sessionmaker)
        for name, function in (("resolver", resolver), ("on_attempt", on_attempt)):
            if function is not None:
                check_callable(function, name)
        check_count(concurrency, "concurrency")
        check_count(per_endpoint, "per_endpoint", least=0)
        if (sender is None) == (resolver is None):
            raise ValueError("give exactly one of sender and resolver")
        if not 1 <= per_endpoint < concurrency:
            raise ValueError(
                f"per_endpoint ({per_endpoint}) must be 1 or more and below concurrency ({concurrency}), "
                "or one endpoint could hold every place"
            )
        durations = {
            "lease": lease,
            "poll_interval": poll_interval,
            "database_timeout": database_timeout,
            "grace": grace,
        }
        for name, duration in durations.items():
            check_duration(duration, name)
        check_backoff(retry, "retry")
        check_backoff(outage, "outage")
        if lease > webhooks.horizon / _LEASES_IN_A_HORIZON:
            raise ValueError(
                f"lease ({lease}) must be {_LEASES_IN_A_HORIZON} times shorter than the horizon "
                f"({webhooks.horizon}), or the first failure could be the last"
            )
        if sender is not None:
            check_kind(sender, WebhookSender, "sender")
            _check_lease(lease, sender)
        self.webhooks = webhooks
        self.sessionmaker = sessionmaker
        self.concurrency = concurrency
        self.per_endpoint = per_endpoint
        self.lease = lease
        self.poll_interval = poll_interval
        self.outage = outage
        self.database_timeout = database_timeout
        self.grace = grace
        self.waits_for: Literal["database"] | None = None
        """What the worker waits for while it is away."""
        self.last_success: datetime | None = None
        """When the table was last looked at, by this machine's clock."""
        self._sender = sender
        self._resolver = resolver
        self._on_attempt = on_attempt
        self._courier = Courier(
            webhooks,
            sessionmaker,
            self._find_sender,
            duration=lease,
            retry=retry,
            outage=outage,
            database_timeout=database_timeout,
            grace=grace,
        )
        self._flying: dict[asyncio.Task[WebhookAttempt], str] = {}
        """The attempts that are being made, each with its origin."""
        self._landed = asyncio.Event()
        self._last_origin = ""

    @property
    def name(self) -> str:
        """What a worker's log and health call it."""
        return f"WebhookWorker {self.webhooks.table.fullname}"

    @one_at_a_time
    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Work until `stop` is set or the task is cancelled.

        A database that is away is waited for; an error from it that no waiting mends (a missing table, a
        missing right) ends the worker.
        """
        try:
            await run_loop(
                self._tick,
                stop=stop,
                idle=self._idle,
                grace=self.grace,
                backoff=self.outage,
                is_outage=is_passing,
                on_outage=self._note_outage,
            )
            if self._flying:
                await asyncio.wait(self._flying, timeout=self.grace.total_seconds())
        finally:
            await end(*self._flying)
            ended, self._flying = self._flying, {}  # a worker that runs again begins anew
        _raise_first(ended)

    async def run_once(self) -> WebhookRun:
        """One pass: claim what is due, up to `concurrency`, make those attempts, wait for all of them.

        Cancelled, it gives back what was not sent. Errors of the database go on.
        """
        claimed = await self._claim(self.concurrency, busy={})
        tasks = [asyncio.ensure_future(self._attempt(lease)) for lease in claimed.leases]
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            await end(*tasks)
        counts = Counter(task.result().outcome for task in tasks)
        return WebhookRun(
            delivered=counts["delivered"],
            retried=counts["retry"],
            rejected=counts["rejected"],
            expired=counts["expired"],
            quarantined=counts["quarantined"],
            released=counts["released"],
            lost=counts["lost"],
            overdue=claimed.expired,
        )

    async def _tick(self) -> bool:
        self._collect()
        free = self.concurrency - len(self._flying)
        if not free:
            return False
        claimed = await self._claim(free, busy=Counter(self._flying.values()))
        self.waits_for = None
        self.last_success = datetime.now(UTC)
        for lease in claimed.leases:
            task = asyncio.ensure_future(self._attempt(lease))
            self._flying[task] = lease.routing.origin
            task.add_done_callback(lambda _: self._landed.set())
        return claimed.expired == EXPIRY_BATCH

    async def _idle(self) -> None:
        """Until a place becomes free, and a moment for more of them; or until the next poll."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.poll_interval.total_seconds()):
                await self._landed.wait()
                await asyncio.sleep(_MOMENT)
        self._landed.clear()

    def _note_outage(self, error: Exception, delay: timedelta) -> None:
        self.waits_for = "database"
        _log.warning("database down, next try in %.1f s: %s", delay.total_seconds(), describe(error))
        if (observer := self.webhooks.observer) is not None:
            observer(
                Outage(
                    service="webhooks",
                    name=self.webhooks.table.fullname,
                    waits_for="database",
                    error=describe(error),
                    retry_in=delay,
                )
            )

    def _collect(self) -> None:
        """Forget the attempts that have ended. Raises what one of them raised."""
        ended = [task for task in self._flying if task.done()]
        for task in ended:
            del self._flying[task]
        _raise_first(ended)

    async def _claim(self, limit: int, *, busy: Mapping[str, int]) -> Claimed:
        async def give_back(claimed: Claimed) -> None:
            await asyncio.gather(*(self._courier.release(lease) for lease in claimed.leases))

        claiming = self.webhooks.leases.claim(
            self.sessionmaker,
            limit=limit,
            share=self.per_endpoint,
            busy=busy,
            duration=self.lease,
            after=self._last_origin,
        )
        claimed = await complete(
            within(claiming, self.database_timeout), patience=self.grace / 2, undo=give_back
        )
        if claimed.expired and (observer := self.webhooks.observer) is not None:
            observer(WebhooksExpired(webhooks=self.webhooks.table.fullname, count=claimed.expired))
        if claimed.leases:
            origins = (lease.routing.origin for lease in claimed.leases)
            # Those after the last one came first, then those from the beginning.
            self._last_origin = max(origins, key=lambda origin: (origin <= self._last_origin, origin))
        return claimed

    async def _attempt(self, lease: Lease) -> WebhookAttempt:
        attempt = await self._courier.deliver(lease)
        if self._on_attempt is not None:
            try:
                answer = self._on_attempt(attempt)
                if inspect.isawaitable(answer):
                    await asyncio.ensure_future(answer)  # a task of its own, that it may cancel
            except Exception:  # noqa: BLE001  it cannot change what was recorded
                _log.exception("on_attempt failed on webhook %s", attempt.id)
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                _log.exception("on_attempt was cancelled from within on webhook %s", attempt.id)
        return attempt

    async def _find_sender(self, scope: str | None) -> WebhookSender:
        if self._sender is not None:
            if scope is not None:
                raise SigningScopeUnknown("this worker's sender takes no signing scope")
            return self._sender
        assert self._resolver is not None  # noqa: S101  one of the two is there
        if scope is None:
            raise SigningScopeUnknown("this worker's resolver needs a signing scope")
        sender = await self._resolver(scope)
        try:
            _check_lease(self.lease, sender)
        except ValueError as error:
            _log.error("the resolver's sender is not used: %s", error)
            raise
        return sender


_MARGIN = timedelta(seconds=5)
"""So much longer than the sender's deadline a lease must be."""

_LEASES_IN_A_HORIZON = 24

_MOMENT = 0.01
"""Seconds in which places that become free are given away together."""


def _check_lease(lease: timedelta, sender: WebhookSender) -> None:
    if lease < sender.deadline + _MARGIN:
        raise ValueError(
            f"lease ({lease}) must be {_MARGIN} longer than the sender's deadline ({sender.deadline}), "
            "or an attempt could outlive it"
        )


def _raise_first(ended: Iterable[asyncio.Task[WebhookAttempt]]) -> None:
    """Raise what one of these attempts raised, if any did."""
    errors = [task.exception() for task in ended if not task.cancelled()]
    for error in filter(None, errors):
        raise error
