"""What the processes of the soak do until they are killed: `main` is run by `tests.forks`."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from datetime import timedelta

from redis.asyncio import Redis
from sqlalchemy import insert, update
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from oncely import Event, NewEvent, PublishFailed, Reject, Relay
from oncely.backoff import Backoff
from oncely.event import Publisher
from oncely.streams import StreamConsumer, stream_publisher
from oncely.transaction import is_passing
from tests.soak.tables import Tables

__all__ = ["LEASE", "NAME", "RETRY_AFTER_MS", "STREAM"]

NAME = "soak"
"""How the server knows the connections of these processes."""

STREAM = "soak"
LEASE = timedelta(seconds=2)
RETRY_AFTER_MS = 1_000
_KEYS = 5  # of each emitter, and no other's
_SOON = Backoff(first=timedelta(milliseconds=20), maximum=timedelta(milliseconds=200))
_MANY = 1_000_000  # attempts: no fault may make anything dead


async def main(role: str, number: int, url: str, redis_url: str, seed: int, rate: float) -> None:
    """`role` is emit, relay or consume; an emitter makes `rate` transactions a second."""
    logging.basicConfig(level=logging.CRITICAL)
    settings = {"server_settings": {"application_name": NAME}}
    sessions = async_sessionmaker(create_async_engine(url, connect_args=settings))
    if role == "emit":
        await _emit(sessions, number, random.Random(seed), 1 / rate)
        return
    async with Redis.from_url(redis_url) as redis:
        await (_relay if role == "relay" else _consume)(sessions, redis, number)


async def _emit(
    sessions: async_sessionmaker[AsyncSession], number: int, chance: random.Random, pause: float
) -> None:
    """Transactions of one to five events of one key; some roll back, some are refused further on."""
    tables = Tables.make()
    while True:
        key = f"emitter {number} key {chance.randrange(_KEYS)}"
        count, rolls_back = chance.randint(1, 5), chance.random() < 0.1
        refused_by = [chance.choices([None, "publisher", "handler"], [300, 1, 1])[0] for _ in range(count)]
        try:
            async with sessions() as session, session.begin():
                counter = update(tables.counters).where(tables.counters.c.key == key)
                last = await session.scalar(
                    counter.values(number=tables.counters.c.number + count).returning(
                        tables.counters.c.number
                    )
                )
                assert last is not None
                orders = [
                    {"key": key, "number": last - count + 1 + place, "refused_by": refusal}
                    for place, refusal in enumerate(refused_by)
                ]
                await session.execute(insert(tables.orders), orders)
                # One that will be refused has no key, or its key would wait for nothing.
                await tables.outbox.emit_many(
                    session,
                    [NewEvent("order", order, key=None if order["refused_by"] else key) for order in orders],
                )
                if rolls_back:
                    await session.rollback()
        except Exception as error:
            if not is_passing(error):
                raise
        await asyncio.sleep(pause * chance.random() * 2)


async def _relay(sessions: async_sessionmaker[AsyncSession], redis: Redis, number: int) -> None:
    await Relay(
        Tables.make().outbox,
        sessions,
        _refusing(stream_publisher(redis, STREAM)),
        batch=50,
        lease=LEASE,
        poll_interval=timedelta(milliseconds=200),
        retry=_SOON,
        outage=_SOON,
        max_attempts=_MANY,
        database_timeout=timedelta(seconds=2),
    ).run()


def _refusing(publish: Publisher) -> Publisher:
    """A publisher that refuses what it is told to, and sends the rest."""

    async def send(events: Sequence[Event]) -> None:
        refused = {event.id: Reject("refused") for event in events if _is_refused_by(event, "publisher")}
        await publish([event for event in events if event.id not in refused])
        if refused:
            raise PublishFailed(refused)

    return send


async def _consume(sessions: async_sessionmaker[AsyncSession], redis: Redis, number: int) -> None:
    tables = Tables.make()
    consumer = StreamConsumer(
        redis,
        stream=STREAM,
        consumer=f"consumer {number}",
        retry_after_ms=RETRY_AFTER_MS,
        max_attempts=_MANY,
        outage=_SOON,
    )

    async def handle(session: AsyncSession, event: Event) -> None:
        if _is_refused_by(event, "handler"):
            raise Reject("refused")
        order = event.payload
        await session.execute(insert(tables.handled).values(key=order["key"], number=order["number"]))

    consumer.subscribe("*", tables.inbox.handler(sessions, handle, consumer="soak"))
    await consumer.run()


def _is_refused_by(event: Event, whom: str) -> bool:
    return bool(event.payload["refused_by"] == whom)
