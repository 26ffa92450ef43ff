"""Which events are in flight: claim a batch, settle it, give it back, hold it for longer.

One row in the claims table stands for one batch: the ids it covers, the keys it holds, a token and
an expiry. The row is the lease. A claim is live as long as its row exists; only the reaper looks at
`expires_at`. No transaction is open while a batch is published.

The claimer is authoritative. Claims are made one at a time, under a transaction-level advisory
lock, each with a snapshot taken after the lock was obtained. What a claim may take:

- *fresh* events (ready, or deferred and due, and never tried) in line, as a full batch;
- *tried* events (`attempts` > 0) alone, the lowest of their key first.

The two take turns, so neither starves the other. A key is *held*, and its events wait, while a live
claim has it, while a tried event of it is unpublished, and under `park` while a dead one is.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID, uuid4

from sqlalchemy import ARRAY, Connection, Interval, Table, Text, Uuid

from oncely.choice import Choice, Chooser, OnDead
from oncely.claimer import Claimer
from oncely.event import Event
from oncely.floor import Floor
from oncely.reaper import Reaper
from oncely.statement import Statement
from oncely.transaction import Sessionmaker, alone, transact

__all__ = ["HELD", "Claim", "Failure", "Ledger"]

HELD = 0.9
"""The part of a lease in which a claim is ours; the rest is for settling, and for clocks of other speeds."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch that is ours to publish until `deadline` (on the monotonic clock, in seconds)."""

    token: UUID
    events: list[Event]
    deadline: float


@dataclass(frozen=True, slots=True)
class Failure:
    """How one event's try ended: tried again after `delay`, or dead when there is none.

    `error` None: there was no try. It is not counted, and the event's last error stays.
    """

    event_id: UUID
    error: str | None
    delay: timedelta | None


