"""Leases: who makes the next attempt of a webhook, and what became of it.

A lease is a token in the row and the time until which nobody else makes an attempt. Whatever is recorded
is recorded by the token: a worker that has lost its lease changes nothing. All times are the database's.

Claiming goes from origin to origin, and takes from each what its share allows. So the webhooks of one
endpoint, however many they are, are passed over in one step when their share is used up.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

from sqlalchemy import ARRAY, Integer, Interval, Table, Text, Uuid

from oncely.statement import Statement
from oncely.transaction import Sessionmaker, alone
from oncely.webhooks.rows import ROUTING_AND_SEALED, routing, sealed
from oncely.webhooks.sealing import Routing, Sealed

__all__ = ["EXPIRE", "Claimed", "Lease", "Leases", "Standing"]

Standing = Literal["ours", "overdue", "lost"]
"""Of a lease: it is live; it is, but the time to send is over; it is not ours any more."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One webhook that is ours to send, until `ends_at` on the monotonic clock (or a little longer)."""

    routing: Routing
    sealed: Sealed = field(repr=False)
    attempt: int
    token: UUID
    claimed_at: datetime
    started_at: float
    ends_at: float

    @property
    def id(self) -> UUID:
        return self.routing.id

    def now(self) -> datetime:
        """The time by the database's clock, as far as it can be told without asking."""
        return self.claimed_at + timedelta(seconds=time.monotonic() - self.started_at)


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim took, and how many overdue webhooks it found expired on the way."""

    leases: list[Lease]
    expired: int


class Leases:
    """The statements of the worker on one table. `duration` of a lease is the worker's."""

    def __init__(self, table: Table) -> None:
        self._table = table
        tables = {"webhooks": table}
        one = {"id": Uuid, "token": Uuid}
        self._claim = Statement(
            _CLAIM,
            tables,
            {
                "after": Text,
                "limit": Integer,
                "share": Integer,
                "busy": ARRAY(Text),
                "busy_counts": ARRAY(Integer),
                "token": Uuid,
                "lease": Interval,
                "batch": Integer,
            },
        )
        self._look = Statement(_LOOK, tables, one)
        self._finish = Statement(_FINISH, tables, one | {"state": Text, "error": Text})
        self._retry = Statement(_RETRY, tables, one | {"error": Text, "delay": Interval, "lease": Interval})
        self._release = Statement(_RELEASE, tables, one)
        self._recorded = Statement(_RECORDED, tables, {"id": Uuid, "attempt": Integer, "error": Text})

    async def claim(
        self,
        sessionmaker: Sessionmaker,
        *,
        limit: int,
        share: int,
        busy: Mapping[str, int],
        duration: timedelta,
        after: str,
    ) -> Claimed:
        """Up to `limit` webhooks that are due, of every origin `share` at most, less what is `busy` there.

        Origins come in turn, the first one after the origin `after`; in each, the longest due first.
        """
        token = uuid.uuid4()
        started_at = time.monotonic()
        parameters = {
            "after": after,
            "limit": limit,
            "share": share,
            "busy": list(busy),
            "busy_counts": list(busy.values()),
            "token": token,
            "lease": duration,
            "batch": EXPIRY_BATCH,
        }
        rows = await alone(
            sessionmaker,
            self._table,
            lambda connection: connection.execute(self._claim, parameters).mappings().all(),
        )
        ends_at = started_at + duration.total_seconds()
        leases = [
            Lease(
                routing=routing(self._table, row),
                sealed=sealed(row),
                attempt=row["attempts"],
                token=token,
                claimed_at=row["claimed_at"],
                started_at=started_at,
                ends_at=ends_at,
            )
            for row in rows
            if row["id"] is not None
        ]
        return Claimed(leases, rows[0]["expired"])

    async def look(self, sessionmaker: Sessionmaker, lease: Lease) -> Standing:
        """How the lease stands right now."""
        in_time = await self._alone(sessionmaker, self._look, _one(lease))
        if in_time is None:
            return "lost"
        return "ours" if in_time else "overdue"

    async def finish(
        self,
        sessionmaker: Sessionmaker,
        lease: Lease,
        state: Literal["delivered", "rejected", "quarantined"],
        error: str | None = None,
    ) -> bool:
        """Record the end. False: the lease is another's, and nothing was changed."""
        parameters = _one(lease) | {"state": state, "error": error}
        return await self._changes(sessionmaker, self._finish, parameters)

    async def retry(
        self, sessionmaker: Sessionmaker, lease: Lease, error: str, delay: timedelta, *, duration: timedelta
    ) -> Literal["pending", "expired"] | None:
        """Record a failure: tried again after `delay`, but in time for a last attempt.

        What became of it: pending, or expired when this was the last attempt. None: the lease is
        another's.
        """
        parameters = _one(lease) | {"error": error, "delay": delay, "lease": duration}
        state: Literal["pending", "expired"] | None
        state = await self._alone(sessionmaker, self._retry, parameters)
        return state

    async def recorded(self, sessionmaker: Sessionmaker, lease: Lease, error: str | None) -> str | None:
        """The state that an ending with this error led to, if it was this lease's; None if it was not."""
        parameters = {"id": lease.id, "attempt": lease.attempt, "error": error}
        state: str | None = await self._alone(sessionmaker, self._recorded, parameters)
        return state

    async def release(self, sessionmaker: Sessionmaker, lease: Lease) -> bool:
        """Give it back as it was: nothing was sent. False: the lease is another's."""
        return await self._changes(sessionmaker, self._release, _one(lease))

    async def _alone(
        self, sessionmaker: Sessionmaker, statement: Statement, parameters: dict[str, Any]
    ) -> Any:
        """What the statement's one row says, if there is one."""
        return await alone(
            sessionmaker,
            self._table,
            lambda connection: connection.execute(statement, parameters).scalar_one_or_none(),
        )

    async def _changes(
        self, sessionmaker: Sessionmaker, statement: Statement, parameters: dict[str, Any]
    ) -> bool:
        """Whether the statement changed its one row."""
        return await alone(
            sessionmaker,
            self._table,
            lambda connection: connection.execute(statement, parameters).rowcount == 1,
        )


