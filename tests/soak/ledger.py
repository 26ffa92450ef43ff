"""The soak's ledger: what came in is what went out, what waits and what is dead; and no more of anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely.event import Event
from oncely.streams import StreamConsumer
from oncely.streams.wire import decode
from tests.soak.workers import STREAM

__all__ = ["Balance", "Order", "Trend", "balance_of"]


@dataclass(frozen=True)
class Balance:
    """All counts are of one moment, but for the dead letters'."""

    committed: int
    published: int
    pruned: int
    pending: int
    dead: int
    claims: int
    handled: int
    handled_twice: int
    refused_by_publisher: int
    refused_by_handler: int
    never_handled: int
    longest_pause: float
    dead_letters: int
    dead_for: str | None = None
    """Why the first event is dead that no publisher refused."""

    def mistakes(self) -> list[str]:
        """What is wrong when all is to be done."""
        wishes = {
            "committed = published + pruned + pending + dead": (
                self.committed,
                self.published + self.pruned + self.pending + self.dead,
            ),
            "nothing is pending": (self.pending, 0),
            "no claim is left": (self.claims, 0),
            "dead is what the publisher refused": (self.dead, self.refused_by_publisher),
            "a dead letter is what a handler refused": (self.dead_letters, self.refused_by_handler),
            "handled is all that nobody refused": (
                self.handled,
                self.committed - self.refused_by_publisher - self.refused_by_handler,
            ),
            "nothing was handled twice": (self.handled_twice, 0),
            "nothing was never handled": (self.never_handled, 0),
        }
        wrong = [f"{what}: {found} ≠ {due}" for what, (found, due) in wishes.items() if found != due]
        return wrong if self.dead_for is None else [*wrong, f"dead, and nobody refused it: {self.dead_for}"]


_BALANCE = text("""
SELECT (SELECT count(*) FROM orders) AS committed,
       (SELECT count(*) FROM outbox WHERE published_at IS NOT NULL) AS published,
       (SELECT coalesce(sum(events), 0)::bigint FROM pruned) AS pruned,
       (SELECT count(*) FROM outbox WHERE published_at IS NULL AND dead_at IS NULL) AS pending,
       (SELECT count(*) FROM outbox WHERE dead_at IS NOT NULL) AS dead,
       (SELECT count(*) FROM outbox_claims) AS claims,
       (SELECT count(*) FROM handled) AS handled,
       (SELECT count(*) FROM (
           SELECT FROM handled GROUP BY key, number HAVING count(*) > 1) AS twice) AS handled_twice,
       (SELECT count(*) FROM orders WHERE refused_by = 'publisher') AS refused_by_publisher,
       (SELECT count(*) FROM orders WHERE refused_by = 'handler') AS refused_by_handler,
       (SELECT count(*) FROM orders WHERE refused_by IS NULL AND NOT EXISTS (
           SELECT FROM handled WHERE handled.key = orders.key AND handled.number = orders.number)
       ) AS never_handled,
       (SELECT payload::text || ' ' || attempts || ' ' || last_error FROM outbox
        WHERE dead_at IS NOT NULL AND payload->>'refused_by' IS DISTINCT FROM 'publisher'
        LIMIT 1) AS dead_for,
       (SELECT coalesce(max(extract(epoch FROM pause)), 0)::float8 FROM (
           SELECT at - lag(at) OVER (ORDER BY at) AS pause FROM handled) AS pauses) AS longest_pause
""")


async def balance_of(engine: AsyncEngine, redis: Redis) -> Balance:
    """As it is now. An event that came twice may have two dead letters; it counts once."""
    letters = await StreamConsumer(redis, stream=STREAM).dead_letters.list(limit=100_000)
    dead = {letter.event.id for letter in letters if letter.event is not None}
    async with engine.connect() as connection:
        found = (await connection.execute(_BALANCE)).mappings().one()
    return Balance(**found, dead_letters=len(dead))


@dataclass
class Order:
    """The stream as it is read by the soak: whether each event's first arrival kept its key's order."""

    arrived: int = 0
    repeated: int = 0
    out_of_order: int = 0
    _from: bytes = b"-"
    _seen: set[tuple[str, int]] = field(default_factory=set)
    _last: Counter[str] = field(default_factory=Counter)

    async def read(self, redis: Redis) -> None:
        """All that is new in the stream."""
        while True:
            found: Any = await redis.xrange(STREAM, self._from, "+", count=1_000)
            if not found:
                return
            for entry_id, fields in found:
                self._from = b"(" + entry_id
                event = decode([word for pair in fields.items() for word in pair], 1, b"soak")
                if event is not None:
                    self._note(event)

    def _note(self, event: Event) -> None:
        self.arrived += 1
        key, number = event.payload["key"], event.payload["number"]
        if (key, number) in self._seen:
            self.repeated += 1
            return
        self._seen.add((key, number))
        if event.key is not None:
            self.out_of_order += number < self._last[key]
            self._last[key] = max(number, self._last[key])


@dataclass
class Trend:
    """A figure over time, which may go up and down, and must not grow."""

    what: str
    slack: float
    samples: list[float] = field(default_factory=list)

    def peaks(self) -> tuple[float, float]:
        """The highest of the first two thirds, without the beginning, and that of the last third."""
        third = max(1, len(self.samples) // 3)
        return _peak(self.samples[len(self.samples) // 6 : -third]), _peak(self.samples[-third:])

    def mistakes(self) -> list[str]:
        """Nothing, too, when there are too few samples to tell."""
        if len(self.samples) < 12:
            return []
        before, after = self.peaks()
        if after <= before * 1.5 + self.slack:
            return []
        return [f"{self.what} grows: {before:,.0f}, then {after:,.0f}"]


def _peak(samples: Sequence[float]) -> float:
    return max(samples, default=0.0)
