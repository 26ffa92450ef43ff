"""Cancellation: an event that nobody has begun to send is taken back in the caller's transaction.

Who decides is the event's row: a claim locks it until the claim's own row is committed. With the row
locked here, a claim on the event is either to be seen or cannot come any more.
"""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import Table, Uuid

from oncely.errors import CancelUnsafe
from oncely.statement import Statement
from oncely.transaction import Caller, join, says_what_is_missing

__all__ = ["Cancellation"]


class Cancellation:
    """Takes back events of one outbox."""

    def __init__(self, events: Table, claims: Table) -> None:
        self._table = events
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
        # Lock first, then look at the claims with a new snapshot: a relay may have claimed it between
        # the two. Without the savepoint a refused cancel would keep the row locked.
        async with connection.begin_nested() as savepoint:
            for statement in (self._lock, self._delete):
                if (await connection.execute(statement, {"id": event_id})).first() is None:
                    await savepoint.rollback()
                    return False
        return True


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
