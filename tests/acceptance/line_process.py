"""The whole line in a process of its own, which crashes at a named step: `main` is run by `tests.forks`."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from oncely.testing import Steps, crash_at
from tests.acceptance.line import Line
from tests.database import Database
from tests.waiting import until


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
    async with Redis.from_url(redis_url) as redis:
        steps = crash_at(point) if point is not None else Steps(lambda name: None)
        steps.watch(engine, redis)
        line = Line(engine, redis, stream)
        stop = asyncio.Event() if stops else None

        async def leaves_something() -> bool:
            return bool(await redis.xlen(stream) > 1)

        async def consume() -> None:
            if stops:
                await until(leaves_something)  # or there would be nothing to give back
            await line.consumer(steps, stop=stop).run(stop)

        async with asyncio.TaskGroup() as group:
            group.create_task(line.relay(steps, publish_seconds=publish_seconds).run())
            group.create_task(consume())
