"""Dead letters that are older than what an inbox remembers.

What is replayed keeps its id, so that whoever had handled it already passes it over. An inbox that has
forgotten the id does not: with several handlers, or a try that had got through, it changes the database a
second time.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from sqlalchemy import Table, func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from oncely.check.finding import Finding
from oncely.check.length import spell
from oncely.check.location import located, name_of

if TYPE_CHECKING:
    from oncely.streams import DeadLetters

__all__ = ["check_dead_events", "check_dead_letters"]


async def check_dead_events(
    connection: AsyncConnection, outboxes: Iterable[Table], *, forgotten_after: timedelta
) -> list[Finding]:
    """Outboxes whose oldest dead event an inbox that forgets so soon would handle again."""
    findings = []
    for table in outboxes:
        name = name_of(*located(connection, [table]))
        if await connection.scalar(_IS_THERE, {"name": name}) is not True:
            continue  # which another check says
        oldest = await connection.scalar(
            select(func.clock_timestamp() - func.min(table.c.dead_at)).where(table.c.dead_at.is_not(None))
        )
        if oldest is not None and oldest > forgotten_after:
            findings.append(_finding(name, "event", oldest, forgotten_after))
    return findings


async def check_dead_letters(letters: Iterable[DeadLetters], *, forgotten_after: timedelta) -> list[Finding]:
    """The same of streams' dead letters."""
    findings = []
    for each in letters:
        for letter in await each.list(limit=1):
            oldest = datetime.now(UTC) - letter.dead_at
            if oldest > forgotten_after:
                findings.append(_finding(each.dead_letter_stream, "letter", oldest, forgotten_after))
    return findings


def _finding(name: str, what: str, oldest: timedelta, forgotten_after: timedelta) -> Finding:
    return Finding(
        "advice",
        name,
        f"its oldest dead {what} has been there for {spell(oldest)}, and an inbox forgets after "
        f"{spell(forgotten_after)}: what is replayed may be handled twice",
    )


_IS_THERE = text("SELECT to_regclass(:name) IS NOT NULL")
