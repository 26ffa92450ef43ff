"""Pruning: published events whose time is over are deleted, oldest first, and no others."""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import Integer, Table, Uuid

from oncely.retention import CUTOFF, CUTOFF_TIME, cutoff_parameters, delete_in_batches
from oncely.statement import Statement
from oncely.transaction import Caller, execute

__all__ = ["Pruning"]


class Pruning:
    """Deletes published events of one outbox table."""

    def __init__(self, events: Table) -> None:
        self._table = events
        tables = {"outbox": events}
        self._prune = Statement(_PRUNE, tables, CUTOFF | {"after": Uuid, "limit": Integer})
        self._prunable = Statement(_PRUNABLE, tables, CUTOFF | {"at_most": Integer})

    async def prune(self, session: Caller, *, older_than: timedelta | datetime, limit: int | None) -> int:
        """Delete them in batches, each going on where the last ended, up to `limit`; returns how many."""
        cutoff = cutoff_parameters(older_than)
        after = UUID(int=0)

        async def delete(size: int) -> int:
            nonlocal after
            parameters = cutoff | {"after": after, "limit": size}
            pruned = (await execute(session, self._table, self._prune, parameters)).mappings().one()
            after = pruned["last"] or after
            return int(pruned["deleted"])

        return await delete_in_batches(delete, limit)

    async def prunable(self, session: Caller, *, older_than: timedelta | datetime, at_most: int) -> int:
        """How many there are, none counted beyond `at_most`."""
        parameters = cutoff_parameters(older_than) | {"at_most": at_most}
        return int((await execute(session, self._table, self._prunable, parameters)).scalar_one())


# There is no index on published_at. Ids begin with the time they were made, so the walk along them
# stops an hour past the cutoff (application clocks differ) instead of reading the whole table.
_BOUNDS = f"""
WITH bounds AS MATERIALIZED (
    SELECT {CUTOFF_TIME} AS cutoff
),
ceiling AS MATERIALIZED (
    SELECT rpad(lpad(to_hex(milliseconds::bigint), 12, '0'), 32, '0')::uuid AS id
    FROM bounds, greatest(0, 1000 * extract(epoch FROM cutoff + interval '1 hour')) AS milliseconds
)"""  # noqa: S608  a constant

_PRUNABLE = f"""
{_BOUNDS}
SELECT count(*) FROM (
    SELECT FROM {{outbox}}
    WHERE id < (SELECT id FROM ceiling) AND published_at < (SELECT cutoff FROM bounds)
    LIMIT :at_most
) AS old
"""  # noqa: S608  a constant

_PRUNE = f"""
{_BOUNDS},
doomed AS MATERIALIZED (
    SELECT id FROM {{outbox}}
    WHERE id > :after AND id < (SELECT id FROM ceiling) AND published_at < (SELECT cutoff FROM bounds)
    ORDER BY id LIMIT :limit
    FOR UPDATE SKIP LOCKED
),
gone AS (DELETE FROM {{outbox}} WHERE id = ANY (ARRAY(SELECT id FROM doomed)) RETURNING id)
SELECT count(*) AS deleted, (SELECT id FROM doomed ORDER BY id DESC LIMIT 1) AS last FROM gone
"""  # noqa: S608  a constant
