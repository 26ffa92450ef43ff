"""The dead letters of an outbox: events that are not tried any more, until a person decides.

A dead event keeps its row, its id and its place in line. Replaying makes it a tried event that is due
at once, so under `park` the later events of its key wait for it; discarding deletes it. Both are one
bounded statement and pass over rows that somebody has locked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, CursorResult, DateTime, Integer, Table, Text, Uuid
from sqlalchemy.types import TypeEngine

from oncely.arguments import check_count, check_text, check_time, ids_of
from oncely.statement import Statement
from oncely.transaction import Caller, execute

__all__ = ["DeadEvent", "DeadLetters", "Which"]


@dataclass(frozen=True, slots=True)
class DeadEvent:
    """A dead event, as an operator sees it. `error` is the class of the last error and its message."""

    id: UUID
    topic: str
    key: str | None
    payload_json: str
    attempts: int
    error: str | None
    created_at: datetime
    dead_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Which:
    """A choice of dead events: those that match all that is given. Nothing given: all of them.

    `error` is the name of an error's class; `since` and `until` bound the time of death, as aware
    datetimes. At most `limit` are taken, those first in line first.
    """

    ids: Iterable[UUID] | None = None
    topic: str | None = None
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    limit: int

    def parameters(self) -> dict[str, Any]:
        """The values of the statements' parameters, checked: see `oncely.arguments`."""
        check_text(self.topic, "topic")
        check_text(self.error, "error")
        check_time(self.since, "since")
        check_time(self.until, "until")
        check_count(self.limit, "limit")
        return {
            "ids": ids_of(self.ids),
            "topic": self.topic,
            "error": self.error,
            "since": self.since,
            "until": self.until,
            "limit": self.limit,
        }


class DeadLetters:
    """What an operator does with the dead events of one outbox table."""

    def __init__(self, events: Table) -> None:
        self._table = events
        tables = {"outbox": events}
        self._ids = Statement(_IDS, tables, _WHICH)
        self._list = Statement(_LIST, tables, _WHICH)
        self._replay = Statement(_REPLAY, tables, _WHICH)
        self._discard = Statement(_DISCARD, tables, _WHICH)

    async def list(self, session: Caller, which: Which) -> list[DeadEvent]:
        """The chosen events, first in line first."""
        rows = (await self._execute(session, self._list, which)).mappings()
        return [DeadEvent(**row) for row in rows]

    async def ids(self, session: Caller, which: Which) -> Sequence[UUID]:
        """The ids of the chosen events, first in line first."""
        return (await self._execute(session, self._ids, which)).scalars().all()

    async def replay(self, session: Caller, which: Which) -> int:
        """Make the chosen events due at once, with one try counted; returns how many."""
        return int((await self._execute(session, self._replay, which)).scalar_one())

    async def discard(self, session: Caller, which: Which) -> int:
        """Delete the chosen events; returns how many."""
        return int((await self._execute(session, self._discard, which)).scalar_one())

    async def _execute(self, session: Caller, statement: Statement, which: Which) -> CursorResult[Any]:
        return await execute(session, self._table, statement, which.parameters())


_WHICH: dict[str, TypeEngine[Any] | type[TypeEngine[Any]]] = {
    "ids": ARRAY(Uuid),
    "topic": Text,
    "error": Text,
    "since": DateTime(timezone=True),
    "until": DateTime(timezone=True),
    "limit": Integer,
}

# A range, and not IS NOT NULL, which a planner without statistics takes to be true of the whole table.
_CHOSEN = """
    FROM {outbox}
    WHERE dead_at BETWEEN '-infinity' AND 'infinity'
      AND (:ids IS NULL OR id = ANY (:ids))
      AND (:topic IS NULL OR topic = :topic)
      AND (:error IS NULL OR split_part(last_error, ':', 1) = :error)
      AND (:since IS NULL OR dead_at >= :since) AND (:until IS NULL OR dead_at < :until)
    ORDER BY position LIMIT :limit
"""

_LIST = f"""
SELECT id, topic, key, payload::text AS payload_json, attempts, last_error AS error, created_at, dead_at
{_CHOSEN}
"""

_IDS = f"SELECT id {_CHOSEN}"

_REPLAY = f"""
WITH chosen AS MATERIALIZED (SELECT id {_CHOSEN} FOR UPDATE SKIP LOCKED),
replayed AS (
    UPDATE {{outbox}} SET dead_at = NULL, due_at = statement_timestamp(), attempts = 1
    WHERE id = ANY (ARRAY(SELECT id FROM chosen)) RETURNING id
)
SELECT count(*) FROM replayed
"""  # noqa: S608  a constant

_DISCARD = f"""
WITH chosen AS MATERIALIZED (SELECT id {_CHOSEN} FOR UPDATE SKIP LOCKED),
discarded AS (DELETE FROM {{outbox}} WHERE id = ANY (ARRAY(SELECT id FROM chosen)) RETURNING id)
SELECT count(*) FROM discarded
"""  # noqa: S608  a constant
