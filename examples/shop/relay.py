"""Moves what happened from the database to the stream: at least once, in order for each customer.

Run as many as you like. One that dies leaves its batch to the others, who take it when its lease has
ended; what it had sent already is then sent twice.
"""

from __future__ import annotations

import asyncio
import signal
from datetime import timedelta

from sqlalchemy.ext.asyncio import async_sessionmaker

from examples.shop.models import outbox
from examples.shop.places import make_engine, make_redis, stream_name
from oncely import Relay
from oncely.streams import stream_publisher


async def run() -> None:
    """Relays until SIGTERM, and then finishes the batch that it has."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    engine = make_engine()
    async with make_redis() as redis:
        publish = stream_publisher(redis, stream_name())
        # Small batches and a short lease: the demo kills relays and does not want to wait.
        relay = Relay(outbox, async_sessionmaker(engine), publish, batch=20, lease=timedelta(seconds=1))
        await relay.run(stop)
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(run())
