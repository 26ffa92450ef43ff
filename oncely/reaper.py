"""Reaper: what a dead relay left behind, found by its expired claims.

An event whose claim expired has had a try, of which nobody knows how it ended: it becomes a *tried*
event that is due at once, and from then on it is published alone. So an event that kills whoever
publishes it is found, takes no other with it, and is counted each time.
"""

from __future__ import annotations

from sqlalchemy import Connection, Integer, Table

from oncely.statement import Statement

__all__ = ["Reaper"]


class Reaper:
    """Ends the expired claims of one outbox. Only the claimer may call it, under its lock."""

    def __init__(self, events: Table, claims: Table) -> None:
        self._reap = Statement(_REAP, {"outbox": events, "claims": claims}, {"limit": Integer})

    def reap(self, connection: Connection) -> int:
        """End up to twenty of them; what is left is for the next time. How many events are tried again."""
        return connection.execute(self._reap, {"limit": _REAPED_AT_ONCE}).rowcount


_REAPED_AT_ONCE = 20

# A claim one of whose open events is locked by somebody waits for the next reaping: without that
# event its successors would be tried before it. A batch's end proves nothing against each of its
# events; a claim of one that expired has had its try.
_REAP = """
WITH expired AS MATERIALIZED (
    SELECT number, event_ids, claimed_by FROM {claims}
    WHERE expires_at <= statement_timestamp()
    ORDER BY number LIMIT :limit
    FOR UPDATE SKIP LOCKED
),
covered AS MATERIALIZED (
    SELECT number, unnest(event_ids) AS id, cardinality(event_ids) AS size, claimed_by FROM expired
),
open AS MATERIALIZED (
    SELECT id FROM {outbox}
    WHERE id = ANY (ARRAY(SELECT id FROM covered)) AND published_at IS NULL AND dead_at IS NULL
),
obtained AS MATERIALIZED (
    SELECT id FROM {outbox}
    WHERE id = ANY (ARRAY(SELECT id FROM open)) AND published_at IS NULL AND dead_at IS NULL
    FOR NO KEY UPDATE SKIP LOCKED
),
blocked AS MATERIALIZED (
    SELECT DISTINCT covered.number FROM covered JOIN open USING (id)
    WHERE id NOT IN (SELECT id FROM obtained)
),
ended AS (
    DELETE FROM {claims}
    WHERE number IN (SELECT number FROM expired) AND number NOT IN (SELECT number FROM blocked)
)
UPDATE {outbox} AS event
SET attempts = CASE WHEN covered.size = 1 THEN event.attempts + 1 ELSE greatest(event.attempts, 1) END,
    last_error = 'ClaimExpired: ' || covered.claimed_by || ' did not come back in time',
    due_at = statement_timestamp()
FROM covered
WHERE event.id = covered.id AND event.id = ANY (ARRAY(SELECT id FROM obtained))
  AND covered.number NOT IN (SELECT number FROM blocked)
"""
