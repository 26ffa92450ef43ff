"""The stored keys: what was answered and is kept, read, counted, forgotten and pruned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Integer, Table, Text

from oncely.answer import Outcome, read_answer
from oncely.claim import NAME
from oncely.retention import CUTOFF, CUTOFF_TIME, cutoff_parameters, delete_in_batches
from oncely.statement import Statement
from oncely.transaction import Caller, execute

__all__ = ["KeyRecord", "KeyStats", "StoredKeys"]


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key as it is stored, as an operator sees it. `answer` is None for a key without one.

    `expired`: its ttl had run out when it was read, so that it is free for the next request.
    """

    scope: str
    key: str
    answer: Outcome | None
    created_at: datetime
    expires_at: datetime | None
    expired: bool


@dataclass(frozen=True, slots=True)
class KeyStats:
    """How many keys are stored, how many of those were committed without an answer, and since when."""

    stored: int
    unanswered: int
    oldest_at: datetime | None


class StoredKeys:
    """The rows of one table of keys, outside of the claim on one. See `IdempotencyKeys` for each."""

    def __init__(self, table: Table) -> None:
        self._table = table
        tables = {"keys": table}
        self._answer = Statement(_ANSWER, tables, {**NAME})
        self._record = Statement(_RECORD, tables, {**NAME})
        self._stats = Statement(_STATS, tables, {"at_most": Integer})
        self._forget_key = Statement(_FORGET + " AND key = :key", tables, {**NAME})
        self._forget_scope = Statement(_FORGET, tables, {"scope": Text})
        self._prune = Statement(_PRUNE, tables, {**CUTOFF, "limit": Integer})
        self._prunable = Statement(_PRUNABLE, tables, {**CUTOFF, "at_most": Integer})

    async def answer(self, session: Caller, scope: str, key: str) -> Outcome | None:
        """What was answered; None also when the ttl has run out."""
        found = await execute(session, self._table, self._answer, {"scope": scope, "key": key})
        row: Sequence[Any] | None = found.first()
        return None if row is None else read_answer(*row)

    async def record(self, session: Caller, scope: str, key: str) -> KeyRecord | None:
        """All that is stored, whatever its state."""
        found = await execute(session, self._table, self._record, {"scope": scope, "key": key})
        row = found.mappings().first()
        if row is None:
            return None
        stored = (row["response_code"], row["headers"], row["response_body"], row["response_bytes"])
        return KeyRecord(
            scope=scope,
            key=key,
            answer=None if row["response_code"] is None else read_answer(*stored),
            created_at=row["created_at"],
            expires_at=row["expires_at"],
            expired=row["expired"],
        )

    async def stats(self, session: Caller, *, at_most: int) -> KeyStats:
        """Counts, none beyond `at_most`."""
        found = await execute(session, self._table, self._stats, {"at_most": at_most})
        return KeyStats(**found.mappings().one())

    async def forget(self, session: Caller, scope: str, key: str | None) -> int:
        """Delete one key, or all of the scope, but none that this transaction works on; returns how many."""
        if key is None:
            return (await execute(session, self._table, self._forget_scope, {"scope": scope})).rowcount
        which = {"scope": scope, "key": key}
        return (await execute(session, self._table, self._forget_key, which)).rowcount

    async def prune(self, session: Caller, *, older_than: timedelta | datetime, limit: int | None) -> int:
        """Delete what has expired, or has no ttl and is old, in batches; returns how many."""
        cutoff = cutoff_parameters(older_than)

        async def delete(size: int) -> int:
            return (await execute(session, self._table, self._prune, {**cutoff, "limit": size})).rowcount

        return await delete_in_batches(delete, limit)

    async def prunable(self, session: Caller, *, older_than: timedelta | datetime, at_most: int) -> int:
        """How many those are, none counted beyond `at_most`."""
        parameters = cutoff_parameters(older_than) | {"at_most": at_most}
        return int((await execute(session, self._table, self._prunable, parameters)).scalar_one())


_ANSWER = """
SELECT response_code, CAST(response_headers AS text), response_body, response_bytes
FROM {keys}
WHERE scope = :scope AND key = :key AND response_code IS NOT NULL
  AND (expires_at IS NULL OR expires_at > statement_timestamp())
"""

_RECORD = """
SELECT response_code, CAST(response_headers AS text) AS headers, response_body, response_bytes,
       created_at, expires_at, coalesce(expires_at <= statement_timestamp(), false) AS expired
FROM {keys}
WHERE scope = :scope AND key = :key
"""

_STATS = """
SELECT count(*) AS stored, count(*) FILTER (WHERE response_code IS NULL) AS unanswered,
       least((SELECT min(created_at) FROM {keys} WHERE expires_at IS NULL), min(created_at)) AS oldest_at
FROM (SELECT response_code, created_at FROM {keys} LIMIT :at_most) AS counted
"""

_FORGET = """
DELETE FROM {keys} WHERE scope = :scope AND NOT (response_code IS NULL AND created_at = now())
"""

_EXPIRED = "expires_at <= statement_timestamp()"
_OLD = f"expires_at IS NULL AND created_at < {CUTOFF_TIME}"

_PRUNE = f"""
WITH expired AS MATERIALIZED (
    SELECT ctid AS place FROM {{keys}}
    WHERE {_EXPIRED}
    ORDER BY expires_at LIMIT :limit
    FOR UPDATE SKIP LOCKED
), old AS MATERIALIZED (
    SELECT ctid AS place FROM {{keys}}
    WHERE {_OLD}
    ORDER BY created_at LIMIT :limit - (SELECT count(*) FROM expired)
    FOR UPDATE SKIP LOCKED
)
DELETE FROM {{keys}}
WHERE ctid = ANY (ARRAY(SELECT place FROM expired UNION ALL SELECT place FROM old))
"""  # noqa: S608  a constant

_PRUNABLE = f"""
SELECT count(*) FROM (
    (SELECT FROM {{keys}} WHERE {_EXPIRED} LIMIT :at_most)
    UNION ALL (SELECT FROM {{keys}} WHERE {_OLD} LIMIT :at_most)
    LIMIT :at_most
) AS prunable
"""  # noqa: S608  a constant
