"""The soak: emitters, relays and consumers at work, faults by chance, and the ledger over all of it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncSession

from oncely.streams import StreamConsumer
from oncely.transaction import is_passing
from tests.soak.ledger import Balance, Order, Trend, balance_of
from tests.soak.stage import Stage
from tests.soak.tables import Tables
from tests.soak.workers import STREAM

__all__ = ["Report", "soak"]

EMITTERS, RELAYS, CONSUMERS = 2, 3, 3
_KEPT = timedelta(seconds=5)  # published events, in the outbox
_KEPT_IN_STREAM = 5_000
_PATIENCE = 30.0  # seconds without any progress, in the end


@dataclass
class Report:
    """What the soak has found."""

    seconds: float
    balance: Balance
    order: Order
    faults: Counter[str]
    ended_by_themselves: int
    trends: list[Trend]
    unbalanced: int
    """How often the ledger was looked at amid the work and did not balance."""

    def mistakes(self) -> list[str]:
        found = self.balance.mistakes()
        if self.order.out_of_order:
            found.append(f"out of order in the stream: {self.order.out_of_order}")
        if self.ended_by_themselves:
            found.append(f"workers that ended by themselves: {self.ended_by_themselves}")
        if self.unbalanced:
            found.append(f"the ledger did not balance {self.unbalanced} times amid the work")
        return found + [mistake for trend in self.trends for mistake in trend.mistakes()]


async def soak(duration: timedelta, *, seed: int, rate: float = 40.0) -> Report:
    """Runs it for so long, and as long again as is needed to finish what is left.

    The same `seed` gives the same faults in the same order, though not at the same points of the work.
    Each emitter makes `rate` transactions a second.
    """
    tables = Tables.make()
    async with Stage.open(seed, rate) as stage, Redis.from_url(stage.valkey.url) as redis:
        await _lay_out(stage, tables)
        keeper = _Keeper(stage, redis, tables)
        for role, count in (("emit", EMITTERS), ("relay", RELAYS), ("consume", CONSUMERS)):
            for number in range(count):
                stage.start(role, number, is_veteran=number == 0 and role != "emit")
        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(keeper.keep())
            while time.monotonic() < begun + duration.total_seconds():
                await asyncio.sleep(stage.chance.uniform(0.1, 1.0))
                stage.replace_the_ended()
                await stage.harm()
            stage.stop("emit")
            await _until_done(stage, redis)
            keeping.cancel()
        await keeper.order.read(redis)
        return Report(
            seconds=time.monotonic() - begun,
            balance=await balance_of(stage.engine, redis),
            order=keeper.order,
            faults=stage.faults,
            ended_by_themselves=stage.ended_by_themselves,
            trends=keeper.trends,
            unbalanced=keeper.unbalanced,
        )


async def _lay_out(stage: Stage, tables: Tables) -> None:
    async with stage.engine.begin() as connection:
        await connection.run_sync(tables.metadata.create_all)
        keys = [f"emitter {emitter} key {key}" for emitter in range(EMITTERS) for key in range(5)]
        await connection.execute(insert(tables.counters), [{"key": key, "number": 0} for key in keys])


async def _until_done(stage: Stage, redis: Redis) -> None:
    """Returns when nothing is left to do, or will be done: then the numbers show it."""
    deadline, handled = time.monotonic() + _PATIENCE, 0
    while time.monotonic() < deadline:
        stage.replace_the_ended()
        try:
            balance = await balance_of(stage.engine, redis)
        except Exception as error:
            if _is_outage(error):
                continue  # our own connections were ended with the server's restart
            raise
        if balance.handled > handled:
            deadline, handled = time.monotonic() + _PATIENCE, balance.handled
        lag = (await StreamConsumer(redis, stream=STREAM).lag()).get("workers")
        if not balance.mistakes() and lag is not None and (lag.unread, lag.pending) == (0, 0):
            return
        await asyncio.sleep(0.2)


class _Keeper:
    """Keeps house beside the work, and looks: prunes, trims, reads the stream, samples."""

    def __init__(self, stage: Stage, redis: Redis, tables: Tables) -> None:
        self.order = Order()
        self.unbalanced = 0
        self._stage = stage
        self._redis = redis
        self._tables = tables
        self._dead = Trend("dead tuples", slack=5_000)
        self._size = Trend("bytes of outbox and claims", slack=4_000_000)
        self._memory = {
            role: Trend(f"resident bytes of a {role} process", slack=12_000_000)
            for role in ("relay", "consume")
        }

    @property
    def trends(self) -> list[Trend]:
        return [self._dead, self._size, *self._memory.values()]

    async def keep(self) -> None:
        steps: list[Callable[[], Awaitable[None]]] = [self._prune, self._trim, self._sample]
        while True:
            for step in steps:
                try:
                    await step()
                except Exception as error:
                    if _is_outage(error):
                        continue  # a server is being restarted
                    raise
            await asyncio.sleep(1)

    async def _prune(self) -> None:
        async with AsyncSession(self._stage.engine) as session, session.begin():
            count = await self._tables.outbox.prune(session, older_than=_KEPT)
            await session.execute(insert(self._tables.pruned).values(events=count))

    async def _trim(self) -> None:
        await self.order.read(self._redis)
        await StreamConsumer(self._redis, stream=STREAM).trim(keep=_KEPT_IN_STREAM)

    async def _sample(self) -> None:
        for worker in self._stage.workers:
            if worker.is_veteran and worker.process.status is None:
                self._memory[worker.role].samples.append(worker.memory())
        async with self._stage.engine.connect() as connection:
            left, dead, size = (await connection.execute(_SAMPLE)).one()
        self.unbalanced += left != 0
        self._dead.samples.append(dead)
        self._size.samples.append(size)


def _is_outage(error: Exception) -> bool:
    return isinstance(error, RedisError) or is_passing(error)


_SAMPLE = text("""
SELECT (SELECT count(*) FROM orders) - (SELECT count(*) FROM outbox)
           - (SELECT coalesce(sum(events), 0) FROM pruned),
       (SELECT sum(n_dead_tup)::bigint FROM pg_stat_user_tables WHERE relname IN ('outbox', 'outbox_claims')),
       pg_relation_size('outbox') + pg_relation_size('outbox_claims')
""")
