"""A whole line in a process of its own, relay, consumer and inbox, that crashes at a named step.

Started by `tests.forks`. What it handles it writes into the table `handled`, in the inbox's
transaction; the payload "bad" is refused for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from redis.asyncio import Redis
from sqlalchemy import BigInteger, Column, Identity, MetaData, Table, Text, insert
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from oncely import Event, Inbox, Outbox, Reject, Relay
from oncely.backoff import Backoff
from oncely.streams import StreamConsumer, stream_publisher
from oncely.testing import Steps, crash_at
from tests.database import Database

LEASE = timedelta(milliseconds=400)
RETRY_AFTER_MS = 200
AT_ONCE = Backoff(first=timedelta(milliseconds=10), maximum=timedelta(milliseconds=50))


def handled_table(metadata: MetaData) -> Table:
    """What the handler has done, in the order in which it did it."""
    return Table(
        "handled",
        metadata,
        Column("place", BigInteger, Identity(), primary_key=True),
        Column("key", Text),
        Column("payload", Text),
    )


async def main(
    url: str,
    schema: str | None,
    redis_url: str,
    stream: str,
    point: str | None = None,
    publish_seconds: float = 0.0,
    stops: bool = False,
) -> None:
    """Runs until it is killed, or by itself at `point`.

    Each publish takes `publish_seconds`; `stops` lets the first handler stop the consumer.
    """
    engine = Database(url, schema).engine()
    metadata = MetaData()
    outbox, inbox, handled = Outbox(metadata), Inbox(metadata), handled_table(metadata)
    sessions = async_sessionmaker(engine)
    stop = asyncio.Event()

    async def handle(session: AsyncSession, event: Event) -> None:
        if stops:
            stop.set()
        if event.payload == "bad":
            raise Reject("bad for ever")
        await session.execute(insert(handled).values(key=event.key, payload=str(event.payload)))

    async with Redis.from_url(redis_url) as redis:
        steps = crash_at(point) if point is not None else Steps(lambda name: None)
        steps.watch(engine, redis)
        send = stream_publisher(redis, stream)

        async def publish(events: Sequence[Event]) -> None:
            await asyncio.sleep(publish_seconds)
            await send(events)

        consumer = StreamConsumer(
            redis,
            stream=stream,
            consumer="the same",
            retry_after_ms=RETRY_AFTER_MS,
            max_attempts=20,
            concurrency=1,
            outage=AT_ONCE,
        )
        consumer.subscribe("*", steps.handler(inbox.handler(sessions, handle, consumer="line")))
        relay = Relay(
            outbox,
            sessions,
            steps.publisher(publish),
            batch=5,
            lease=LEASE,
            poll_interval=timedelta(milliseconds=50),
            retry=AT_ONCE,
            outage=AT_ONCE,
            max_attempts=20,
            listen=False,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(relay.run())
            group.create_task(consumer.run(stop))
