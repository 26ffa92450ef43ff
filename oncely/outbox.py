"""Outbox: an event exists if and only if the change it describes was committed.

`emit` writes the event in the caller's transaction. `relay_once` publishes one batch of what was
committed, in order per key, and marks it. Between the two stands nothing but the table, so a crash
at any point loses nothing; after a crash an event may be published twice, with the same id.

    states    ready ─▶ in flight ─▶ published          deferred: `due_at` in the future
                └─▶ failed, tried again when due ─▶ … ─▶ dead
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import MetaData, Table

from oncely.arguments import LONGEST, check_async, check_count, check_duration, check_id
from oncely.cancellation import Cancellation
from oncely.choice import OnDead
from oncely.deadletters import DeadEvent, DeadLetters, Which
from oncely.emission import Emission
from oncely.errors import ClaimLost, PublishFailed
from oncely.event import Event, NewEvent, Publisher, uuid7
from oncely.ledger import Claim, Ledger
from oncely.loop import complete
from oncely.pruning import Pruning
from oncely.resending import Resending
from oncely.stats import OutboxStats, Statistics
from oncely.tables import outbox_tables
from oncely.telemetry.batches import tell_claimed, tell_lost, tell_settled, traced
from oncely.telemetry.observer import Observer, guarded
from oncely.telemetry.records import EventsTakenOver, OutboxMeasured
from oncely.transaction import Caller, Sessionmaker, check_sessionmaker
from oncely.wakeup import Wakeup

__all__ = ["DeadEvent", "Event", "NewEvent", "Outbox", "OutboxStats", "Publisher", "uuid7"]

_PATIENCE = timedelta(seconds=5)


class Outbox:
    """The outbox of one application: tables on its MetaData, and what is done with them.

    `on_dead` says what a dead event means for the later ones of its key: "continue" sends them,
    "park" keeps them until the dead one was replayed or discarded. `max_payload_bytes` bounds the
    payload's JSON in UTF-8 bytes; None leaves it to PostgreSQL (255 MB). The `observer` is told what
    happens here and in the relays of this outbox.
    """

    table: Table
    claims: Table

    def __init__(
        self,
        metadata: MetaData,
        *,
        table_name: str = "outbox",
        schema: str | None = None,
        on_dead: OnDead = "continue",
        max_payload_bytes: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        if on_dead not in ("continue", "park"):
            raise ValueError(f'on_dead is "continue" or "park", not {on_dead!r}')
        if max_payload_bytes is not None:
            check_count(max_payload_bytes, "max_payload_bytes")
        self.table, self.claims = outbox_tables(metadata, table_name, schema)
        self.on_dead = on_dead
        self.max_payload_bytes = max_payload_bytes
        self.observer = guarded(observer)
        on_taken_over = None if self.observer is None else self._tell_taken_over
        self.ledger = Ledger(self.table, self.claims, on_dead=on_dead, on_taken_over=on_taken_over)
        self.wakeup = Wakeup(self.table)
        self._cancellation = Cancellation(self.table, self.claims)
        self._dead_letters = DeadLetters(self.table)
        self._resending = Resending(self.table)
        self._statistics = Statistics(self.table, self.claims, parks=on_dead == "park")
        self._emission = Emission(self.table, max_payload_bytes=max_payload_bytes, observer=self.observer)
        self._pruning = Pruning(self.table)

    async def emit(
        self,
        session: Caller,
        topic: str,
        payload: object,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: timedelta | None = None,
        dedup_key: str | None = None,
    ) -> UUID:
        """Write an event in the caller's transaction; it leaves if and only if that commits.

        Events of one `key` leave in order. `delay` keeps the event back, counted from now. A
        `dedup_key` makes a second emit of the same topic, key and payload return the first event's
        id, as long as its row is kept; while the first is uncommitted, the second waits for it.

        Raises, before any SQL: ValueError for a payload that is not JSON (naming the place) and for
        a delay below zero or above 100 years; InvalidKey for text that cannot be stored;
        NoTransaction in autocommit. Raises DedupKeyReused when the dedup_key belongs to another key
        or payload.
        """
        event = NewEvent(topic, payload, key, headers, delay, dedup_key)
        event_id = await self._emission.emit(session, event)
        await self.wakeup.announce(session)
        return event_id

    async def emit_many(self, session: Caller, events: Iterable[NewEvent]) -> list[UUID]:
        """Write events with one statement, in the order given; their ids come back in that order.

        As `emit` for each. All or none: when one is refused, none of them is written. Events with a
        dedup_key that exists already cost one statement more, together.
        """
        ids = await self._emission.emit_many(session, events)
        if ids:
            await self.wakeup.announce(session)
        return ids

    async def cancel(self, session: Caller, event_id: UUID) -> bool:
        """Take an event back in the caller's transaction. True: once that commits, no relay sends it.

        False: it is being sent, was tried, sent or cancelled before, or another transaction has it. It may
        be True all the same of an event that has got through in an outage, which counts for no try, and
        when the server crashes while a relay has the event. A claim that is being made is waited for, a few
        milliseconds; one that takes five seconds, or the transaction's `lock_timeout`, is a False.

        Raises CancelUnsafe above READ COMMITTED, where the answer could come from an old snapshot.
        """
        check_id(event_id, "event_id")
        return await self._cancellation.cancel(session, event_id)

    async def relay_once(
        self,
        sessionmaker: Sessionmaker,
        publish: Publisher,
        *,
        batch: int = 100,
        lease: timedelta = timedelta(seconds=30),
    ) -> list[Event]:
        """Publish one batch of up to `batch` events and mark it; returns what was published.

        No transaction is open while `publish` runs. It has nine tenths of `lease`, after which it is
        cancelled. When it raises, or the caller is cancelled, the batch is given back as it was and
        the error goes on; after PublishFailed, what the publisher did send is marked first.
        Raises ClaimLost when the batch was sent but could not be marked in time.
        """
        check_count(batch, "batch")
        check_duration(lease, "lease", longest=LONGEST)
        check_sessionmaker(sessionmaker)
        check_async(publish, "publish")

        async def give_back(claim: Claim | None) -> None:
            if claim is not None:
                await complete(self.ledger.release(sessionmaker, claim), patience=_PATIENCE)

        begun = time.monotonic()
        work = self.ledger.claim(sessionmaker, limit=batch, lease=lease)
        claim = await complete(work, patience=_PATIENCE, undo=give_back)
        if claim is None:
            return []
        events, name, claimed_at = claim.events, self.table.fullname, time.monotonic()
        if self.observer is not None:
            tell_claimed(self.observer, name, events, since=begun)

        async def settle(published: list[UUID] | None = None) -> bool:
            settled = await self.ledger.settle(sessionmaker, claim, published=published)
            if self.observer is not None and settled:
                ids = [event.id for event in events] if published is None else published
                tell_settled(self.observer, name, events, published=ids, since=claimed_at)
            elif self.observer is not None:
                tell_lost(self.observer, name, events)
            return settled

        try:
            async with asyncio.timeout(claim.deadline - time.monotonic()):
                await traced(publish, self.observer, name)(events)
        except PublishFailed as failed:
            if not await complete(settle([event.id for event in sent(events, failed)]), patience=_PATIENCE):
                failed.add_note("the claim had expired: what was sent is not marked and will be sent again")
            raise
        except BaseException as error:
            try:
                await give_back(claim)
            except Exception as second:  # noqa: BLE001  the first error matters more, and takes this one along
                error.add_note(
                    f"the batch could not be given back and waits for its lease to end: {second!r}"
                )
            raise
        if not await complete(settle(), patience=_PATIENCE):
            raise ClaimLost(event.id for event in events)
        return events

    async def lag_seconds(self, session: Caller) -> float:
        """How long the first event in line has been due and unpublished, in seconds; 0.0 if none.

        Events that wait for their next try count; dead ones, and under "park" those behind them,
        do not. An event with a delay counts from when it was due; once it has failed, that is not
        known any more, and it counts from when it was emitted.
        """
        return await self._statistics.lag_seconds(session)

    async def stats(self, session: Caller, *, at_most: int = 100_000) -> OutboxStats:
        """How many events are in each state, and the lag, by one statement.

        A count that has reached `at_most` may be higher: so far it was counted.
        """
        check_count(at_most, "at_most")
        return await self._statistics.look(session, at_most=at_most)

    async def measure(self, sessionmaker: Sessionmaker) -> list[OutboxMeasured]:
        """One look, as `oncely.telemetry.Gauges` takes it."""
        check_sessionmaker(sessionmaker)
        async with sessionmaker() as session:
            stats = await self.stats(session)
        return [
            OutboxMeasured(
                outbox=self.table.fullname,
                ready=stats.ready,
                deferred=stats.deferred,
                in_flight=stats.in_flight,
                retrying=stats.retrying,
                dead=stats.dead,
                lag=timedelta(seconds=stats.lag_seconds),
            )
        ]

    async def dead(
        self,
        session: Caller,
        *,
        ids: Iterable[UUID] | None = None,
        topic: str | None = None,
        error: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 100,
    ) -> list[DeadEvent]:
        """The dead events that match all that is given, first in line first.

        `error` is the name of an error's class, `since` and `until` bound the time of death.
        """
        which = Which(ids=ids, topic=topic, error=error, since=since, until=until, limit=limit)
        return await self._dead_letters.list(session, which)

    async def dead_ids(
        self,
        session: Caller,
        *,
        ids: Iterable[UUID] | None = None,
        topic: str | None = None,
        error: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 10_000,
    ) -> Sequence[UUID]:
        """The ids of the dead events that `replay` or `discard` would take, without their payloads."""
        which = Which(ids=ids, topic=topic, error=error, since=since, until=until, limit=limit)
        return await self._dead_letters.ids(session, which)

    async def replay(
        self,
        session: Caller,
        *,
        ids: Iterable[UUID] | None = None,
        topic: str | None = None,
        error: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 10_000,
    ) -> int:
        """Send dead events again, with the id they had: those that match all that is given, or all.

        Returns how many; when that is `limit`, there may be more.
        """
        which = Which(ids=ids, topic=topic, error=error, since=since, until=until, limit=limit)
        return await self._dead_letters.replay(session, which)

    async def discard(
        self,
        session: Caller,
        *,
        ids: Iterable[UUID] | None = None,
        topic: str | None = None,
        error: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 10_000,
    ) -> int:
        """Delete dead events: those that match all that is given, or all; returns how many."""
        which = Which(ids=ids, topic=topic, error=error, since=since, until=until, limit=limit)
        return await self._dead_letters.discard(session, which)

    async def republish(
        self, session: Caller, *, since: datetime, until: datetime | None = None, topic: str | None = None
    ) -> int:
        """Send again what was published from `since` on and before `until`; returns how many.

        For when the broker has lost what it had: a restart without persistence, a flush, a failover.
        The events keep their ids and their places in line, so consumers with an inbox handle only what
        they have missed, and each key keeps its order with all that has not left yet. Pruned events are
        gone. All of it is one statement; split what is very large by `until`, oldest first. An event
        that is to be sent again can be cancelled again.
        """
        return await self._resending.republish(session, since=since, until=until, topic=topic)

    async def prune(
        self, session: Caller, *, older_than: timedelta | datetime, limit: int | None = None
    ) -> int:
        """Delete events published before `older_than` (an age or an aware time); returns how many.

        Only published ones, in batches of 1,000, skipping rows that somebody has locked, up to
        `limit`. A deleted event's dedup_key is free again.
        """
        return await self._pruning.prune(session, older_than=older_than, limit=limit)

    async def prunable(
        self, session: Caller, *, older_than: timedelta | datetime, at_most: int = 100_000
    ) -> int:
        """How many events `prune` would delete, none counted beyond `at_most`."""
        check_count(at_most, "at_most")
        return await self._pruning.prunable(session, older_than=older_than, at_most=at_most)

    def _tell_taken_over(self, count: int) -> None:
        if self.observer is not None:
            self.observer(EventsTakenOver(outbox=self.table.fullname, count=count))


def sent(events: Sequence[Event], failed: PublishFailed) -> list[Event]:
    """The events of a batch that left before a publisher raised PublishFailed.

    What comes after a failed event of its key is taken as unsent, also when the publisher does not
    say so: sent twice is better than never. For the same reason nothing counts as sent when it names
    no event at all, or one that is not of this batch.
    """
    named = failed.failures.keys() | failed.unsent
    if not named or not named <= {event.id for event in events}:
        return []
    broken: set[str] = set()
    left: list[Event] = []
    for event in events:
        if event.id in failed.failures or event.id in failed.unsent:
            if event.key is not None:
                broken.add(event.key)
        elif event.key is None or event.key not in broken:
            left.append(event)
    return left
