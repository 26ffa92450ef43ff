"""A worker in a process of its own: `python -m tests.acceptance.worker_process DATABASE REDIS STREAM`.

It relays an outbox to the stream, handles what comes there, and prunes. A payload says what publishing
it (topic "publish") or handling it (topic "handle") does; both tell on stdout what they have begun and
ended. --grace is the worker's, in seconds; the services have a tenth of it. --uvloop, --bug.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from redis.asyncio import Redis
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from oncely import Event, Outbox, Relay, Retention, Worker
from oncely.backoff import Backoff
from oncely.streams import StreamConsumer, stream_publisher
from oncely.worker import Service

GROUP = "tests"
OFTEN = Backoff(first=timedelta(milliseconds=50), maximum=timedelta(milliseconds=200))


async def wait_for_go() -> None:
    """Until the parent writes a line."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), told.set)
    await told.wait()
    loop.remove_reader(sys.stdin.fileno())
    os.read(sys.stdin.fileno(), 100)


async def swallow() -> None:
    with suppress(Exception):
        await asyncio.Event().wait()


async def ignore() -> None:
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


async def block() -> None:
    time.sleep(60)  # noqa: ASYNC251  that is the point


async def block_a_thread() -> None:
    await asyncio.to_thread(time.sleep, 60)


async def leave() -> None:
    sys.exit(5)


async def nothing() -> None: ...


DOES: dict[str, Callable[[], Awaitable[object]]] = {
    "nothing": nothing,
    "wait": wait_for_go,
    "swallow": swallow,
    "ignore": ignore,
    "block": block,
    "thread": block_a_thread,
    "leave": leave,
}


async def do(event: Event) -> None:
    print(f"begun {event.topic} {event.payload}", flush=True)
    await DOES[event.payload]()
    print(f"ended {event.topic} {event.payload}", flush=True)


async def skip(event: Event) -> None: ...


class Bug:
    """A service that fails once it is told to go."""

    name = "bug"
    waits_for = None
    last_success = None

    async def run(self, stop: asyncio.Event | None = None) -> None:
        await wait_for_go()
        raise ZeroDivisionError("the bug")


SERVICE = Bug()


def make_worker(
    database_url: str, redis_url: str, stream: str, grace: timedelta, *, bug: bool = False
) -> Worker:
    engine = create_async_engine(database_url)
    sessions = async_sessionmaker(engine)
    redis = Redis.from_url(redis_url)
    outbox = Outbox(MetaData())
    send = stream_publisher(redis, stream)

    async def publish(events: Sequence[Event]) -> None:
        for event in events:
            if event.topic == "publish":
                await do(event)
        await send(events)

    relay = Relay(outbox, sessions, publish, batch=10, outage=OFTEN, grace=grace / 10)
    consumer = StreamConsumer(
        redis,
        stream=stream,
        group=GROUP,
        retry_after_ms=60_000,
        concurrency=4,
        outage=OFTEN,
        grace=grace / 10,
    )

    async def query(event: Event) -> None:
        """Uses the database, until it is cancelled."""
        print("begun query", flush=True)
        async with sessions() as session:
            while True:
                await session.execute(text("SELECT 1"))
                print("asked", flush=True)
                await wait_for_go()

    consumer.subscribe("handle", do)
    consumer.subscribe("query", query)
    consumer.subscribe("publish", skip)
    retention = Retention(sessions, {outbox: timedelta(days=1)}, outage=OFTEN, grace=grace / 10)
    services: list[Service] = [relay, consumer, retention]
    if bug:
        services.append(Bug())
    return Worker(*services, grace=grace, close=[redis.aclose, engine.dispose])


def from_environment() -> Worker:
    """For `oncely run` and for a web application: DATABASE_URL, REDIS_URL and STREAM say where."""
    database, redis, stream = (os.environ[name] for name in ("DATABASE_URL", "REDIS_URL", "STREAM"))
    return make_worker(database, redis, stream, timedelta(seconds=10), bug="BUG" in os.environ)


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("database_url", "redis_url", "stream"):
        parser.add_argument(name)
    parser.add_argument("--grace", type=float, default=10.0)
    parser.add_argument("--bug", action="store_true")
    parser.add_argument("--uvloop", action="store_true")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    worker = make_worker(
        given.database_url, given.redis_url, given.stream, timedelta(seconds=given.grace), bug=given.bug
    )
    if given.uvloop:
        import uvloop

        return worker.main(loop_factory=uvloop.new_event_loop)
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
