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
from operator import itemgetter
from typing import Any, Literal
from uuid import UUID, uuid4

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Connection,
    CursorResult,
    Integer,
    Interval,
    Table,
    Text,
    Uuid,
)

from oncely.event import Event, decode_json
from oncely.floor import Facts, Floor
from oncely.reaper import Reaper
from oncely.statement import Statement
from oncely.transaction import Sessionmaker, alone, transact

__all__ = ["Claim", "Failure", "Ledger", "OnDead"]

OnDead = Literal["continue", "park"]


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
    """The claims of one outbox. One per relay process; any number of them work side by side.

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
        self._on_taken_over = on_taken_over
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        tables = {"outbox": events, "claims": claims}
        parked = _PARKED if on_dead == "park" else _NOTHING_PARKED
        self._lock = Statement(_LOCK, tables)
        self._choose = Statement(
            _CHOOSE.replace("/* parked */", parked),
            tables,
            {
                "token": Uuid,
                "claimed_by": Text,
                "lease": Interval,
                "limit": Integer,
                "tried_first": Boolean,
                "ground": Text,
                "floor": BigInteger,
                "first_claim": BigInteger,
                "detour": BigInteger,
                "detour_keys": ARRAY(Text),
                "locked_ids": ARRAY(Uuid(as_uuid=False)),
                "locked_keys": ARRAY(Text),
                "locked_low": BigInteger,
            },
        )
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
        begun, token = time.monotonic(), uuid4()
        unanswered = list(self._unanswered)
        rows: Sequence[Any] = ()
        keys_used: frozenset[str] = frozenset()
        trust_position = True
        taken_over = 0
        self._tried_first = not self._tried_first

        def choose(connection: Connection) -> None:
            nonlocal rows, keys_used, trust_position, taken_over
            expired, writes, _ = connection.execute(self._lock).one()
            if expired:
                taken_over = self._reaper.reap(connection)
            if unanswered:
                connection.execute(self._release, {"tokens": unanswered})
            self._floor = self._floor.fresh(begun)
            keys_used = self._floor.detour_keys
            parameters: dict[str, object] = {
                "token": token,
                "claimed_by": self._name,
                "lease": lease,
                "limit": limit,
                "tried_first": self._tried_first,
                **self._floor.parameters(),
                **_NOTHING_LOCKED,
            }
            for _ in range(_MOST_LOOKS):
                rows = _fetch(connection.execute(self._choose, parameters))
                if len(rows) != 1:
                    break
                parameters |= decode_json(rows[0][1])
            trust_position = not (writes or expired or unanswered or parameters["locked_ids"])

        try:
            await transact(sessionmaker, self._events, choose)
        except BaseException:
            if rows:
                self._unanswered.add(token)
            raise
        self._unanswered.difference_update(unanswered)
        if taken_over and self._on_taken_over is not None:
            self._on_taken_over(taken_over)
        if len(rows) < 2:
            return None
        (_, facts, *_), *found = rows
        self._floor = self._floor.after(
            Facts(**decode_json(facts)), keys_used=keys_used, trust_position=trust_position
        )
        # A tenth of the lease is kept for the settling, and for clocks that run at other speeds.
        return Claim(
            token=token,
            events=[
                Event.from_json(event_id, topic, payload, headers, key, created_at, attempt)
                for event_id, topic, payload, headers, key, created_at, attempt, _ in found
            ],
            deadline=begun + lease.total_seconds() * 0.9,
        )

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
        taken over meanwhile, or is publishing, is not touched.
        """
        return bool(await self._alone(sessionmaker, self._rescue, {"ids": list(ids)}))

    async def renew(self, sessionmaker: Sessionmaker, claim: Claim, *, lease: timedelta) -> float | None:
        """Hold the claim for `lease` from now: its new deadline, or None when it was lost."""
        begun = time.monotonic()
        held = await self._alone(sessionmaker, self._renew, {"token": claim.token, "lease": lease})
        return begun + lease.total_seconds() * 0.9 if held else None

    async def _alone(
        self, sessionmaker: Sessionmaker, statement: Statement, parameters: dict[str, object]
    ) -> object:
        """What the statement's one row says, if there is one."""
        return await alone(
            sessionmaker, self._events, lambda connection: connection.execute(statement, parameters).scalar()
        )


def _fetch(result: CursorResult[Any]) -> Sequence[Any]:
    """The rows in line, the facts first, as the driver has them.

    To make a Row of each would take as long as to make an Event of it. They come nearly in line already.
    """
    assert result.cursor is not None  # noqa: S101  it is a statement that returns rows
    rows = list(result.cursor.fetchall())
    result.close()
    rows.sort(key=_POSITION)
    return rows


_POSITION = itemgetter(7)


_MOST_LOOKS = 20
_NOTHING_LOCKED: dict[str, object] = {"locked_ids": [], "locked_keys": [], "locked_low": None}

