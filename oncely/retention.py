"""Retention: finished rows are deleted in bounded batches.

What is finished, each room says in its own `prune`: published events, keys past their time, handled
messages, effects that are done or failed. Here is what they have in common: how a cutoff is given,
that no statement deletes more than a batch, and the service that prunes them all for ever, each batch
in a short transaction of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Protocol

from sqlalchemy import DateTime, Interval, Table
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.types import TypeEngine

from oncely.arguments import (
    LONGEST,
    check_backoff,
    check_count,
    check_duration,
    check_kind,
    check_time,
    check_wait,
)
from oncely.backoff import Backoff
from oncely.loop import one_at_a_time, run_loop, within
from oncely.telemetry.observer import Observer, guarded
from oncely.telemetry.records import Outage, RowsPruned
from oncely.transaction import Sessionmaker, check_sessionmaker, is_passing

__all__ = ["CUTOFF", "CUTOFF_TIME", "Prunable", "Retention", "cutoff_parameters", "delete_in_batches"]

_log = logging.getLogger(__name__)

BATCH = 1_000
"""The most rows that one statement deletes."""

CUTOFF: dict[str, TypeEngine[Any] | type[TypeEngine[Any]]] = {
    "cutoff": DateTime(timezone=True),
    "age": Interval,
}
"""The parameters of a statement that says CUTOFF_TIME."""

CUTOFF_TIME = "coalesce(CAST(:cutoff AS timestamptz), statement_timestamp() - CAST(:age AS interval))"
"""The time before which rows are old, as a statement says it.

The casts are for psycopg, which sends what is missing without a type: an age would be taken for a time.
"""


class Prunable(Protocol):
    """What can be pruned: an Outbox, IdempotencyKeys, an Inbox, Effects, Webhooks."""

    @property
    def table(self) -> Table: ...

    async def prune(self, session: AsyncSession, *, older_than: timedelta, limit: int) -> int:
        """Delete up to `limit` finished rows that are older; returns how many."""
        ...


class Retention:
    """Prunes each of `keep` of what is finished and older than its age, every `interval`.

        Retention(sessions, {outbox: timedelta(days=7), keys: timedelta(days=1)})

    Any number of them may run: they pass over each other's rows. A database that has not answered a
    batch for `database_timeout` is away, and is tried again by `outage`. The `observer` is told
    how many rows went (`oncely.telemetry.RowsPruned`).
    """

    def __init__(
        self,
        sessionmaker: Sessionmaker,
        keep: Mapping[Prunable, timedelta],
        *,
        interval: timedelta = timedelta(minutes=1),
        batch: int = BATCH,
        outage: Backoff = Backoff(),
        database_timeout: timedelta = timedelta(seconds=30),
        grace: timedelta = timedelta(seconds=10),
        observer: Observer | None = None,
    ) -> None:
        check_sessionmaker(sessionmaker)
        check_count(batch, "batch")
        durations = {"interval": interval, "database_timeout": database_timeout, "grace": grace}
        for name, duration in durations.items():
            check_duration(duration, name)
        check_backoff(outage, "outage")
        check_kind(keep, Mapping, "keep")
        for prunable, age in keep.items():
            if not callable(getattr(prunable, "prune", None)):
                raise TypeError(f"keep says what is pruned, such as an Outbox, and {prunable!r} cannot be")
            check_wait(age, f"the age for {prunable.table.name}")
        self.sessionmaker = sessionmaker
        self.keep = dict(keep)
        self.interval = interval
        self.batch = batch
        self.outage = outage
        self.database_timeout = database_timeout
        self.grace = grace
        self._observer = guarded(observer)
        self.waits_for: Literal["database"] | None = None
        """What it waits for while it is away."""
        self.last_success: datetime | None = None
        """When it last pruned them all, by this machine's clock."""

    @property
    def name(self) -> str:
        """What a worker's log and health call it."""
        return "Retention " + ", ".join(prunable.table.fullname for prunable in self.keep)

    @one_at_a_time
    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Work until `stop` is set or the task is cancelled; a database that is away is waited for."""
        await run_loop(
            self._tick,
            stop=stop,
            idle=lambda: asyncio.sleep(self.interval.total_seconds()),
            grace=self.grace,
            backoff=self.outage,
            is_outage=is_passing,
            on_outage=self._note_outage,
        )

    async def run_once(self) -> dict[str, int]:
        """One batch of each, in a transaction of its own; how many rows went, by the table's full name."""
        deleted = {}
        for prunable, age in self.keep.items():
            begun = time.monotonic()
            count = await within(self._prune(prunable, age), self.database_timeout)
            deleted[prunable.table.fullname] = count
            if self._observer is not None and count:
                duration = timedelta(seconds=time.monotonic() - begun)
                self._observer(RowsPruned(table=prunable.table.fullname, count=count, duration=duration))
        return deleted

    async def _prune(self, prunable: Prunable, age: timedelta) -> int:
        async with self.sessionmaker() as session, session.begin():
            return await prunable.prune(session, older_than=age, limit=self.batch)

    async def _tick(self) -> bool:
        deleted = await self.run_once()
        self.waits_for = None
        self.last_success = datetime.now(UTC)
        return self.batch in deleted.values()

    def _note_outage(self, error: Exception, delay: timedelta) -> None:
        self.waits_for = "database"
        _log.warning("database down, next try in %.1f s: %r", delay.total_seconds(), error)
        if self._observer is not None:
            self._observer(
                Outage(
                    service="retention",
                    name="",
                    waits_for="database",
                    error=type(error).__name__,
                    retry_in=delay,
                )
            )


def cutoff_parameters(older_than: timedelta | datetime) -> dict[str, Any]:
    """The values of CUTOFF: an age is counted back from now by the database's clock.

    Raises ValueError for a negative age and for a time without a time zone.
    """
    if isinstance(older_than, timedelta):
        check_wait(older_than, "older_than")
        return {"cutoff": None, "age": min(older_than, LONGEST)}
    if older_than is None:
        raise TypeError("older_than must be a timedelta or a datetime, not NoneType")
    check_time(older_than, "older_than")
    return {"cutoff": older_than, "age": None}


async def delete_in_batches(delete: Callable[[int], Awaitable[int]], limit: int | None) -> int:
    """Call `delete` with a batch's size until it deletes fewer or `limit` is reached; returns the sum."""
    if limit is not None:
        check_count(limit, "limit", least=0)
    total = 0
    while limit is None or total < limit:
        size = BATCH if limit is None else min(BATCH, limit - total)
        deleted = await delete(size)
        total += deleted
        if deleted < size:
            break
    return total
