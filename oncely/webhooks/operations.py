"""What operators do with webhooks: count, list, try again, release, discard. Each is one statement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, CursorResult, DateTime, Integer, Interval, Table, Text, Uuid

from oncely.arguments import check_count, check_text, check_time, ids_of
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
        self._dead = Statement(
            _DEAD,
            tables,
            which | {"states": ARRAY(Text), "type": Text, "error": Text, "since": _TIME, "until": _TIME},
        )
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
        return _records(await execute(caller, self._table, self._list, parameters))

    async def dead(
        self,
        caller: Caller,
        *,
        states: Iterable[State],
        type_: str | None,
        error: str | None,
        since: datetime | None,
        until: datetime | None,
        which: dict[str, Any],
    ) -> Sequence[WebhookRecord]:
        check_text(type_, "type")
        check_text(error, "error")
        check_time(since, "since")
        check_time(until, "until")
        given = [State(state).value for state in states]
        chosen = which | {"states": given, "type": type_, "error": error, "since": since, "until": until}
        return _records(await execute(caller, self._table, self._dead, chosen))

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
    check_count(limit, "limit", least=0)
    check_text(origin, "origin")
    check_text(caller, "caller")
    return {
        "ids": ids_of(ids),
        "origin": origin,
        "caller": caller,
        "limit": limit,
    }


def _records(rows: CursorResult[Any]) -> Sequence[WebhookRecord]:
    found: list[dict[str, Any]] = [{**row, "state": State(row["state"])} for row in rows.mappings()]
    return [WebhookRecord(**fields) for fields in found]


_TIME = DateTime(timezone=True)

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

_OPEN_COLUMNS = """
id, state, caller, account, type, key, origin, signing_scope, key_id, attempts, last_error,
created_at, due_at, retry_until, finished_at
"""

# Ids begin with the time they were made, so the newest come first.
_LIST = f"""
SELECT {_OPEN_COLUMNS} FROM {{webhooks}}
WHERE (:state IS NULL OR state = :state) AND {_MATCHES}
ORDER BY id DESC LIMIT :limit
"""  # noqa: S608  a constant

# A quarantined one is not finished; it became so no later than its lease's end, which `due_at` still is.
_DEAD = f"""
SELECT {_OPEN_COLUMNS} FROM {{webhooks}}
WHERE state = ANY (:states) AND state IN ('expired', 'rejected', 'quarantined') AND {_MATCHES}
  AND (:type IS NULL OR type = :type) AND (:error IS NULL OR last_error = :error)
  AND (:since IS NULL OR coalesce(finished_at, due_at) >= :since)
  AND (:until IS NULL OR coalesce(finished_at, due_at) < :until)
ORDER BY id LIMIT :limit
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