class Ledger:
    """The claims of one outbox. Relays of one Outbox share it; any number of them work side by side.

    `on_taken_over` is told of how many events a claim has found that a relay did not come back with.
    """

    def __init__(
        self,
        events: Table,
        claims: Table,
        *,
        on_dead: OnDead,
        on_taken_over: Callable[[int], object] | None = None,
    ) -> None:
        self._events = events
        self._floor = Floor()
        self._reaper = Reaper(events, claims)
        self._tried_first = False
        # Claims whose commit nobody confirmed: they may have been made, and are given back by the next.
        self._unanswered: set[UUID] = set()
        # Another claimer may have stalled: one was there already, or was waited for in vain.
        self._claimer_in_doubt = True
        self._on_taken_over = on_taken_over
        self._host = socket.gethostname()
        self._claimer = Claimer(claims)
        self._chooser = Chooser(events, claims, on_dead=on_dead)
        tables = {"outbox": events, "claims": claims}
        self._settle = Statement(_SETTLE, tables, {"token": Uuid})
        ids, texts, intervals = ARRAY(Uuid), ARRAY(Text), ARRAY(Interval)
        failed = {"failed": ids, "errors": texts, "delays": intervals}
        self._settle_partly = Statement(_SETTLE_PARTLY, tables, {"token": Uuid, "published": ids, **failed})
        self._release = Statement(_RELEASE, tables, {"tokens": ids})
        self._marked = Statement(_MARKED, tables, {"ids": ids})
        self._rescue = Statement(_RESCUE, tables, {"ids": ids})
        self._renew = Statement(_RENEW, tables, {"token": Uuid, "lease": Interval})

    async def claim(self, sessionmaker: Sessionmaker, *, limit: int, lease: timedelta) -> Claim | None:
        """Take up to `limit` events for `lease`; None when nothing may be published now."""
        begun = time.monotonic()
        self._tried_first = not self._tried_first
        self._floor = floor = self._floor.fresh(begun)
        making = _Making(uuid4(), limit, lease, floor, unanswered=list(self._unanswered))
        try:
            await transact(sessionmaker, self._events, lambda connection: self._make(connection, making))
        except BaseException:
            if making.choice is not None:
                self._unanswered.add(making.token)
            raise
        finally:
            self._claimer_in_doubt = not making.entered
        self._unanswered.difference_update(making.unanswered)
        if making.taken_over and self._on_taken_over is not None:
            self._on_taken_over(making.taken_over)
        choice = making.choice
        if choice is None:
            return None
        if not choice.events:  # deleted by hand in this very moment
            self._unanswered.add(making.token)
            return None
        trust_position = not (making.writes or choice.repeated)
        self._floor = floor.after(choice.facts, keys_used=making.keys_used, trust_position=trust_position)
        deadline = begun + lease.total_seconds() * HELD
        return Claim(token=making.token, events=choice.events, deadline=deadline)

    async def settle(
        self,
        sessionmaker: Sessionmaker,
        claim: Claim,
        *,
        published: Sequence[UUID] | None = None,
        failures: Sequence[Failure] = (),
    ) -> bool:
        """End the claim: mark what was published, note what failed, and free the rest untouched.

        `published` None means all of it. False, with nothing marked, when the claim was lost: it had
        expired and was reaped.
        """
        statement = self._settle
        parameters: dict[str, object] = {"token": claim.token}
        if published is not None or failures:
            statement = self._settle_partly
            parameters |= {
                "published": list(published or ()),
                "failed": [failure.event_id for failure in failures],
                "errors": [failure.error for failure in failures],
                "delays": [failure.delay for failure in failures],
            }
        return bool(await self._alone(sessionmaker, statement, parameters))

    async def release(self, sessionmaker: Sessionmaker, claim: Claim) -> bool:
        """Give the batch back as it was: nothing is marked or counted. False when it was lost."""
        return bool(await self._alone(sessionmaker, self._release, {"tokens": [claim.token]}))

    async def marked(self, sessionmaker: Sessionmaker, ids: Sequence[UUID]) -> bool:
        """Whether all of these, and at least one, are published: for whoever saw no answer to a settling."""
        return bool(await self._alone(sessionmaker, self._marked, {"ids": list(ids)}))

    async def rescue(self, sessionmaker: Sessionmaker, ids: Sequence[UUID]) -> bool:
        """Mark what a crash of the server has left to nobody, together with the claim that we had on it.

        For whoever has sent all of these. Whether all of them are published now: what another relay has
        taken over meanwhile, or is publishing, is not touched, nor what somebody has locked.
        """

        def rescue(connection: Connection) -> object:
            self._claimer.keep_out(connection)
            return connection.execute(self._rescue, {"ids": list(ids)}).scalar()

        return bool(await transact(sessionmaker, self._events, rescue))

    async def renew(self, sessionmaker: Sessionmaker, claim: Claim, *, lease: timedelta) -> float | None:
        """Hold the claim for `lease` from now: its new deadline, or None when it was lost."""
        begun = time.monotonic()
        held = await self._alone(sessionmaker, self._renew, {"token": claim.token, "lease": lease})
        return begun + lease.total_seconds() * HELD if held else None

    def _make(self, connection: Connection, making: _Making) -> None:
        """Be the claimer, put in order what was left by others and by us, and choose."""
        if self._claimer_in_doubt:
            self._claimer.end_stalled(connection)
        expired, writes = self._claimer.become(connection)
        making.entered = True
        making.writes = writes or expired or bool(making.unanswered)
        if expired:
            making.taken_over = self._reaper.reap(connection)
        if making.unanswered:
            connection.execute(self._release, {"tokens": making.unanswered})
        # As they are now: another claim of this ledger may have learnt while this one waited.
        making.keys_used = making.floor.detour_keys
        making.choice = self._chooser.choose(
            connection,
            making.floor,
            token=making.token,
            claimed_by=f"{self._host}:{os.getpid()}",  # now: an outbox may be made before a fork
            lease=making.lease,
            limit=making.limit,
            tried_first=self._tried_first,
        )

    async def _alone(
        self, sessionmaker: Sessionmaker, statement: Statement, parameters: dict[str, object]
    ) -> object:
        """What the statement's one row says, if there is one."""
        return await alone(
            sessionmaker, self._events, lambda connection: connection.execute(statement, parameters).scalar()
        )


