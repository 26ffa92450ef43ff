"""What operators do with webhooks: count, list, try again, release, discard, prune."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, CursorResult, DateTime, Integer, Interval, Table, Text, Uuid

from oncely.arguments import check_count, check_text, check_time, ids_of
from oncely.retention import CUTOFF, CUTOFF_TIME, cutoff_parameters, delete_in_batches
from oncely.statement import Statement
from oncely.transaction import Caller, execute
from oncely.webhooks.leases import EXPIRE, EXPIRY_BATCH
from oncely.webhooks.records import OriginStats, State, WebhookRecord, WebhookStats

__all__ = ["Operations", "Which"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Which:
    """A choice of webhooks: those that match all that is given. At most `limit` are taken."""

    ids: Iterable[UUID] | None
    error: str | None = None
    origin: str | None
    caller: str | None
    limit: int

    def parameters(self) -> dict[str, Any]:
        """The values of the statements' parameters, checked: see `oncely.arguments`."""
        check_count(self.limit, "limit", least=0)
        check_text(self.error, "error")
        check_text(self.origin, "origin")
        check_text(self.caller, "caller")
        return {
            "ids": ids_of(self.ids),
            "error": self.error,
            "origin": self.origin,
            "caller": self.caller,
            "limit": self.limit,
        }


class Operations:
    """The statements of operators on one table."""

    def __init__(self, table: Table) -> None:
        self._table = table
        tables = {"webhooks": table}
        chosen: dict[str, Any] = dict.fromkeys(("error", "origin", "caller"), Text)
        chosen |= {"ids": ARRAY(Uuid), "limit": Integer}
        ended = {"states": ARRAY(Text)}
        self._stats = Statement(_STATS, tables)
        self._origins = Statement(_ORIGINS, tables, {"limit": Integer})
        self._list = Statement(_LIST, tables, chosen | {"state": Text})
        self._dead = Statement(_DEAD, tables, chosen | ended | {"type": Text, "since": _TIME, "until": _TIME})
        self._reopen = Statement(_REOPEN, tables, chosen | ended | {"horizon": Interval})
        self._discard = Statement(_DISCARD, tables, chosen)
        self._expire = Statement(EXPIRE, tables, {"batch": Integer})
        self._prune = Statement(_PRUNE, tables, CUTOFF | {"limit": Integer})
        self._prunable = Statement(_PRUNABLE, tables, CUTOFF | {"at_most": Integer})
        self._sealed_with = Statement(_SEALED_WITH, tables)

    async def stats(self, caller: Caller, *, limit: int) -> WebhookStats:
        totals = (await execute(caller, self._table, self._stats, {})).mappings().one()
        origins = await execute(caller, self._table, self._origins, {"limit": limit})
        return WebhookStats(**totals, origins=tuple(OriginStats(**row) for row in origins.mappings()))

    async def list(self, caller: Caller, which: Which, *, state: State | None) -> Sequence[WebhookRecord]:
        """Those chosen, newest first."""
        parameters = which.parameters() | {"state": None if state is None else State(state).value}
        return _records(await execute(caller, self._table, self._list, parameters))

    async def dead(
        self,
        caller: Caller,
        which: Which,
        *,
        states: Iterable[State],
        type_: str | None,
        since: datetime | None,
        until: datetime | None,
    ) -> Sequence[WebhookRecord]:
        """Those chosen that ended in one of these states, oldest first."""
        check_text(type_, "type")
        check_time(since, "since")
        check_time(until, "until")
        if isinstance(states, str) or not isinstance(states, Iterable):
            raise TypeError(f"states must be a collection of them, not {type(states).__name__}")
        parameters = which.parameters() | {"states": [State(state).value for state in states]}
        parameters |= {"type": type_, "since": since, "until": until}
        return _records(await execute(caller, self._table, self._dead, parameters))

    async def reopen(
        self, caller: Caller, which: Which, *, states: Iterable[State], horizon: timedelta
    ) -> int:
        """Make pending those chosen that ended in one of these states; how many."""
        parameters = which.parameters() | {"states": [state.value for state in states], "horizon": horizon}
        return (await execute(caller, self._table, self._reopen, parameters)).rowcount

    async def discard(self, caller: Caller, which: Which) -> int:
        """Reject those chosen that are quarantined; how many."""
        return (await execute(caller, self._table, self._discard, which.parameters())).rowcount

    async def prune(self, caller: Caller, *, older_than: timedelta | datetime, limit: int | None) -> int:
        """Expire what is overdue, then delete what is finished and old; how many were deleted."""
        cutoff = cutoff_parameters(older_than)

        async def expire(size: int) -> int:
            return (await execute(caller, self._table, self._expire, {"batch": size})).rowcount

        async def delete(size: int) -> int:
            return (await execute(caller, self._table, self._prune, cutoff | {"limit": size})).rowcount

        await delete_in_batches(expire, EXPIRY_BATCH if limit is None else limit)
        return await delete_in_batches(delete, limit)

    async def prunable(self, caller: Caller, *, older_than: timedelta | datetime, at_most: int) -> int:
        """How many are finished and old, none counted beyond `at_most`."""
        parameters = cutoff_parameters(older_than) | {"at_most": at_most}
        return int((await execute(caller, self._table, self._prunable, parameters)).scalar_one())

    async def sealed_with(self, caller: Caller) -> dict[str, int]:
        rows = await execute(caller, self._table, self._sealed_with, {})
        return {row.key_id: row.number for row in rows}


