"""Choice: what a claim takes, chosen and recorded in one statement.

An event is locked only where somebody else may have it: one whose `xmax` is zero was not locked, deleted
or changed by anybody since it was written. That nobody does so unseen until the claim is committed is
for the others to see to: `cancel` waits for the claimer.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from typing import Any, Literal
from uuid import UUID

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

from oncely.event import Event
from oncely.floor import Facts, Floor
from oncely.statement import Statement
from oncely.storable import decode_json

__all__ = ["Choice", "Chooser", "OnDead"]

OnDead = Literal["continue", "park"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The events that a claim has taken, in line, and what was seen on the way.

    `repeated`: it took more than one look.
    """

    events: list[Event]
    facts: Facts
    repeated: bool


class Chooser:
    """Chooses for the claims of one outbox. Only the claimer may ask it, under its lock."""

    def __init__(self, events: Table, claims: Table, *, on_dead: OnDead) -> None:
        tables = {"outbox": events, "claims": claims}
        parked = _PARKED if on_dead == "park" else _NOTHING_PARKED
        self._read = Statement(_READ, tables, {"token": Uuid})
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

    def choose(
        self,
        connection: Connection,
        floor: Floor,
        *,
        token: UUID,
        claimed_by: str,
        lease: timedelta,
        limit: int,
        tried_first: bool,
    ) -> Choice | None:
        """Record a claim on up to `limit` events; None when nothing may be published now."""
        parameters: dict[str, object] = {
            "token": token,
            "claimed_by": claimed_by,
            "lease": lease,
            "limit": limit,
            "tried_first": tried_first,
            **floor.parameters(),
            **_NOTHING_LOCKED,
        }
        for _ in range(_MOST_LOOKS):
            rows = _fetch(connection.execute(self._choose, parameters))
            if not rows:
                return None
            (_, seen, *_), *found = rows
            facts = decode_json(seen)
            if "locked_ids" not in facts:
                break
            parameters |= facts
        else:
            return None
        if facts.pop("size") != len(found):
            found = _fetch(connection.execute(self._read, {"token": token}))
        return Choice(
            events=Event.from_rows(found),
            facts=Facts(**facts),
            repeated=bool(parameters["locked_ids"]),
        )


_POSITION = itemgetter(7)
_MOST_LOOKS = 20
_NOTHING_LOCKED: dict[str, object] = {"locked_ids": [], "locked_keys": [], "locked_low": None}


def _fetch(result: CursorResult[Any]) -> list[Any]:
    """The rows in line, the facts first, as the driver has them.

    To make a Row of each would take as long as to make an Event of it. They come nearly in line already.
    """
    assert result.cursor is not None  # noqa: S101  it is a statement that returns rows
    rows = list(result.cursor.fetchall())
    result.close()
    rows.sort(key=_POSITION)
    return rows


_NOTHING_PARKED = "SELECT NULL::text AS key, NULL::bigint AS position WHERE false"
_PARKED = "SELECT key, position FROM {outbox} WHERE dead_at IS NOT NULL AND key IS NOT NULL"

# A row that cannot be locked (an open cancel has it, and may roll back) takes those that come after it in
# its key out of the batch; one that a foreign key refers to can be locked. When that leaves nothing, what
# could not be is returned in the place of a claim, and chosen around the next time.
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
chosen AS MATERIALIZED (
    SELECT * FROM (
        (SELECT id, position, key, due_at, xmax <> 0 AS touched FROM {outbox}
         WHERE published_at IS NULL AND dead_at IS NULL AND due_at IS NULL
           AND position >= (SELECT position FROM start)
           AND NOT (:tried_first AND EXISTS (SELECT FROM suspects))
           AND id NOT IN (SELECT id FROM taken) AND (key IS NULL OR key NOT IN (SELECT key FROM held))
         ORDER BY position LIMIT :limit)
        UNION ALL
        (SELECT id, position, key, due_at, xmax <> 0 FROM {outbox}
         WHERE published_at IS NULL AND dead_at IS NULL AND due_at <= statement_timestamp() AND attempts = 0
           AND NOT (:tried_first AND EXISTS (SELECT FROM suspects))
           AND id NOT IN (SELECT id FROM taken) AND (key IS NULL OR key NOT IN (SELECT key FROM held))
         ORDER BY due_at, position LIMIT :limit)
    ) AS fresh
    ORDER BY position LIMIT :limit
),
touched AS MATERIALIZED (SELECT id, position, key, due_at FROM chosen WHERE touched),
obtained AS MATERIALIZED (
    SELECT id FROM {outbox}
    WHERE id = ANY (ARRAY(SELECT id FROM touched)) AND published_at IS NULL AND dead_at IS NULL
    FOR NO KEY UPDATE SKIP LOCKED
),
missing AS MATERIALIZED (
    SELECT id, position, key, due_at FROM touched WHERE id NOT IN (SELECT id FROM obtained)
),
alone AS MATERIALIZED (
    SELECT id, position, key, due_at FROM {outbox}
    WHERE id = ANY (ARRAY(SELECT id FROM suspects)) AND published_at IS NULL AND dead_at IS NULL
      AND (:tried_first OR NOT EXISTS (SELECT FROM chosen WHERE id NOT IN (SELECT id FROM missing)))
    ORDER BY due_at LIMIT 1
    FOR NO KEY UPDATE SKIP LOCKED
),
picked AS NOT MATERIALIZED (
    SELECT id, position, key, due_at FROM alone
    UNION ALL
    SELECT id, position, key, due_at FROM chosen
    WHERE NOT EXISTS (SELECT FROM missing)
       OR NOT EXISTS (
            SELECT FROM missing
            WHERE missing.id = chosen.id OR (missing.key = chosen.key AND missing.position < chosen.position))
),
claim AS (
    INSERT INTO {claims} (token, claimed_by, expires_at, event_ids, keys, low)
    SELECT :token, :claimed_by, statement_timestamp() + :lease, array_agg(id),
           ARRAY(SELECT DISTINCT key FROM picked WHERE key IS NOT NULL),
           min(position) FILTER (WHERE due_at IS NULL)
    FROM picked HAVING count(*) > 0
    RETURNING number, event_ids
),
span AS MATERIALIZED (
    SELECT min(position) AS first, max(position) AS last FROM chosen WHERE due_at IS NULL
),
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
           'transaction', pg_current_xact_id()::text::bigint,
           'size', cardinality(event_ids)
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
SELECT id, topic, payload::text, headers::text, key, created_at, attempts + 1, position FROM {outbox}
WHERE id = ANY ((SELECT event_ids FROM claim WHERE cardinality(event_ids) <= 200)::uuid[])
"""

# What a statement that writes returns is kept until it has ended. Of a large claim, the events are better
# read on their own, so that the one side takes them in while the other sends.
_READ = """
SELECT id, topic, payload::text, headers::text, key, created_at, attempts + 1, position FROM {outbox}
WHERE id = ANY ((SELECT event_ids FROM {claims} WHERE token = :token)::uuid[])
"""
