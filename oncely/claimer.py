"""Claimer: whoever makes a claim. There is one at a time, and others keep clear of it by its lock.

The lock is PostgreSQL's advisory one, on the table of the claims, and ends with the transaction.
"""

from __future__ import annotations

from sqlalchemy import Connection, Table
from sqlalchemy.ext.asyncio import AsyncConnection

from oncely.statement import Statement

__all__ = ["Claimer"]


class Claimer:
    """The claimer's lock of one outbox."""

    def __init__(self, claims: Table) -> None:
        self._become = Statement(_BECOME, {"claims": claims})
        self._keep_out = Statement(_KEEP_OUT, {"claims": claims})

    def become(self, connection: Connection) -> tuple[bool, bool]:
        """Be the claimer until the transaction ends. Whether a claim has expired; whether it has written."""
        expired, writes, _ = connection.execute(self._become).one()
        return expired, writes

    def keep_out(self, connection: Connection) -> None:
        """Let the claimer end, and no other begin before this transaction ends."""
        connection.execute(self._keep_out)

    async def wait(self, connection: AsyncConnection) -> None:
        """Return when every claim is committed that was begun before now."""
        async with connection.begin_nested() as savepoint:
            await connection.execute(self._keep_out)
            await savepoint.rollback()  # lets go of the lock


# In a statement of its own, so that the next one sees what was committed while this one waited. A
# claimer that stalls with the lock is ended by the server, so it cannot stop the others. A queue's
# statistics are always out of date, so for this transaction the planner is told what is known: along
# the indexes, with the plan that is there. Nobody waits for the disk: when the server crashes, a claim
# that is lost with it means no more than that its events are claimed again.
_BECOME = """
SELECT EXISTS (SELECT FROM {claims} WHERE expires_at <= statement_timestamp()) AS expired,
       pg_current_xact_id_if_assigned() IS NOT NULL AS writes,
       count(set_config(name, value, true))
FROM pg_advisory_xact_lock(1869505381, '{claims}'::regclass::oid::int4),
     (VALUES ('idle_in_transaction_session_timeout', '5000'), ('plan_cache_mode', 'force_generic_plan'),
             ('enable_seqscan', 'off'), ('enable_bitmapscan', 'off'), ('jit', 'off'),
             ('synchronous_commit', 'off')) AS setting (name, value)
"""

# Shared: those who keep the claimer out do not keep each other out.
_KEEP_OUT = "SELECT pg_advisory_xact_lock_shared(1869505381, '{claims}'::regclass::oid::int4)"