def _records(rows: CursorResult[Any]) -> Sequence[WebhookRecord]:
    found: list[dict[str, Any]] = [{**row, "state": State(row["state"])} for row in rows.mappings()]
    return [WebhookRecord(**fields) for fields in found]


_TIME = DateTime(timezone=True)

_MATCHES = """
(:ids IS NULL OR id = ANY (:ids)) AND (:origin IS NULL OR origin = :origin)
AND (:caller IS NULL OR caller = :caller) AND (:error IS NULL OR last_error = :error)
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

# A quarantined one has no `finished_at`. The end of its last lease, which `due_at` still is, stands for it.
_DEAD = f"""
SELECT {_OPEN_COLUMNS} FROM {{webhooks}}
WHERE state = ANY (:states) AND state IN ('expired', 'rejected', 'quarantined') AND {_MATCHES}
  AND (:type IS NULL OR type = :type)
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
    WHERE state = ANY (:states) AND state IN ('expired', 'rejected', 'quarantined') AND {_MATCHES}
    ORDER BY id LIMIT :limit
    FOR UPDATE SKIP LOCKED))
"""  # noqa: S608  a constant

_DISCARD = f"""
UPDATE {{webhooks}} SET state = 'rejected', finished_at = statement_timestamp()
WHERE id = ANY (ARRAY(
    SELECT id FROM {{webhooks}}
    WHERE state = 'quarantined' AND {_MATCHES}
    ORDER BY id LIMIT :limit
    FOR UPDATE SKIP LOCKED))
"""  # noqa: S608  a constant

_OLD = f"""
state IN ('delivered', 'expired', 'rejected')
AND retry_until < least({CUTOFF_TIME}, statement_timestamp() - interval '7 days')
"""

_PRUNABLE = f"""
SELECT count(*) FROM (SELECT FROM {{webhooks}} WHERE {_OLD} LIMIT :at_most) AS old
"""  # noqa: S608  a constant

_PRUNE = f"""
DELETE FROM {{webhooks}}
WHERE id = ANY (ARRAY(
    SELECT id FROM {{webhooks}} WHERE {_OLD}
    ORDER BY retry_until LIMIT :limit
    FOR UPDATE SKIP LOCKED))
"""  # noqa: S608  a constant

_SEALED_WITH = """
SELECT key_id, count(*) AS number FROM {webhooks} GROUP BY key_id
"""
