"""Cancellation: an event that nobody has begun to send is taken back in the caller's transaction.

Who decides is the event's row, and who locks it first. A claim that is chosen after the row was locked here
passes the event over; one that was chosen before is committed once the claimer has gone, and can be seen.
"""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import Table, Uuid

from oncely.claimer import Claimer
from oncely.errors import CancelUnsafe
from oncely.statement import Statement
from oncely.transaction import Caller, join, says_what_is_missing

__all__ = ["Cancellation"]


class Cancellation:
    """Takes back events of one outbox."""

    def __init__(self, events: Table, claims: Table) -> None:
        self._table = events
        self._claimer = Claimer(claims)
        tables = {"outbox": events, "claims": claims}
        self._claimed = Statement(_CLAIMED, tables, {"id": Uuid})
        self._lock = Statement(_LOCK, tables, {"id": Uuid})
        self._delete = Statement(_DELETE, tables, {"id": Uuid})

    async def cancel(self, session: Caller, event_id: UUID) -> bool:
        """Whether the event is taken back; see `Outbox.cancel`."""
        connection = await join(session, self._table)
        with says_what_is_missing(self._table):
            isolation, claimed = (await connection.execute(self._claimed, {"id": event_id})).one()
        if isolation not in ("read committed", "read uncommitted"):
            raise CancelUnsafe(f"cancel needs READ COMMITTED, this transaction is {isolation.upper()}")
        if claimed:
            return False
        # The deletion looks at the claims with a new snapshot. Without the savepoint a refused cancel would
        # keep the row locked.
        async with connection.begin_nested() as savepoint:
            done = (await connection.execute(self._lock, {"id": event_id})).first() is not None
            if done and (done := await self._claimer.wait(connection)):
                done = (await connection.execute(self._delete, {"id": event_id})).first() is not None
            if not done:
                await savepoint.rollback()
        return done


_CLAIMED = """
SELECT current_setting('transaction_isolation'), EXISTS (SELECT FROM {claims} WHERE :id = ANY (event_ids))
"""

_LOCK = """
SELECT id FROM {outbox}
WHERE id = :id AND published_at IS NULL AND dead_at IS NULL AND attempts = 0
FOR UPDATE SKIP LOCKED
"""

_DELETE = """
DELETE FROM {outbox}
WHERE id = :id AND published_at IS NULL AND dead_at IS NULL AND attempts = 0
  AND NOT EXISTS (SELECT FROM {claims} WHERE :id = ANY (event_ids))
RETURNING id
"""