# In a statement of its own, so that the next one sees what was committed while this one waited. A
# claimer that stalls with the lock is ended by the server, so it cannot stop the others. A queue's
# statistics are always out of date, so for this transaction the planner is told what is known: along
# the indexes, with the plan that is there. Nobody waits for the disk: when the server crashes, a claim
# that is lost with it means no more than that its events are claimed again.
_LOCK = """
SELECT EXISTS (SELECT FROM {claims} WHERE expires_at <= statement_timestamp()) AS expired,
       pg_current_xact_id_if_assigned() IS NOT NULL AS writes,
       count(set_config(name, value, true))
FROM pg_advisory_xact_lock(1869505381, '{claims}'::regclass::oid::int4),
     (VALUES ('idle_in_transaction_session_timeout', '5000'), ('plan_cache_mode', 'force_generic_plan'),
             ('enable_seqscan', 'off'), ('enable_bitmapscan', 'off'), ('jit', 'off'),
             ('synchronous_commit', 'off')) AS setting (name, value)
"""

_NOTHING_PARKED = "SELECT NULL::text AS key, NULL::bigint AS position WHERE false"
_PARKED = "SELECT key, position FROM {outbox} WHERE dead_at IS NOT NULL AND key IS NOT NULL"

# Chosen without locks first, then locked. A row that cannot be locked (an open cancel has it, and may
# roll back) takes those that come after it in its key out of the batch. When that leaves nothing, what
# could not be locked is returned in the place of a claim, and chosen around the next time.
_CHOOSE = """
WITH here AS MATERIALIZED (
    SELECT concat_ws(' ',
        pg_postmaster_start_time(), pg_stat_get_bgwriter_stat_reset_time(),
        (SELECT oid FROM pg_database WHERE datname = current_database()),
        pg_relation_filenode('{outbox}'), pg_relation_filenode('{claims}')) AS ground
),
memory AS MATERIALIZED (
    SELECT ground,
           CASE WHEN ground = :ground THEN :floor ELSE 0 END AS floor,
           CASE WHEN ground = :ground THEN :first_claim ELSE 0 END AS first_claim
    FROM here
),
busy AS MATERIALIZED (
    SELECT number, event_ids, keys, low FROM {claims}
    WHERE number >= (SELECT first_claim FROM memory)
    UNION ALL
    SELECT NULL, :locked_ids, :locked_keys, :locked_low WHERE cardinality(:locked_ids) > 0
),
taken AS MATERIALIZED (SELECT unnest(event_ids) AS id FROM busy),
busy_keys AS MATERIALIZED (SELECT unnest(keys) AS key FROM busy),
tried AS MATERIALIZED (
    SELECT id, position, key, due_at, min(position) OVER (PARTITION BY key) AS first_of_key
    FROM {outbox}
    WHERE published_at IS NULL AND dead_at IS NULL AND attempts > 0
),
parked AS MATERIALIZED (/* parked */),
held AS MATERIALIZED (
    SELECT key FROM busy_keys
    UNION SELECT key FROM tried WHERE key IS NOT NULL
    UNION SELECT key FROM parked
),
start AS MATERIALIZED (
    SELECT detoured, CASE WHEN detoured THEN :detour ELSE floor END AS position
    FROM memory, LATERAL (
        SELECT ground = :ground AND :detour > floor
           AND NOT EXISTS (SELECT unnest(:detour_keys) EXCEPT SELECT key FROM held) AS detoured) AS choice
),
suspects AS MATERIALIZED (
    SELECT id, key, due_at FROM tried
    WHERE due_at <= statement_timestamp() AND id NOT IN (SELECT id FROM taken)
      AND (key IS NULL OR (
            position = first_of_key AND key NOT IN (SELECT key FROM busy_keys)
            AND NOT EXISTS (
                SELECT FROM parked WHERE parked.key = tried.key AND parked.position < tried.position)))
    ORDER BY due_at LIMIT 8
),
ready AS MATERIALIZED (
    SELECT ctid AS place, id, position, key, due_at FROM {outbox}
    WHERE published_at IS NULL AND dead_at IS NULL AND due_at IS NULL
      AND position >= (SELECT position FROM start)
      AND NOT (:tried_first AND EXISTS (SELECT FROM suspects))
      AND id NOT IN (SELECT id FROM taken) AND (key IS NULL OR key NOT IN (SELECT key FROM held))
    ORDER BY position LIMIT :limit
),
due AS MATERIALIZED (
    SELECT ctid AS place, id, position, key, due_at FROM {outbox}
    WHERE published_at IS NULL AND dead_at IS NULL AND due_at <= statement_timestamp() AND attempts = 0
      AND NOT (:tried_first AND EXISTS (SELECT FROM suspects))
      AND id NOT IN (SELECT id FROM taken) AND (key IS NULL OR key NOT IN (SELECT key FROM held))
    ORDER BY due_at, position LIMIT :limit
),
chosen AS NOT MATERIALIZED (
    SELECT * FROM (SELECT * FROM ready UNION ALL SELECT * FROM due) AS fresh ORDER BY position LIMIT :limit
),
places AS MATERIALIZED (SELECT ARRAY(SELECT place FROM chosen) AS places),
locked AS MATERIALIZED (
    SELECT id, topic, payload::text, headers::text, key, created_at, attempts, position, due_at FROM {outbox}
    WHERE ctid = ANY ((SELECT places FROM places)::tid[]) AND published_at IS NULL AND dead_at IS NULL
    FOR UPDATE SKIP LOCKED
),
missing AS MATERIALIZED (
    SELECT id, position, key, due_at FROM chosen
    WHERE (SELECT count(*) FROM locked) < (SELECT cardinality(places) FROM places)
      AND id NOT IN (SELECT id FROM locked)
),
alone AS MATERIALIZED (
    SELECT id, topic, payload::text, headers::text, key, created_at, attempts, position, due_at FROM {outbox}
    WHERE id = ANY (ARRAY(SELECT id FROM suspects)) AND published_at IS NULL AND dead_at IS NULL
      AND (:tried_first OR NOT EXISTS (SELECT FROM locked))
    ORDER BY due_at LIMIT 1
    FOR UPDATE SKIP LOCKED
),
picked AS NOT MATERIALIZED (
    SELECT * FROM alone
    UNION ALL
    SELECT * FROM locked
    WHERE NOT EXISTS (SELECT FROM missing)
       OR NOT EXISTS (
            SELECT FROM missing WHERE missing.key = locked.key AND missing.position < locked.position)
),
claim AS (
    INSERT INTO {claims} (token, claimed_by, expires_at, event_ids, keys, low)
    SELECT :token, :claimed_by, statement_timestamp() + :lease, array_agg(id),
           ARRAY(SELECT DISTINCT key FROM picked WHERE key IS NOT NULL),
           min(position) FILTER (WHERE due_at IS NULL)
    FROM picked HAVING count(*) > 0
    RETURNING number
),
span AS MATERIALIZED (SELECT min(position) AS first, max(position) AS last FROM ready),
passed AS MATERIALIZED (
    SELECT min(position) AS position, array_agg(DISTINCT key) AS keys FROM {outbox}
    WHERE published_at IS NULL AND dead_at IS NULL AND due_at IS NULL
      AND position >= (SELECT position FROM start) AND position < (SELECT first FROM span)
      AND EXISTS (SELECT FROM held) AND id NOT IN (SELECT id FROM taken)
),
locked_out AS MATERIALIZED (
    SELECT id, key, CASE WHEN due_at IS NULL THEN position END AS low FROM missing
    UNION ALL
    SELECT id, key, NULL FROM suspects WHERE :tried_first AND NOT EXISTS (SELECT FROM alone)
)
SELECT NULL::uuid AS id,
       json_build_object(
           'ground', (SELECT ground FROM memory),
           'first_claim', coalesce((SELECT min(number) FROM busy), number),
           'detoured', (SELECT detoured FROM start),
           'first_ready', (SELECT first FROM span),
           'last_ready', (SELECT last FROM span),
           'lowest_claimed', (SELECT min(low) FROM busy),
           'first_passed', (SELECT position FROM passed),
           'passed_keys', (SELECT keys FROM passed),
           'oldest_running', pg_snapshot_xmin(pg_current_snapshot())::text::bigint,
           'transaction', pg_current_xact_id()::text::bigint
       )::text AS topic,
       NULL AS payload, NULL AS headers, NULL AS key, NULL::timestamptz AS created_at, NULL::int4 AS attempt,
       0 AS position
FROM claim
UNION ALL
SELECT NULL, json_build_object(
           'locked_ids', array_agg(id) || :locked_ids, 'locked_low', least(min(low), :locked_low),
           'locked_keys', array_agg(key) FILTER (WHERE key IS NOT NULL) || :locked_keys
       )::text, NULL, NULL, NULL, NULL, NULL, 0
FROM locked_out WHERE NOT EXISTS (SELECT FROM claim) HAVING count(*) > 0
UNION ALL
SELECT id, topic, payload, headers, key, created_at, attempts + 1, position FROM picked
"""

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
# tried or claimed since.
_RESCUE = """
WITH left_to_nobody AS (
    UPDATE {outbox} SET published_at = statement_timestamp(), due_at = NULL
    WHERE id = ANY (:ids) AND published_at IS NULL AND dead_at IS NULL AND attempts = 0
      AND NOT EXISTS (SELECT FROM {claims} WHERE event_ids && :ids)
    RETURNING id
)
SELECT coalesce(bool_and(published_at IS NOT NULL OR id IN (SELECT id FROM left_to_nobody)), false)
FROM {outbox} WHERE id = ANY (:ids)
"""

_RENEW = """
UPDATE {claims} SET expires_at = statement_timestamp() + :lease WHERE token = :token RETURNING true
"""
