"""The simulation of `ledger_oracle`, with whole Relays in the place of its bare ledgers.

A relay here runs as in production: it listens, polls, renews its claims, backs off, and decides whose
fault a failure is. What happens to it is drawn from the seed: its broker goes away for all of them; its
publisher fails for an event, names it or does not, sends a part and raises; its process is killed before,
amid or after publishing; or it is frozen past its lease and then goes on publishing, as a suspended
machine does. One that was killed is followed by a new one that remembers nothing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import MetaData, select

from oncely import Event, Outbox, PublishFailed, Relay
from oncely.backoff import Backoff
from oncely.ledger import Claim, Ledger
from tests.ledger_oracle import LEASE, PAST_THE_LEASE, Simulation

__all__ = ["RelaySimulation"]

RETRY = Backoff(first=timedelta(milliseconds=20), maximum=timedelta(milliseconds=60))
OUTAGE = Backoff(first=timedelta(milliseconds=10), maximum=timedelta(milliseconds=50))
MOST_TRIES = 6


class Killed(BaseException):
    """Ends a relay in its tracks, as SIGKILL would: it does nothing any more."""


@dataclass
class RelaySimulation(Simulation):
    """One run: `await RelaySimulation(engine, seed=…).run()`. The tables must be there and empty.

    After it, `wrongly_dead` are the events that died although they would not have failed for ever,
    each with its last error.
    """

    away_until: float = 0.0
    doomed: set[int] = field(default_factory=set)
    last_errors: dict[int, str] = field(default_factory=dict)

    @property
    def wrongly_dead(self) -> dict[int, str]:
        return {number: self.last_errors[number] for number in sorted(self.dead - self.doomed)}

    async def relay(self) -> None:
        while not self.stopped.is_set():
            try:
                await _Life(self).relay.run(self.stopped)
            except Killed:
                self.counts["killed"] += 1

    async def drained(self) -> None:
        await super().drained()
        self.doomed |= self.fails_for_ever
        table = self.outbox.table
        async with self.engine.connect() as connection:
            dead = select(table.c.payload, table.c.last_error).where(table.c.dead_at.is_not(None))
            self.last_errors |= {row.payload: row.last_error for row in await connection.execute(dead)}
        self.dead |= self.last_errors.keys()


class _Life:
    """One relay from its start to its end, and what befalls it."""

    def __init__(self, world: RelaySimulation) -> None:
        self.world = world
        self.killed = False
        self.frozen = asyncio.Event()
        outbox = Outbox(MetaData(), on_dead=world.on_dead)
        outbox.ledger = _LedgerOf(self, outbox.ledger)  # type: ignore[assignment]  # stands before it
        self.relay = Relay(
            outbox,
            world.sessions,
            self.publish,
            batch=10,
            lease=LEASE,
            poll_interval=timedelta(milliseconds=20),
            retry=RETRY,
            outage=OUTAGE,
            max_attempts=MOST_TRIES,
        )

    def kill(self) -> None:
        self.killed = True
        raise Killed

    async def freeze(self) -> None:
        """Past the lease; what the relay would have done meanwhile, it does not."""
        self.world.counts["frozen"] += 1
        await asyncio.sleep(PAST_THE_LEASE)
        self.frozen.clear()

    async def publish(self, events: Sequence[Event]) -> None:
        world, chance = self.world, self.world.random.random
        if chance() < 0.02:
            world.counts["outages"] += 1
            world.away_until = time.monotonic() + world.random.uniform(0.02, 0.2)
        freezes_at = world.random.randint(0, len(events)) if self.frozen.is_set() else -1
        failures: dict[UUID, Exception] = {}
        left: set[UUID] = set()
        broken: set[str] = set()
        for place, event in enumerate(events):
            await asyncio.sleep(0.0005)
            if place == freezes_at:
                await self.freeze()
            if chance() < 0.005:
                self.kill()
            if time.monotonic() < world.away_until:
                if left or failures:
                    break
                raise ConnectionError("the broker is away")
            if event.key in broken:
                continue
            if event.payload in world.fails_for_ever or chance() < 0.02:
                world.counts["failures"] += 1
                if chance() < 0.5:
                    world.untold.update(each.payload for each in events if each.id in left)
                    raise ValueError("refused, and nobody is told what had left before")
                failures[event.id] = ValueError("refused")
                if event.key is not None:
                    broken.add(event.key)
                continue
            world.published.append(event.payload)
            left.add(event.id)
        if freezes_at == len(events):
            await self.freeze()
        if chance() < 0.02:
            self.kill()
        unsent = [event.id for event in events if event.id not in left and event.id not in failures]
        if failures or unsent:
            raise PublishFailed(failures, unsent)


class _LedgerOf:
    """The ledger as a relay reaches it: not at all when it was killed, and late when it is frozen."""

    def __init__(self, life: _Life, ledger: Ledger) -> None:
        self.life = life
        self.ledger = ledger

    async def claim(self, *arguments: Any, **settings: Any) -> Claim | None:
        claim = await self.ledger.claim(*arguments, **settings)
        self.life.world.counts["claims"] += 1 if claim else 0
        # A freeze belongs to one claim: a relay that stalled past every lease would let innocents die.
        self.life.frozen.clear()
        if claim is not None and self.life.world.random.random() < 0.04:
            # Frozen together with its clock, the relay does not know that its time is over.
            self.life.frozen.set()
            return replace(claim, deadline=math.inf)
        return claim

    async def renew(self, *arguments: Any, **settings: Any) -> float | None:
        if self.life.frozen.is_set():
            await asyncio.Event().wait()
        return await self.ledger.renew(*arguments, **settings)

    async def settle(self, *arguments: Any, **settings: Any) -> bool:
        if self.life.killed:
            raise Killed
        settled = await self.ledger.settle(*arguments, **settings)
        if not settled:
            self.life.world.counts["claims lost"] += 1
        return settled

    async def release(self, *arguments: Any, **settings: Any) -> bool:
        if self.life.killed:
            raise Killed
        return await self.ledger.release(*arguments, **settings)

    async def marked(self, *arguments: Any, **settings: Any) -> bool:
        return await self.ledger.marked(*arguments, **settings)
