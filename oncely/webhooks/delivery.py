"""Delivery: one attempt of one webhook, from the sealed row to what is recorded of it.

    open ─▶ credentials ─▶ address, connection, signature ─▶ still ours? ─▶ request ─▶ record

Whatever goes wrong has one of four meanings. It may go better: again later. The endpoint wants no more of
it: rejected. It cannot be sent as it is: quarantined, alone. The lease is not ours any more: nothing is
recorded. Of errors only the class is kept: their texts quote what is sealed.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, TypeAlias
from uuid import UUID

import httpx

from oncely.backoff import Backoff
from oncely.errors import AddressRefused, SealBroken, SealingKeyMissing, SigningScopeUnknown
from oncely.loop import complete, is_cancelled, within
from oncely.telemetry.records import WebhookAttempted
from oncely.transaction import Sessionmaker, is_passing
from oncely.webhooks.leases import Lease, Standing
from oncely.webhooks.outbox import Webhooks
from oncely.webhooks.outcome import Outcome, describe, judge
from oncely.webhooks.sending import GOODBYE, Reply, WebhookSender

__all__ = ["Courier", "SenderFor", "WebhookAttempt"]

_log = logging.getLogger(__name__)

SenderFor: TypeAlias = Callable[[str | None], Awaitable[WebhookSender]]
"""The sender for a signing scope. It raises SigningScopeUnknown for one that it will never have."""


@dataclass(frozen=True, slots=True)
class WebhookAttempt:
    """How one attempt ended. `error` is a class or "HTTP n"; `attempt` counts from 1."""

    id: UUID
    origin: str
    caller: str
    account: str | None
    type: str
    key: str
    attempt: int
    outcome: Outcome
    error: str | None
    seconds: float


class Courier:
    """Makes attempts: `sender_for` gives the credentials, `retry` spaces what fails.

    `outage` spaces the tries to record an ending while the database is away, that is, says nothing for
    `database_timeout`; `grace` bounds them when the courier is cancelled.
    """

    def __init__(
        self,
        webhooks: Webhooks,
        sessionmaker: Sessionmaker,
        sender_for: SenderFor,
        *,
        duration: timedelta,
        retry: Backoff,
        outage: Backoff,
        database_timeout: timedelta,
        grace: timedelta,
    ) -> None:
        self._webhooks = webhooks
        self._sessionmaker = sessionmaker
        self._sender_for = sender_for
        self._duration = duration
        self._retry = retry
        self._outage = outage
        self._database_timeout = database_timeout
        self._grace = grace

    async def deliver(self, lease: Lease) -> WebhookAttempt:
        """Make the attempt and record how it ended.

        Cancelled, it gives the lease back if nothing was sent yet; if something was, the attempt has
        failed, unless the endpoint had answered. Errors of the database that waiting does not mend go on.
        """
        attempt = _Attempt(lambda: self._look(lease), lease)
        try:
            ending = await self._in_task_of_its_own(lease, attempt)
        except asyncio.CancelledError:
            ending = _Ending("released")
            if attempt.sent:
                ending = self._cut_short(lease, attempt, "Interrupted")
            try:
                self._tell(lease, await within(self._record(lease, ending), self._grace / 2), ending.error)
            except TimeoutError:
                _log.warning("webhook %s: its lease was not given back in time", lease.id)
            raise
        outcome = await complete(self._record(lease, ending), patience=self._grace / 2)
        self._tell(lease, outcome, ending.error)
        return _report(lease, outcome, ending.error)

    async def release(self, lease: Lease) -> None:
        """Give a lease back that nothing was done with."""
        await self._record(lease, _Ending("released"))

    def _tell(self, lease: Lease, outcome: Outcome, error: str | None) -> None:
        if (observer := self._webhooks.observer) is not None:
            observer(
                WebhookAttempted(
                    webhooks=self._webhooks.table.fullname,
                    type=lease.routing.type,
                    outcome=outcome,
                    attempt=lease.attempt,
                    error=error or "",
                    duration=timedelta(seconds=time.monotonic() - lease.started_at),
                )
            )

    async def _in_task_of_its_own(self, lease: Lease, attempt: _Attempt) -> _Ending:
        """What is the user's there may cancel its own task (a leaked timeout): that is a failure, no more."""
        try:
            return await asyncio.ensure_future(self._make(lease, attempt))
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            return self._cut_short(lease, attempt, describe(error))

    async def _make(self, lease: Lease, attempt: _Attempt) -> _Ending:
        try:
            content = self._webhooks.open(lease)
        except (SealBroken, SealingKeyMissing) as error:
            return _Ending("quarantined", describe(error))
        cut = lease.ends_at - 1
        try:
            async with asyncio.timeout(cut - time.monotonic()):
                sender = await self._sender_for(lease.routing.signing_scope)
            if time.monotonic() + (sender.deadline + GOODBYE).total_seconds() > cut:
                raise TimeoutError("the credentials came too late for an attempt")
        except SigningScopeUnknown as error:
            return _Ending("quarantined", describe(error))
        except Exception as error:  # noqa: BLE001  the user's resolver may raise anything; its class is kept
            return self._again(lease, describe(error))
        try:
            async with asyncio.timeout(cut - time.monotonic()):
                return self._answered(lease, await sender.send(lease.id, content, attempt))
        except _Stopped as stopped:
            return stopped.ending
        except _DatabaseFailed as failed:
            raise failed.error from None
        except AddressRefused as error:
            return _Ending("quarantined", describe(error))
        except (httpx.TransportError, TimeoutError) as error:
            return self._cut_short(lease, attempt, describe(error))
        except Exception as error:  # noqa: BLE001  a signer may raise anything; it must not end the worker
            where = "".join(traceback.format_tb(error.__traceback__))  # the places, not what was said there
            _log.error("webhook %s could not be made: %s\n%s", lease.id, describe(error), where)
            return self._cut_short(lease, attempt, describe(error))

    def _cut_short(self, lease: Lease, attempt: _Attempt, error: str) -> _Ending:
        """It ended in the middle: if the endpoint had answered by then, that counts."""
        if attempt.reply is not None:
            return self._answered(lease, attempt.reply)
        return self._again(lease, error)

    def _answered(self, lease: Lease, reply: Reply) -> _Ending:
        verdict = judge(reply.status)
        if verdict == "delivered":
            return _Ending("delivered")
        error = f"HTTP {reply.status}"
        if verdict == "rejected":
            return _Ending("rejected", error)
        return self._again(lease, error, reply.retry_after)

    def _again(self, lease: Lease, error: str, at_least: timedelta | None = None) -> _Ending:
        delay = self._retry.delay(lease.attempt)
        return _Ending("retry", error, delay if at_least is None else max(delay, at_least))

    async def _record(self, lease: Lease, ending: _Ending) -> Outcome:
        """Write the ending down by the lease's token; while the database is away, until the lease ends."""
        failures = 0
        while True:
            try:
                outcome = await within(self._write(lease, ending), self._database_timeout)
                if outcome != "lost" or not failures:
                    return outcome
                # It may have been written before, and the answer was lost.
                return await within(self._find_out(lease, ending), self._database_timeout)
            except Exception as error:
                if not is_passing(error):
                    raise
                failures += 1
                delay = self._outage.delay(failures).total_seconds()
                if time.monotonic() + delay >= lease.ends_at:
                    _log.warning("webhook %s: no database to record its end: %s", lease.id, describe(error))
                    return "lost"
                await asyncio.sleep(delay)

    async def _write(self, lease: Lease, ending: _Ending) -> Outcome:
        leases, sessionmaker = self._webhooks.leases, self._sessionmaker
        if ending.outcome == "lost":
            return "lost"
        if ending.outcome == "released":
            return "released" if await leases.release(sessionmaker, lease) else "lost"
        if ending.outcome == "retry":
            became = await leases.retry(
                sessionmaker, lease, ending.error or "", ending.delay, duration=self._duration
            )
            return "lost" if became is None else "retry" if became == "pending" else "expired"
        recorded = await leases.finish(sessionmaker, lease, ending.outcome, ending.error)
        return ending.outcome if recorded else "lost"

    async def _find_out(self, lease: Lease, ending: _Ending) -> Outcome:
        state = await self._webhooks.leases.recorded(self._sessionmaker, lease, ending.error)
        if state == ending.outcome:
            return ending.outcome
        if ending.outcome == "retry" and state in ("pending", "expired"):
            return "retry" if state == "pending" else "expired"
        return "lost"

    async def _look(self, lease: Lease) -> Standing:
        looking = self._webhooks.leases.look(self._sessionmaker, lease)
        return await within(looking, self._database_timeout)


