"""Statistics of an outbox: how many events are in each state, and how far behind the relays are.

Every event that is neither published nor dead is counted once: in flight when a claim has it, retrying
when it was tried, deferred when its time has not come, and else ready. Counting reads along the indexes
of what is open, never the table, and no state is counted further than asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Integer, Table

from oncely.statement import Statement
from oncely.transaction import Caller, execute

__all__ = ["OutboxStats", "Statistics"]


@dataclass(frozen=True, slots=True)
class OutboxStats:
    """One look at an outbox. `ready` counts those, too, that wait for an earlier event of their key.

    `lag_seconds` is how long the first event in line has been due; see `Outbox.lag_seconds`.
    """

    ready: int
    deferred: int
    in_flight: int
    retrying: int
    dead: int
    lag_seconds: float


class Statistics:
    """Looks at the tables of one outbox. `parks`: dead events hold back the later ones of their key."""

    def __init__(self, events: Table, claims: Table, *, parks: bool) -> None:
        self._table = events
        tables = {"outbox": events, "claims": claims}
        lag = _LAG.replace("/* parked */", _PARKED if parks else "false")
        self._lag = Statement(lag, tables)
        self._look = Statement(_LOOK.replace("/* lag */", lag), tables, {"at_most": Integer})

    async def lag_seconds(self, session: Caller) -> float:
        """How long the first event in line has been due; 0.0 if there is none."""
        return float((await execute(session, self._table, self._lag, {})).scalar_one())

    async def look(self, session: Caller, *, at_most: int) -> OutboxStats:
        """All of it, by one statement. No count goes beyond `at_most`."""
        found = await execute(session, self._table, self._look, {"at_most": at_most})
        row: Sequence[Any] = found.one()
        return OutboxStats(*row)


# A range, and not IS NOT NULL, which a planner without statistics takes to be true of the whole table.
_PARKED = """key IN (
    SELECT key FROM {outbox} WHERE dead_at BETWEEN '-infinity' AND 'infinity' AND key IS NOT NULL
)"""

_LAG = """
WITH open AS NOT MATERIALIZED (
    SELECT position, created_at, due_at, attempts FROM {outbox}
    WHERE published_at IS NULL AND dead_at IS NULL AND (key IS NULL OR NOT (/* parked */))
),
since AS (
    SELECT least(
        (SELECT created_at FROM open WHERE due_at IS NULL ORDER BY position LIMIT 1),
        (SELECT due_at FROM open WHERE attempts = 0 AND due_at <= statement_timestamp()
         ORDER BY due_at LIMIT 1),
        (SELECT min(created_at) FROM open WHERE attempts > 0)
    ) AS since
)
SELECT CAST(greatest(coalesce(extract(epoch FROM statement_timestamp() - since), 0), 0) AS float8) FROM since
"""

# Each state is read in the order of its index: left to itself, the planner may read the whole table,
# since a queue's statistics are always out of date.
_LOOK = """
WITH taken AS MATERIALIZED (SELECT unnest(event_ids) AS id FROM {claims}),
ready AS MATERIALIZED (
    SELECT position FROM {outbox}
    WHERE published_at IS NULL AND dead_at IS NULL AND due_at IS NULL AND id NOT IN (SELECT id FROM taken)
    ORDER BY position LIMIT :at_most
),
due AS MATERIALIZED (
    SELECT position FROM {outbox}
    WHERE published_at IS NULL AND dead_at IS NULL AND due_at <= statement_timestamp() AND attempts = 0
      AND id NOT IN (SELECT id FROM taken)
    ORDER BY due_at, position LIMIT :at_most
),
deferred AS MATERIALIZED (
    SELECT position FROM {outbox}
    WHERE published_at IS NULL AND dead_at IS NULL AND due_at > statement_timestamp() AND attempts = 0
    ORDER BY due_at, position LIMIT :at_most
),
retrying AS MATERIALIZED (
    SELECT position FROM {outbox}
    WHERE published_at IS NULL AND dead_at IS NULL AND attempts > 0 AND id NOT IN (SELECT id FROM taken)
    ORDER BY key, position LIMIT :at_most
),
dead AS MATERIALIZED (
    SELECT position FROM {outbox} WHERE dead_at IS NOT NULL ORDER BY dead_at LIMIT :at_most
)
SELECT least((SELECT count(*) FROM ready) + (SELECT count(*) FROM due), :at_most),
       (SELECT count(*) FROM deferred),
       least((SELECT count(*) FROM taken), :at_most),
       (SELECT count(*) FROM retrying),
       (SELECT count(*) FROM dead),
       (/* lag */)
"""
