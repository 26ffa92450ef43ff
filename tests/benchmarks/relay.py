"""The relay: what a backlog, held keys and a held xmin horizon cost it, and how soon a commit is published.

Each drain is compared with the drain of as many events that are alone in their outbox. A time or a count is
shown as a rate against the promised one: a median of 1 ms, with 2 ms promised, is 1,000 against 500, and 2.0.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import MetaData, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, async_sessionmaker, create_async_engine

from oncely import Event, Outbox, Relay
from tests.benchmarks.ratio import Ratio, Servers, compare

EVENTS = 10_000
BATCH = 1_000
PAYLOAD = '{"order": 4711, "customer": "c-1234", "lines": [{"sku": "a-1", "count": 2}], "total": "99.90"}'
HOT_KEY = "'k' || number % 100"
IN_AN_HOUR = "now() + interval '1 hour'"
# In the order of time, as version 7 is; PostgreSQL itself makes those from 18 on.
ID = (
    "CAST(lpad(to_hex(CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)), 12, '0')"
    " || substr(md5(random()::text), 1, 20) AS uuid)"
)


async def nowhere(events: Sequence[Event]) -> None:
    """A publisher that does nothing."""


async def five_milliseconds(events: Sequence[Event]) -> None:
    """A publisher that takes its time, the same for every batch."""
    await asyncio.sleep(0.005)


@dataclass(frozen=True)
class Crowd:
    """Events in an outbox, alike: `key` and `due_at` are SQL, in which `number` counts them."""

    count: int
    key: str = "NULL"
    due_at: str = "NULL"
    attempts: int = 0


@dataclass
class Drain:
    """EVENTS fresh events leave an outbox of its own, in which a `standing` crowd stays behind."""

    engine: AsyncEngine
    name: str
    standing: Sequence[Crowd] = ()
    fresh: Crowd = Crowd(EVENTS)
    relays: int = 1
    batch: int = BATCH
    publish: Callable[[Sequence[Event]], Awaitable[None]] = nowhere
    made: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.metadata = MetaData()
        Outbox(self.metadata, table_name=self.name)
        sessions = async_sessionmaker(self.engine)
        self.at_work = [
            Relay(Outbox(MetaData(), table_name=self.name), sessions, self.publish, batch=self.batch)
            for _ in range(self.relays)
        ]

    async def prepare(self) -> None:
        if not self.made:
            async with self.engine.begin() as connection:
                await connection.run_sync(self.metadata.drop_all)
                await connection.run_sync(self.metadata.create_all)
            for crowd in self.standing:
                await self.insert(crowd)
            self.made = True
        await self.execute(f"DELETE FROM {self.name} WHERE published_at IS NOT NULL")
        await self.insert(self.fresh)
        await self.vacuum()

    async def __call__(self) -> int:
        return await self.drain(EVENTS)

    async def drain(self, count: int) -> int:
        """Let the relays work until so many events have left, or nothing more does."""
        done = 0

        async def work(relay: Relay) -> None:
            nonlocal done
            while done < count and (result := await relay.run_once()).published:
                done += result.published

        await asyncio.gather(*(work(relay) for relay in self.at_work))
        assert done == count
        return done

    async def insert(self, crowd: Crowd) -> None:
        await self.execute(
            f"INSERT INTO {self.name} (id, topic, key, payload, due_at, attempts)"
            f" SELECT {ID}, 'order.created', {crowd.key}, '{PAYLOAD}', {crowd.due_at},"
            f" {crowd.attempts} FROM generate_series(1, {crowd.count}) AS number"
        )

    async def execute(self, sql: str) -> None:
        async with self.engine.begin() as connection:
            await connection.exec_driver_sql(sql)

    async def vacuum(self) -> None:
        async with self.engine.connect() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            await driver.execute(f"VACUUM ANALYZE {self.name}, {self.name}_claims")


class FifthTenThousand(Drain):
    """The last of 50,000 events, with or without a reader that has been there since the first."""

    reader: AsyncConnection | None = None
    held = False

    async def prepare(self) -> None:
        await super().prepare()
        for _ in range(4):
            await self.insert(self.fresh)
        await self.vacuum()
        if self.held:
            self.reader = self.engine.connect()
            await self.reader.start()
            await self.reader.execution_options(isolation_level="REPEATABLE READ")
            await self.reader.exec_driver_sql(f"SELECT count(*) FROM {self.name}")
        await self.drain(4 * EVENTS)

    async def __call__(self) -> int:
        done = await super().__call__()
        if self.reader is not None:
            await self.reader.close()
        return done


class FifthTenThousandWithAReader(FifthTenThousand):
    held = True


async def measure(servers: Servers) -> list[Ratio]:
    engine = create_async_engine(servers.postgres.url(), pool_size=20)
    alone = Drain(engine, "lonely")
    failing = (Crowd(1, "'bad'", IN_AN_HOUR, attempts=1), Crowd(100_000, "'bad'"))
    try:
        return [
            await compare(
                "the fifth 10,000 events under a held xmin horizon / without",
                ours=FifthTenThousandWithAReader(engine, "reader_held"),
                bare=FifthTenThousand(engine, "not_held"),
                limit=0.9,
            ),
            await compare(
                "draining with 300,000 events pending / with 10,000",
                ours=Drain(engine, "backlog", [Crowd(290_000)]),
                bare=alone,
                limit=0.8,
            ),
            await compare(
                "draining events of 100 hot keys / without keys",
                ours=Drain(engine, "hot", fresh=Crowd(EVENTS, HOT_KEY)),
                bare=alone,
                limit=0.8,
            ),
            await compare(
                "draining beside 100,000 events behind a failing key / without",
                ours=Drain(engine, "behind_failing", failing),
                bare=alone,
                limit=0.5,
            ),
            await compare(
                "draining beside 200,000 delayed events / without",
                ours=Drain(engine, "delayed", [Crowd(200_000, due_at=IN_AN_HOUR)]),
                bare=alone,
                limit=0.9,
            ),
            await compare(
                "two relays / one, with a publisher that takes 5 ms a batch",
                ours=Drain(engine, "two", relays=2, batch=100, publish=five_milliseconds),
                bare=Drain(engine, "one", relays=1, batch=100, publish=five_milliseconds),
                limit=1.3,
            ),
            *await latencies(engine),
            await notifications(engine),
        ]
    finally:
        await engine.dispose()


async def latencies(engine: AsyncEngine) -> list[Ratio]:
    """From a commit's return to the publisher's call, one event every 40 ms."""
    outbox, sessions = await fresh_outbox(engine, "latency")
    committed: dict[object, float] = {}
    called: dict[object, float] = {}

    async def publish(events: Sequence[Event]) -> None:
        called.update(dict.fromkeys((event.payload for event in events), time.perf_counter()))

    stop = asyncio.Event()
    work = asyncio.create_task(Relay(outbox, sessions, publish).run(stop))
    for number in range(220):
        async with sessions.begin() as session:
            await outbox.emit(session, "t", number)
        committed[number] = time.perf_counter()
        await asyncio.sleep(0.04)
    stop.set()
    await work
    times = sorted(max(called[number] - committed[number], 1e-6) for number in range(20, 220))
    return [
        promise(f"commit to publisher, {name}, at most {limit * 1000:g} ms", 1 / times[place], 1 / limit)
        for name, place, limit in (("p50", 100, 0.002), ("p99", 198, 0.010))
    ]


async def notifications(engine: AsyncEngine) -> Ratio:
    """How many of a second's commits carry a NOTIFY when a process commits as fast as it can."""
    outbox, sessions = await fresh_outbox(engine, "notifications")
    notified = 0

    def count(*arguments: Any) -> None:
        nonlocal notified
        notified += "pg_notify" in arguments[2]

    async def emit() -> None:
        for _ in range(200):
            async with sessions.begin() as session:
                await outbox.emit(session, "t", None)

    event.listen(engine.sync_engine, "before_cursor_execute", count)
    begun = time.perf_counter()
    await asyncio.gather(*(emit() for _ in range(10)))
    seconds = time.perf_counter() - begun
    event.remove(engine.sync_engine, "before_cursor_execute", count)
    windows = math.ceil(seconds * 100)
    return promise(f"commits in a NOTIFY, of 2,000 in {seconds:.1f} s", 1 / notified, 1 / windows)


async def fresh_outbox(engine: AsyncEngine, name: str) -> tuple[Outbox, async_sessionmaker[Any]]:
    outbox = Outbox(MetaData(), table_name=name)
    async with engine.begin() as connection:
        await connection.run_sync(outbox.table.metadata.drop_all)
        await connection.run_sync(outbox.table.metadata.create_all)
    return outbox, async_sessionmaker(engine)


def promise(name: str, ours: float, promised: float) -> Ratio:
    ratio = ours / promised
    return Ratio(name, ours, promised, ratio, ratio, ratio, limit=1.0)
