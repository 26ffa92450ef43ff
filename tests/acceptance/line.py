"""The whole line, emit to handler, as the tests of faults drive it, and what must hold of it in the end.

    line = Line(engine, redis, stream)
    await line.begin()                    # tables, and events of three keys, one of them bad for ever
    ... line.run(stop) ... faults ...
    await until(line.is_done)
    await line.check()

What is handled is written into the table `handled` in the inbox's transaction.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import BigInteger, Column, Identity, MetaData, Table, Text, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from oncely import Event, Inbox, NewEvent, Outbox, Reject, Relay
from oncely.backoff import Backoff
from oncely.streams import StreamConsumer, stream_publisher
from oncely.testing import Steps
from tests.outboxes import rows

__all__ = ["KEYS", "LEASE", "RETRY_AFTER_MS", "Line"]

LEASE = timedelta(milliseconds=400)
RETRY_AFTER_MS = 200
KEYS = ("a", "b", "c")
_SOON = Backoff(first=timedelta(milliseconds=10), maximum=timedelta(milliseconds=50))


class Line:
    """One outbox, one relay, one stream, one consumer with its inbox; leases and pauses are short."""

    def __init__(self, engine: AsyncEngine, redis: Redis, stream: str) -> None:
        self.engine = engine
        self.sessions = async_sessionmaker(engine)
        self.redis = redis
        self.stream = stream
        self.metadata = MetaData()
        self.outbox = Outbox(self.metadata)
        self.inbox = Inbox(self.metadata)
        self.handled = _handled_table(self.metadata)
        self.emitted = 0
        """How many events of each key were emitted so far."""

    async def begin(self, each: int = 4) -> None:
        """Make the tables and emit the first events."""
        async with self.engine.begin() as connection:
            await connection.run_sync(self.metadata.create_all)
        async with self.sessions.begin() as session:
            await self.outbox.emit(session, "t", "bad")
        await self.emit(each)

    async def emit(self, each: int) -> None:
        """So many more events of each key, in one transaction."""
        numbers = range(self.emitted, self.emitted + each)
        async with self.sessions.begin() as session:
            await self.outbox.emit_many(session, [NewEvent("t", n, key=key) for n in numbers for key in KEYS])
        self.emitted += each

    def relay(self, steps: Steps | None = None, *, publish_seconds: float = 0.0) -> Relay:
        """A relay; each of its publishes takes so long."""
        send = stream_publisher(self.redis, self.stream)

        async def publish(events: Sequence[Event]) -> None:
            await asyncio.sleep(publish_seconds)
            await send(events)

        return Relay(
            self.outbox,
            self.sessions,
            (steps or _NO_STEPS).publisher(publish),
            batch=5,
            lease=LEASE,
            poll_interval=timedelta(milliseconds=50),
            retry=_SOON,
            outage=_SOON,
            max_attempts=50,
            listen=False,
        )

    def consumer(self, steps: Steps | None = None, *, stop: asyncio.Event | None = None) -> StreamConsumer:
        """A consumer; its first handler sets `stop`, if there is one."""

        async def handle(session: AsyncSession, event: Event) -> None:
            if stop is not None:
                stop.set()
            if event.payload == "bad":
                raise Reject("bad for ever")
            await session.execute(insert(self.handled).values(key=event.key, payload=event.payload))

        consumer = StreamConsumer(
            self.redis,
            stream=self.stream,
            consumer="the same",
            retry_after_ms=RETRY_AFTER_MS,
            max_attempts=50,
            concurrency=1,
            outage=_SOON,
        )
        once = self.inbox.handler(self.sessions, handle, consumer="line")
        consumer.subscribe("*", (steps or _NO_STEPS).handler(once))
        return consumer

    @asynccontextmanager
    async def running(self, steps: Steps | None = None) -> AsyncIterator[tuple[Relay, StreamConsumer]]:
        """A relay and a consumer at work until the end of the block; an error that ends one goes on."""
        stop = asyncio.Event()
        relay, consumer = self.relay(steps), self.consumer(steps)
        async with asyncio.TaskGroup() as group:
            group.create_task(relay.run(stop))
            group.create_task(consumer.run(stop))
            try:
                yield relay, consumer
            finally:
                stop.set()

    async def is_done(self) -> bool:
        """Whether everything was published and handled, as far as the engines can be asked."""
        open_events = "SELECT 1 FROM outbox WHERE published_at IS NULL UNION ALL SELECT 1 FROM outbox_claims"
        try:
            if await rows(self.engine, open_events):
                return False
            lag = (await StreamConsumer(self.redis, stream=self.stream).lag()).get("workers")
        except (RedisError, OSError):
            return False
        return lag is not None and (lag.unread, lag.pending) == (0, 0)

    async def in_order(self) -> dict[str, list[int]]:
        """What was handled of each key, as it was."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        by_place = select(self.handled.c.key, self.handled.c.payload).order_by(self.handled.c.place)
        async with self.engine.connect() as connection:
            for key, payload in await connection.execute(by_place):
                found[key].append(payload)
        return found

    async def check(self) -> None:
        """Nothing is lost, nothing was handled twice, each key is in order, and the bad one is put aside."""
        found = await self.in_order()
        assert found == {key: list(range(self.emitted)) for key in KEYS}
        letters: Sequence[Any] = await StreamConsumer(self.redis, stream=self.stream).dead_letters.list()
        assert {letter.event.payload for letter in letters} == {
            "bad"
        }  # one letter for each time that it came


_NO_STEPS = Steps(lambda name: None)


def _handled_table(metadata: MetaData) -> Table:
    return Table(
        "handled",
        metadata,
        Column("place", BigInteger, Identity(), primary_key=True),
        Column("key", Text),
        Column("payload", BigInteger),
    )
