"""The inbox: what handling a message once costs beside the bare statements that it stands for."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
from redis.asyncio import Redis
from sqlalchemy import Column, Integer, MetaData, Table, Text, insert
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from oncely import Event, Inbox
from oncely.event import uuid7
from oncely.streams import StreamConsumer, stream_publisher
from tests.benchmarks.ratio import Ratio, Servers, compare

MESSAGES = 1_000
COUNT = 100
CONCURRENCY = 64
STREAM = "bench:inbox"

metadata = MetaData()
revenue = Table("revenue", metadata, Column("id", Integer, primary_key=True), Column("note", Text))
inbox = Inbox(metadata)
booking = insert(revenue)


async def measure(servers: Servers) -> list[Ratio]:
    engine = create_async_engine(servers.postgres.url(), pool_size=10, max_overflow=0)
    bare = await asyncpg.connect(servers.postgres.dsn())
    redis = Redis.from_url(servers.valkey.url)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)
        await connection.run_sync(metadata.create_all)
    try:
        return [
            await compare(
                "consuming through the inbox / the same two inserts a message on asyncpg",
                ours=Consuming(redis, async_sessionmaker(engine)),
                bare=BareConsuming(redis, bare),
                limit=0.5,
            )
        ]
    finally:
        await redis.delete(STREAM)
        await redis.aclose()
        await bare.close()
        await engine.dispose()


class Full:
    """Begins each round with a stream of MESSAGES new entries and a group that has read none."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.events: list[Event] = []

    async def prepare(self) -> None:
        await self.redis.delete(STREAM)
        self.events = [Event(uuid7(), "order.paid", {"order": number}) for number in range(MESSAGES)]
        await stream_publisher(self.redis, STREAM)(self.events)
        await self.redis.xgroup_create(STREAM, "workers", id="0")


class Consuming(Full):
    def __init__(self, redis: Redis, sessions: async_sessionmaker[AsyncSession]) -> None:
        super().__init__(redis)
        self.sessions = sessions

    async def __call__(self) -> int:
        async def book(session: AsyncSession, event: Event) -> None:
            await session.execute(booking, {"note": str(event.payload["order"])})

        consumer = StreamConsumer(self.redis, stream=STREAM, concurrency=CONCURRENCY)
        consumer.subscribe("order.paid", inbox.handler(self.sessions, book, consumer="bench"))
        settled = 0
        while settled < MESSAGES:
            settled += await consumer.run_once(count=COUNT)
        return settled


class BareConsuming(Full):
    """What anybody would write on redis-py and asyncpg, without any care for failures."""

    def __init__(self, redis: Redis, connection: asyncpg.Connection) -> None:
        super().__init__(redis)
        self.connection = connection

    async def __call__(self) -> int:
        handled = 0
        while handled < MESSAGES:
            reply: Any = await self.redis.xreadgroup("workers", "bare", {STREAM: ">"}, count=COUNT)
            [[_, entries]] = reply
            for _, fields in entries:
                payload = json.loads(fields[b"payload"])
                async with self.connection.transaction():
                    inserted = await self.connection.execute(
                        "INSERT INTO inbox (consumer, event_id) VALUES ('bench', $1) ON CONFLICT DO NOTHING",
                        fields[b"id"].decode(),
                    )
                    if inserted == "INSERT 0 1":
                        await self.connection.execute(
                            "INSERT INTO revenue (note) VALUES ($1)", str(payload["order"])
                        )
            await self.redis.xack(STREAM, "workers", *(entry for entry, _ in entries))
            handled += len(entries)
        return handled
