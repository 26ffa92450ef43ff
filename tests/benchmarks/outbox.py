"""The outbox: what an emit costs its transaction, and how fast a batch leaves."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

import asyncpg
from redis.asyncio import Redis
from redis.typing import EncodableT, FieldT
from sqlalchemy import Column, Integer, MetaData, Table, Text, insert
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from oncely import Event, NewEvent, Outbox
from oncely.streams import stream_publisher
from tests.benchmarks.ratio import Ratio, Servers, at_once, compare

EVENTS = 10_000
BATCH = 1_000
CALLERS = 10
TRANSACTIONS = 1_000
PAYLOAD = {"order": 4711, "customer": "c-1234", "lines": [{"sku": "a-1", "count": 2}], "total": "99.90"}

metadata = MetaData()
orders = Table("orders", metadata, Column("id", Integer, primary_key=True), Column("name", Text))
outbox = Outbox(metadata)


async def measure(servers: Servers) -> list[Ratio]:
    engine = create_async_engine(servers.postgres.url(), pool_size=CALLERS)
    # A relay uses one connection, as the bare loop does; statements are prepared once in each.
    relaying = create_async_engine(servers.postgres.url(), pool_size=1)
    bare = await asyncpg.connect(servers.postgres.dsn())
    redis = Redis.from_url(servers.valkey.url)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)
        await connection.run_sync(metadata.create_all)
    sessions = async_sessionmaker(engine)
    try:
        return [
            await compare(
                "a transaction with one emit / without",
                ours=Transactions(sessions, emit=True),
                bare=Transactions(sessions, emit=False),
                limit=0.7,
            ),
            await compare(
                "draining 10,000 events / locking, reading, marking on asyncpg",
                ours=Drain(relaying, nowhere),
                bare=BareDrain(relaying, bare, None),
                limit=1.0,
            ),
            await compare(
                "draining into a Redis stream / the same with a bare pipelined XADD",
                ours=Drain(relaying, stream_publisher(redis, "bench")),
                bare=BareDrain(relaying, bare, redis),
                limit=0.9,
            ),
        ]
    finally:
        await redis.delete("bench")
        await redis.aclose()
        await bare.close()
        await relaying.dispose()
        await engine.dispose()


async def nowhere(events: Sequence[Event]) -> None:
    """A publisher that does nothing."""


class Transactions:
    """TRANSACTIONS transactions that insert one order each, by CALLERS at once."""

    def __init__(self, sessions: async_sessionmaker[AsyncSession], *, emit: bool) -> None:
        self.sessions = sessions
        self.emit = emit

    async def __call__(self) -> int:
        async def transaction() -> None:
            async with self.sessions() as session, session.begin():
                await session.execute(insert(orders).values(name="order"))
                if self.emit:
                    await outbox.emit(session, "order.created", PAYLOAD, key="c-1234")

        return await at_once(transaction, CALLERS, TRANSACTIONS // CALLERS)


class Full(ABC):
    """Begins each round with an outbox that holds EVENTS fresh events, and one batch that has left.

    That batch leaves untimed: new tables are planned for anew, which a worker in its stride does not do.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    async def __call__(self) -> int:
        done = 0
        while left := await self.batch():
            done += left
        assert done == EVENTS
        return done

    @abstractmethod
    async def batch(self) -> int:
        """Move one batch out; how many events it had."""

    async def prepare(self) -> None:
        events = [NewEvent("order.created", PAYLOAD) for _ in range(EVENTS + BATCH)]
        async with self.engine.begin() as connection:
            await connection.exec_driver_sql("TRUNCATE outbox, outbox_claims")
            await outbox.emit_many(connection, events)
        async with self.engine.connect() as connection:
            raw = await connection.get_raw_connection()
            assert raw.driver_connection is not None
            await raw.driver_connection.execute("VACUUM ANALYZE outbox")
        assert await self.batch() == BATCH


class Drain(Full):
    def __init__(self, engine: AsyncEngine, publish: Callable[[Sequence[Event]], Awaitable[object]]) -> None:
        super().__init__(engine)
        self.sessions = async_sessionmaker(engine)
        self.publish = publish

    async def batch(self) -> int:
        return len(await outbox.relay_once(self.sessions, self.publish, batch=BATCH))


class BareDrain(Full):
    """What anybody would write on asyncpg: lock, read, send, mark, commit."""

    def __init__(self, engine: AsyncEngine, connection: asyncpg.Connection, redis: Redis | None) -> None:
        super().__init__(engine)
        self.connection = connection
        self.redis = redis

    async def batch(self) -> int:
        async with self.connection.transaction():
            rows = await self.connection.fetch(
                "SELECT id, topic, payload, headers, key, created_at, attempts FROM outbox"
                " WHERE published_at IS NULL AND dead_at IS NULL AND due_at IS NULL"
                " ORDER BY position LIMIT $1 FOR UPDATE SKIP LOCKED",
                BATCH,
            )
            if not rows:
                return 0
            events = [
                Event(
                    row["id"],
                    row["topic"],
                    json.loads(row["payload"]),
                    row["headers"] and json.loads(row["headers"]),
                    row["key"],
                    row["created_at"],
                    row["attempts"] + 1,
                )
                for row in rows
            ]
            if self.redis is not None:
                pipeline = self.redis.pipeline(transaction=False)
                for row in rows:
                    fields: dict[FieldT, EncodableT] = {
                        "id": str(row["id"]),
                        "topic": row["topic"],
                        "payload": row["payload"],
                    }
                    pipeline.xadd("bench", fields)
                await pipeline.execute()
            await self.connection.execute(
                "UPDATE outbox SET published_at = now() WHERE id = ANY($1)",
                [event.id for event in events],
            )
        return len(rows)
