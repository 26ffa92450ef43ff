"""What operators do with webhooks: count, list, try again, release, discard. Each is one statement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, Integer, Interval, Table, Text, Uuid

from oncely.statement import Statement
from oncely.transaction import Caller, execute
from oncely.webhooks.records import OriginStats, State, WebhookRecord, WebhookStats

__all__ = ["Operations", "which"]


class Operations:
    """The statements of operators on one table."""

    def __init__(self, table: Table) -> None:
        self._table = table
        tables = {"webhooks": table}
        which: dict[str, Any] = {"ids": ARRAY(Uuid), "origin": Text, "caller": Text, "limit": Integer}
        self._stats = Statement(_STATS, tables)
        self._origins = Statement(_ORIGINS, tables, {"limit": Integer})
        self._list = Statement(_LIST, tables, which | {"state": Text})
        self._reopen = Statement(
            _REOPEN, tables, which | {"states": ARRAY(Text), "horizon": Interval, "error": Text}
        )
        self._discard = Statement(_DISCARD, tables, which | {"error": Text})
        self._sealed_with = Statement(_SEALED_WITH, tables)

    async def stats(self, caller: Caller, *, limit: int) -> WebhookStats:
        totals = (await execute(caller, self._table, self._stats, {})).mappings().one()
        origins = await execute(caller, self._table, self._origins, {"limit": limit})
        return WebhookStats(**totals, origins=tuple(OriginStats(**row) for row in origins.mappings()))

    async def list(
        self, caller: Caller, *, state: State | None, which: dict[str, Any]
    ) -> Sequence[WebhookRecord]:
        parameters = which | {"state": None if state is None else State(state).value}
        rows = await execute(caller, self._table, self._list, parameters)
        found: list[dict[str, Any]] = [{**row, "state": State(row["state"])} for row in rows.mappings()]
        return [WebhookRecord(**fields) for fields in found]

    async def reopen(
        self,
        caller: Caller,
        states: Iterable[State],
        *,
        horizon: timedelta,
        error: str | None,
        which: dict[str, Any],
    ) -> int:
        parameters = which | {"states": [state.value for state in states], "horizon": horizon, "error": error}
        return (await execute(caller, self._table, self._reopen, parameters)).rowcount

    async def discard(self, caller: Caller, *, error: str | None, which: dict[str, Any]) -> int:
        return (await execute(caller, self._table, self._discard, which | {"error": error})).rowcount

    async def sealed_with(self, caller: Caller) -> dict[str, int]:
        rows = await execute(caller, self._table, self._sealed_with, {})
        return {row.key_id: row.number for row in rows}


def which(ids: Iterable[UUID] | None, origin: str | None, caller: str | None, limit: int) -> dict[str, Any]:
    """The parameters that choose webhooks: those that match all that is given."""
    if limit < 0:
        raise ValueError(f"limit is below zero: {limit}")
    return {
        "ids": None if ids is None else list(ids),
        "origin": origin,
        "caller": caller,
        "limit": limit,
    }


_MATCHES = """
(:ids IS NULL OR id = ANY (:ids)) AND (:origin IS NULL OR origin = :origin)
AND (:caller IS NULL OR caller = :caller)
"""

_AGE = """
CAST(greatest(0, coalesce(extract(epoch FROM statement_timestamp() - min(created_at)), 0)) AS float8)
"""

_STATS = f"""
WITH open AS (
    SELECT count(*) AS pending,
           count(*) FILTER (WHERE token IS NOT NULL AND due_at > statement_timestamp()) AS in_flight,
           count(*) FILTER (WHERE last_error IS NOT NULL) AS failing,
           {_AGE} AS oldest_seconds
    FROM {{webhooks}} WHERE state = 'pending'
),
closed AS (
    SELECT count(*) FILTER (WHERE state = 'expired') AS expired,
           count(*) FILTER (WHERE state = 'rejected') AS rejected,
           count(*) FILTER (WHERE state = 'quarantined') AS quarantined
    FROM {{webhooks}} WHERE state IN ('expired', 'rejected', 'quarantined')
)
SELECT * FROM open, closed
"""  # noqa: S608  a constant

_ORIGINS = f"""
SELECT origin, count(*) AS pending, count(*) FILTER (WHERE last_error IS NOT NULL) AS failing,
       {_AGE} AS oldest_seconds
FROM {{webhooks}} WHERE state = 'pending'
GROUP BY origin ORDER BY pending DESC, origin LIMIT :limit
"""  # noqa: S608  a constant

# Ids begin with the time they were made, so the newest come first.
_LIST = f"""
SELECT id, state, caller, account, type, key, origin, signing_scope, key_id, attempts, last_error,
       created_at, due_at, retry_until, finished_at
FROM {{webhooks}}
WHERE (:state IS NULL OR state = :state) AND {_MATCHES}
ORDER BY id DESC LIMIT :limit
"""  # noqa: S608  a constant

# Whoever opens one again gives it time again: left as it was, it would expire at once.
_REOPEN = f"""
UPDATE {{webhooks}}
SET state = 'pending', attempts = 0, finished_at = NULL, due_at = statement_timestamp(),
    retry_until = greatest(retry_until, statement_timestamp() + :horizon)
WHERE id = ANY (ARRAY(
    SELECT id FROM {{webhooks}}
    WHERE state = ANY (:states) AND state IN ('expired', 'rejected', 'quarantined')
      AND (:error IS NULL OR last_error = :error) AND {_MATCHES}
    ORDER BY id LIMIT :limit
    FOR UPDATE SKIP LOCKED))
"""  # noqa: S608  a constant

_DISCARD = f"""
UPDATE {{webhooks}} SET state = 'rejected', finished_at = statement_timestamp()
WHERE id = ANY (ARRAY(
    SELECT id FROM {{webhooks}}
    WHERE state = 'quarantined' AND (:error IS NULL OR last_error = :error) AND {_MATCHES}
    ORDER BY id LIMIT :limit
    FOR UPDATE SKIP LOCKED))
"""  # noqa: S608  a constant

_SEALED_WITH = """
SELECT key_id, count(*) AS number FROM {webhooks} GROUP BY key_id
"""
