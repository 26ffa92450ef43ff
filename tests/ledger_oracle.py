"""A simulation of everything that may go wrong around the ledger, and an oracle for order and loss.

Writers overlap, commit late and roll back; events are cancelled, and cancels rolled back; published
rows are pruned meanwhile. Relays crash with a claim, stall past their lease before or in the middle of
publishing, fail events, stop at a failure or go on with other keys, and run into events that fail for
ever. Everything is drawn from one seed. The product's own Outbox and Ledger do the work.

The oracle looks at what left the relays, by first appearance: of one key, e leaves before f when e's
commit had returned before f's transaction began, or when both are of one transaction, in that order.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from uuid import UUID

from sqlalchemy import MetaData, func, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from oncely import Event, Outbox
from oncely.choice import OnDead
from oncely.ledger import Claim, Failure

__all__ = ["Simulation", "Verdict"]

LEASE = timedelta(milliseconds=600)
PAST_THE_LEASE = LEASE.total_seconds() * 1.5
RETRY = timedelta(milliseconds=100)
TRIES = 3


@dataclass(frozen=True)
class Emitted:
    """One committed event: its key, and when its transaction began and had committed."""

    number: int
    key: str | None
    begun: float
    committed: float
    transaction: int
    line: int


@dataclass(frozen=True)
class Verdict:
    """What the oracle found. A run is right when all but `counts` is empty."""

    lost: list[int]
    out_of_order: list[tuple[str, int, int]]
    cancelled_but_published: list[int]
    counts: Counter[str]

    @property
    def wrong(self) -> dict[str, object]:
        found = {
            "lost": self.lost,
            "out of order": self.out_of_order,
            "cancelled but published": self.cancelled_but_published,
        }
        return {name: what for name, what in found.items() if what}


@dataclass
class Simulation:
    """One run: `await Simulation(engine, seed=…).run()`. The tables must be there and empty."""

    engine: AsyncEngine
    seed: int
    on_dead: OnDead = "continue"
    relays: int = 4
    writers: int = 4
    transactions: int = 120
    keys: int = 12

    published: list[int] = field(default_factory=list)
    emitted: dict[int, Emitted] = field(default_factory=dict)
    ids: dict[int, UUID] = field(default_factory=dict)
    cancelled: dict[int, int] = field(default_factory=dict)
    """By number, how many had been published when `cancel` said True."""
    untold: set[int] = field(default_factory=set)
    """What left in a call that failed without saying so."""
    fails_for_ever: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.sessions: async_sessionmaker[AsyncSession] = async_sessionmaker(self.engine)
        self.outbox = Outbox(MetaData(), on_dead=self.on_dead)
        self.numbers = count(1)
        self.transaction_numbers = count(1)
        self.stopped = asyncio.Event()

    async def run(self) -> Verdict:
        around = [asyncio.create_task(self.relay()) for _ in range(self.relays)]
        around += [asyncio.create_task(self.canceller()), asyncio.create_task(self.pruner())]
        async with asyncio.TaskGroup() as writing:
            for _ in range(self.writers):
                writing.create_task(self.writer())
        await self.drained()
        if self.on_dead == "park":
            # The cause is mended: what was dead is replayed, and what was parked behind it follows.
            self.fails_for_ever.clear()
            async with self.sessions() as session, session.begin():
                await self.outbox.replay(session)
            await self.drained()
        self.stopped.set()
        await asyncio.gather(*around)
        return self.verdict()

    async def pause(self, least: float, most: float) -> None:
        await asyncio.sleep(self.random.uniform(least, most))

    async def writer(self) -> None:
        for _ in range(self.transactions):
            begun, transaction = time.monotonic(), next(self.transaction_numbers)
            mine: list[tuple[int, str | None, UUID]] = []
            async with self.sessions() as session:
                for _ in range(self.random.randint(1, 4)):
                    number = next(self.numbers)
                    key = self.random.choice([f"k{self.random.randrange(self.keys)}"] * 5 + [None])
                    delay = RETRY if key is None and self.random.random() < 0.5 else None
                    event_id = await self.outbox.emit(session, "t", number, key=key, delay=delay)
                    mine.append((number, key, event_id))
                    if self.random.random() < 0.3:
                        await self.pause(0, 0.02)
                if self.random.random() < 0.05:
                    await self.pause(0.1, 0.6)  # a late commit
                    self.counts["late commits"] += 1
                if self.random.random() < 0.05:
                    self.counts["rolled back"] += 1
                    continue
                await session.commit()
            committed = time.monotonic()
            for line, (number, key, event_id) in enumerate(mine):
                if self.random.random() < 0.004:
                    self.fails_for_ever.add(number)
                self.ids[number] = event_id
                self.emitted[number] = Emitted(number, key, begun, committed, transaction, line)
            await self.pause(0, 0.015)

    async def canceller(self) -> None:
        while not self.stopped.is_set():
            await self.pause(0.01, 0.05)
            if not self.ids:
                continue
            number = self.random.choice(list(self.ids)[-12:])
            async with self.sessions() as session:
                if not await self.outbox.cancel(session, self.ids[number]):
                    continue
                published = len(self.published)
                await self.pause(0, 0.25)
                if self.random.random() < 0.5:
                    await session.rollback()
                    self.counts["cancels rolled back"] += 1
                else:
                    self.cancelled[number] = published
                    await session.commit()
                    self.counts["cancelled"] += 1

    async def pruner(self) -> None:
        while not self.stopped.is_set():
            await self.pause(0.03, 0.08)
            async with self.sessions() as session, session.begin():
                self.counts["pruned"] += await self.outbox.prune(
                    session, older_than=timedelta(milliseconds=50), limit=50
                )

    async def relay(self) -> None:
        ledger = Outbox(MetaData(), on_dead=self.on_dead).ledger
        while not self.stopped.is_set():
            claim = await ledger.claim(self.sessions, limit=10, lease=LEASE)
            if claim is None:
                await self.pause(0.005, 0.015)
                continue
            self.counts["claims"] += 1
            left, failed = await self.publish(claim)
            fate = self.random.random()
            if fate < 0.04:
                self.counts["crashes"] += 1
                continue
            if fate < 0.08:
                self.counts["stalls"] += 1
                await asyncio.sleep(PAST_THE_LEASE)
            failures = [self.failure(event) for event in failed]
            ids = [event.id for event in left]
            if not await ledger.settle(self.sessions, claim, published=ids, failures=failures):
                self.counts["claims lost"] += 1
                continue
            self.dead |= {
                event.payload for event, failure in zip(failed, failures, strict=True) if not failure.delay
            }

    async def publish(self, claim: Claim) -> tuple[list[Event], list[Event]]:
        """What left, and what failed; after a failure nothing more of its key, or nothing more at all."""
        left: list[Event] = []
        failed: list[Event] = []
        broken: set[str] = set()
        for event in claim.events:
            if event.key in broken:
                continue
            await asyncio.sleep(0.0005)
            if self.random.random() < 0.004:
                self.counts["zombies"] += 1
                await asyncio.sleep(PAST_THE_LEASE)  # and goes on publishing with its claim lost
            if event.payload in self.fails_for_ever or self.random.random() < 0.03:
                self.counts["failures"] += 1
                failed.append(event)
                if event.key is not None:
                    broken.add(event.key)
                if self.random.random() < 0.5:
                    break
                continue
            self.published.append(event.payload)
            left.append(event)
        return left, failed

    def failure(self, event: Event) -> Failure:
        final = event.payload in self.fails_for_ever and event.attempt >= TRIES
        return Failure(event.id, "refused", None if final else RETRY)

    async def drained(self) -> None:
        """Waits until nothing can be published any more; fails after half a minute."""
        table = self.outbox.table
        open_ = select(func.count()).where(table.c.published_at.is_(None), table.c.dead_at.is_(None))
        if self.on_dead == "park":
            dead = select(table.c.key).where(table.c.dead_at.is_not(None), table.c.key.is_not(None))
            open_ = open_.where(table.c.key.is_(None) | table.c.key.not_in(dead))
        async with asyncio.timeout(30), self.engine.connect() as connection:
            while await connection.scalar(open_):
                await connection.rollback()
                await self.pause(0.02, 0.05)

    def verdict(self) -> Verdict:
        first: dict[int, int] = {}
        for place, number in enumerate(self.published):
            first.setdefault(number, place)
        excused = self.cancelled.keys() | (self.dead if self.on_dead == "continue" else set())
        by_key: defaultdict[str, list[Emitted]] = defaultdict(list)
        for event in self.emitted.values():
            if event.key is not None and event.number in first and event.number not in excused:
                by_key[event.key].append(event)
        self.counts["events"] = len(self.emitted)
        self.counts["duplicates"] = len(self.published) - len(first)
        self.counts["dead"] = len(self.dead)
        return Verdict(
            lost=[number for number in self.emitted if number not in first and number not in excused],
            out_of_order=[
                (key, e.number, f.number)
                for key, events in by_key.items()
                for e in events
                for f in events
                if first[f.number] < first[e.number] and _precedes(e, f)
            ],
            cancelled_but_published=sorted(filter(self._cancel_lied, self.cancelled)),
            counts=self.counts,
        )

    def _cancel_lied(self, number: int) -> bool:
        """It left after `cancel` had said that it would not, or before, and that was known."""
        then = self.cancelled[number]
        before, after = self.published[:then], self.published[then:]
        return number in after or (number in before and number not in self.untold)


def _precedes(e: Emitted, f: Emitted) -> bool:
    return e.committed < f.begun or (e.transaction == f.transaction and e.line < f.line)
