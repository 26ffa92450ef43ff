"""Resending: what was published and is lost behind the broker leaves once more.

A broker that lost its data has lost what nobody had handled yet, and nothing in the outbox knows which
events those were. As long as their rows are kept, they can be sent again, with the ids that they had:
consumers with an inbox handle what they have missed, and know the rest.

They become events that are due and were never tried, in their old places in line. So each key keeps its
order, also with what was emitted meanwhile and has not left yet.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import DateTime, Table, Text

from oncely.arguments import check_text, check_time
from oncely.statement import Statement
from oncely.transaction import Caller, execute

__all__ = ["Resending"]


class Resending:
    """Makes published events of one outbox table due again."""

    def __init__(self, events: Table) -> None:
        self._table = events
        time = DateTime(timezone=True)
        self._republish = Statement(
            _REPUBLISH, {"outbox": events}, {"since": time, "until": time, "topic": Text}
        )

    async def republish(
        self, session: Caller, *, since: datetime, until: datetime | None, topic: str | None
    ) -> int:
        """Make due what was published from `since` on and before `until`; returns how many."""
        if since is None:
            raise TypeError("since must be a datetime, not NoneType")
        check_time(since, "since")
        check_time(until, "until")
        check_text(topic, "topic")
        which = {"since": since, "until": until, "topic": topic}
        return (await execute(session, self._table, self._republish, which)).rowcount


# One time for all of them, so that the claim takes them by their places in line; and none later than
# what is due already: a batch of that would leave before them, with later events of their keys.
_REPUBLISH = """
UPDATE {outbox} SET published_at = NULL, attempts = 0, due_at = least(statement_timestamp(), (
    SELECT min(due_at) FROM {outbox}
    WHERE published_at IS NULL AND dead_at IS NULL AND due_at IS NOT NULL AND attempts = 0))
WHERE published_at >= :since AND (:until IS NULL OR published_at < :until)
  AND (:topic IS NULL OR topic = :topic)
"""