EXPIRY_BATCH = 1_000
"""The most overdue webhooks that one statement expires."""


def _one(lease: Lease) -> dict[str, Any]:
    return {"id": lease.id, "token": lease.token}


# A lapsed lease is nobody's; a live one may yet deliver.
EXPIRE = """
UPDATE {webhooks} SET state = 'expired', finished_at = statement_timestamp(), token = NULL
WHERE id = ANY (ARRAY(
    SELECT id FROM {webhooks}
    WHERE state = 'pending' AND retry_until <= statement_timestamp()
      AND (token IS NULL OR due_at <= statement_timestamp())
    ORDER BY retry_until LIMIT :batch
    FOR UPDATE SKIP LOCKED))
RETURNING id
"""

# `ahead` and `behind` step from origin to origin, each step a look into the index, and only as far as
# `limit` needs them. What is expired and what is claimed in one statement are never the same rows.
_CLAIM = f"""
WITH RECURSIVE
expired AS ({EXPIRE}),
busy AS MATERIALIZED (SELECT * FROM unnest(:busy, :busy_counts) AS busy (origin, count)),
ahead AS (
    SELECT min(origin) AS origin FROM {{webhooks}} WHERE state = 'pending' AND origin > :after
    UNION ALL
    SELECT (SELECT min(origin) FROM {{webhooks}} WHERE state = 'pending' AND origin > ahead.origin)
    FROM ahead WHERE ahead.origin IS NOT NULL
),
behind AS (
    SELECT min(origin) AS origin FROM {{webhooks}} WHERE state = 'pending' AND origin <= :after
    UNION ALL
    SELECT (
        SELECT min(origin) FROM {{webhooks}}
        WHERE state = 'pending' AND origin > behind.origin AND origin <= :after)
    FROM behind WHERE behind.origin IS NOT NULL
),
origins AS (
    SELECT origin FROM ahead WHERE origin IS NOT NULL
    UNION ALL
    SELECT origin FROM behind WHERE origin IS NOT NULL
),
chosen AS MATERIALIZED (
    SELECT due.id FROM origins CROSS JOIN LATERAL (
        SELECT id FROM {{webhooks}} AS webhook
        WHERE state = 'pending' AND webhook.origin = origins.origin
          AND due_at <= statement_timestamp() AND retry_until > statement_timestamp()
        ORDER BY due_at
        LIMIT greatest(0, :share - coalesce((SELECT count FROM busy WHERE busy.origin = origins.origin), 0))
        FOR UPDATE SKIP LOCKED
    ) AS due
    LIMIT :limit
),
claimed AS (
    UPDATE {{webhooks}}
    SET token = :token, due_at = statement_timestamp() + :lease, attempts = attempts + 1
    WHERE id = ANY (ARRAY(SELECT id FROM chosen))
    RETURNING {ROUTING_AND_SEALED}, attempts
)
SELECT claimed.*, statement_timestamp() AS claimed_at, counted.expired
FROM (SELECT count(*) AS expired FROM expired) AS counted LEFT JOIN claimed ON true
"""  # noqa: S608  a constant

_LOOK = """
SELECT retry_until > statement_timestamp() FROM {webhooks}
WHERE id = :id AND token = :token AND due_at > statement_timestamp()
"""

# By the token alone, also after the lease's end: as long as nobody took the row, what is known is true.
_FINISH = """
UPDATE {webhooks}
SET state = :state, last_error = :error, token = NULL,
    finished_at = CASE WHEN :state = 'quarantined' THEN NULL ELSE statement_timestamp() END
WHERE id = :id AND token = :token
"""

# `due_at` is still the lease's end: if that is past `retry_until`, no further attempt fits. Otherwise one
# does, and what would come too late comes in time for it.
_RETRY = """
UPDATE {webhooks}
SET token = NULL, last_error = :error,
    state = CASE WHEN due_at >= retry_until THEN 'expired' ELSE 'pending' END,
    finished_at = CASE WHEN due_at >= retry_until THEN statement_timestamp() END,
    due_at = least(statement_timestamp() + :delay, retry_until - :lease)
WHERE id = :id AND token = :token
RETURNING state
"""

_RELEASE = """
UPDATE {webhooks} SET token = NULL, due_at = statement_timestamp(), attempts = attempts - 1
WHERE id = :id AND token = :token
"""

# Every claim counts an attempt, so as long as the count is ours, nobody has claimed it after us.
_RECORDED = """
SELECT state FROM {webhooks}
WHERE id = :id AND token IS NULL AND attempts = :attempt AND last_error IS NOT DISTINCT FROM :error
"""