@dataclass(slots=True)
class _Making:
    """A claim in the making: what is asked for, and how far its transaction has come, wherever it is cut off.

    `unanswered` are those given back in it. `writes`: it may have had its transaction id before it chose.
    """

    token: UUID
    limit: int
    lease: timedelta
    floor: Floor
    unanswered: list[UUID]
    entered: bool = False
    writes: bool = False
    taken_over: int = 0
    keys_used: frozenset[str] = frozenset()
    choice: Choice | None = None


# Only a claim that is still there may mark anything: a relay that lost it has been replaced. What was
# published is the claim's own list but for the exceptions, so the usual settling sends no ids.
_SETTLE = """
WITH ended AS (DELETE FROM {claims} WHERE token = :token RETURNING event_ids),
marked AS (
    UPDATE {outbox} SET published_at = statement_timestamp(), due_at = NULL
    WHERE id = ANY ((SELECT event_ids FROM ended)::uuid[])
)
SELECT EXISTS (SELECT FROM ended)
"""

# One list for each look-up by id: before PostgreSQL 17, two are tried in all pairs, or the table is read.
_SETTLE_PARTLY = """
WITH ended AS (DELETE FROM {claims} WHERE token = :token RETURNING event_ids),
claimed AS (SELECT unnest(event_ids) AS id FROM ended),
marked AS (
    UPDATE {outbox} SET published_at = statement_timestamp(), due_at = NULL
    WHERE id = ANY (ARRAY(SELECT id FROM claimed INTERSECT SELECT unnest(:published)))
),
failed AS (
    UPDATE {outbox} AS event
    SET attempts = event.attempts + (failure.error IS NOT NULL)::int,
        last_error = coalesce(failure.error, event.last_error),
        due_at = statement_timestamp() + failure.delay,
        dead_at = CASE WHEN failure.delay IS NULL THEN statement_timestamp() END
    FROM unnest(:failed, :errors, :delays) AS failure (id, error, delay)
    WHERE event.id = ANY (ARRAY(SELECT id FROM claimed INTERSECT SELECT unnest(:failed)))
      AND event.id = failure.id
)
SELECT EXISTS (SELECT FROM ended)
"""

_RELEASE = """
DELETE FROM {claims} WHERE token = ANY (:tokens) RETURNING true
"""

_MARKED = """
SELECT coalesce(bool_and(published_at IS NOT NULL), false) FROM {outbox} WHERE id = ANY (:ids)
"""

# A claim does not wait for the disk. That it was lost, and not reaped, shows in events that nobody has
# tried or claimed since. No claim is made meanwhile, so nothing is waited for.
_RESCUE = """
WITH obtained AS MATERIALIZED (
    SELECT id FROM {outbox}
    WHERE id = ANY (:ids) AND published_at IS NULL AND dead_at IS NULL AND attempts = 0
      AND NOT EXISTS (SELECT FROM {claims} WHERE event_ids && :ids)
    FOR NO KEY UPDATE SKIP LOCKED
),
left_to_nobody AS (
    UPDATE {outbox} SET published_at = statement_timestamp(), due_at = NULL
    WHERE id = ANY (ARRAY(SELECT id FROM obtained))
    RETURNING id
)
SELECT coalesce(bool_and(published_at IS NOT NULL OR id IN (SELECT id FROM left_to_nobody)), false)
FROM {outbox} WHERE id = ANY (:ids)
"""

_RENEW = """
UPDATE {claims} SET expires_at = statement_timestamp() + :lease WHERE token = :token RETURNING true
"""
