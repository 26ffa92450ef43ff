"""Claimer: whoever makes a claim. There is one at a time, and others keep clear of it by its lock.

The lock is PostgreSQL's advisory one, on the table of the claims, and ends with the transaction.

A process may stand still with it. Between two statements the server ends it; but it does not while it
waits for the rest of a statement that a driver sends in parts, or to get rid of an answer. So who waits for
the claimer waits for a time: a cancel takes that for a no, a relay ends it and tries again.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import Connection, Interval, Table
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from oncely.statement import Statement
from oncely.transaction import is_lock_timeout

__all__ = ["Claimer"]

_PATIENCE = timedelta(seconds=5)
"""How long whoever has the lock may stand still, and a cancel waits for a claimer."""


class Claimer:
    """The claimer's lock of one outbox."""

    def __init__(self, claims: Table) -> None:
        self._become = Statement(_BECOME, {"claims": claims})
        self._keep_out = Statement(_KEEP_OUT, {"claims": claims})
        self._wait = Statement(_WAIT, {"claims": claims}, {"patience": Interval})
        self._end_stalled = Statement(_END_STALLED, {"claims": claims}, {"patience": Interval})

    def end_stalled(self, connection: Connection) -> None:
        """End whoever of this user has the lock, in any mode, and has waited for its own client for long."""
        connection.execute(self._end_stalled, {"patience": _PATIENCE})

    def become(self, connection: Connection) -> tuple[bool, bool]:
        """Be the claimer until the transaction ends.

        Returns whether a claim has expired, and whether the transaction has written something already.
        """
        expired, writes, _ = connection.execute(self._become).one()
        return expired, writes

    def keep_out(self, connection: Connection) -> None:
        """Let the claimer end, and no other begin before this transaction ends."""
        connection.execute(self._keep_out)

    async def wait(self, connection: AsyncConnection) -> bool:
        """Wait until every claim is committed that was begun before now. False: one took too long."""
        async with connection.begin_nested() as savepoint:
            try:
                await connection.execute(self._wait, {"patience": _PATIENCE})
                ended = True
            except DBAPIError as error:
                if not is_lock_timeout(error):
                    raise
                ended = False
            await savepoint.rollback()  # lets go of the lock, and takes back the settings
        return ended


# The lock's two numbers: "once" in ASCII, and the table.
_CLASS = 1869505381
_LOCK = f"{_CLASS}, '{{claims}}'::regclass::oid::int4"

_STALLED_AFTER = f"'idle_in_transaction_session_timeout', '{_PATIENCE // timedelta(milliseconds=1)}'"

# In a statement of its own, so that the next one sees what was committed while this one waited. A
# claimer that stalls with the lock is ended by the server, or by the next, so it cannot stop the others.
# A queue's statistics are always out of date, so for this transaction the planner is told what is known:
# along the indexes, with the plan that is there. Nobody waits for the disk: when the server crashes, a
# claim that is lost with it means no more than that its events are claimed again.
_BECOME = f"""
SELECT EXISTS (SELECT FROM {{claims}} WHERE expires_at <= statement_timestamp()) AS expired,
       pg_current_xact_id_if_assigned() IS NOT NULL AS writes,
       count(set_config(name, value, true))
FROM pg_advisory_xact_lock({_LOCK}),
     (VALUES ({_STALLED_AFTER}), ('plan_cache_mode', 'force_generic_plan'), ('enable_seqscan', 'off'),
             ('enable_bitmapscan', 'off'), ('jit', 'off'), ('synchronous_commit', 'off')
     ) AS setting (name, value)
"""  # noqa: S608  a constant

# Shared: those who keep the claimer out do not keep each other out. They may stall with the lock as well.
_KEEP_OUT = f"""
SELECT pg_advisory_xact_lock_shared({_LOCK}) FROM set_config({_STALLED_AFTER}, true)
"""  # noqa: S608  a constant

# The caller's own limit holds where it is lower.
_WAIT = f"""
SELECT pg_advisory_xact_lock_shared({_LOCK})
FROM CAST(current_setting('lock_timeout') AS interval) AS own,
     set_config('lock_timeout',
        (1000 * extract(epoch FROM least(:patience, nullif(own, '0'))))::int::text, true) AS waiting,
     set_config({_STALLED_AFTER}, true) AS stalling
"""  # noqa: S608  a constant

_END_STALLED = f"""
SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND objsubid = 2
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND classid = {_CLASS} AND objid = '{{claims}}'::regclass
  AND usename = current_user AND wait_event_type = 'Client' AND state_change < clock_timestamp() - :patience
"""  # noqa: S608  a constant
