"""A worker in a process of its own: `python -m tests.acceptance.streams_worker URL STREAM NAME ATTEMPTS`.

It writes each call of its handler into the list `{stream}:log`, as [payload, attempt, "begun" or
"ended"]. The payload "poison" ends the process as a crash does.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from redis.asyncio import Redis

from oncely.event import Event
from oncely.streams import StreamConsumer


async def main(url: str, stream: str, name: str, attempts: str) -> None:
    async with Redis.from_url(url) as redis:
        consumer = StreamConsumer(
            redis,
            stream=stream,
            consumer=name or None,
            retry_after_ms=150,
            max_attempts=int(attempts),
            concurrency=8,
        )

        async def note(event: Event, what: str) -> None:
            noted = json.dumps([event.payload, event.attempt, what])
            await redis.rpush(f"{stream}:log", noted)

        @consumer.subscribe("*")
        async def handle(event: Event) -> None:
            await note(event, "begun")
            if event.payload == "poison":
                os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(0.002)
            await note(event, "ended")

        await consumer.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