@dataclass(frozen=True, slots=True)
class _Ending:
    """How an attempt ended, before that is written down; `delay` is for a retry."""

    outcome: Literal["delivered", "retry", "rejected", "quarantined", "released", "lost"]
    error: str | None = None
    delay: timedelta = timedelta(0)


class _Attempt:
    """What the sender asks and tells: `sent` when the request may have begun, `reply` when it is answered."""

    def __init__(self, look: Callable[[], Awaitable[Standing]], lease: Lease) -> None:
        self.sent = False
        self.reply: Reply | None = None
        self._look = look
        self._lease = lease

    def now(self) -> datetime:
        return self._lease.now()

    async def confirm(self) -> None:
        """The database's last word: the lease is ours and live, and there is time."""
        try:
            standing = await self._look()
        except Exception as error:
            if not is_passing(error):
                raise _DatabaseFailed(error) from error
            raise _Stopped(_Ending("released", describe(error))) from None
        if standing != "ours":
            raise _Stopped(_Ending("lost" if standing == "lost" else "released"))
        self.sent = True

    def answered(self, reply: Reply) -> None:
        self.reply = reply


class _Stopped(Exception):
    """The attempt must not be made."""

    def __init__(self, ending: _Ending) -> None:
        super().__init__(ending)
        self.ending = ending


class _DatabaseFailed(Exception):
    """An error of the database, on its way through the sender."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _report(lease: Lease, outcome: Outcome, error: str | None) -> WebhookAttempt:
    routing = lease.routing
    level = logging.INFO if outcome in ("delivered", "retry", "released") else logging.WARNING
    _log.log(level, "webhook %s to %s: %s (%s)", lease.id, routing.origin, outcome, error)
    return WebhookAttempt(
        id=lease.id,
        origin=routing.origin,
        caller=routing.caller,
        account=routing.account,
        type=routing.type,
        key=routing.key,
        attempt=lease.attempt,
        outcome=outcome,
        error=error,
        seconds=time.monotonic() - lease.started_at,
    )
