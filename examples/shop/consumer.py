"""Prints one ticket for each order, however often its message arrives.

A message may come twice: a relay died before it could mark it as sent, or a handler failed. The inbox
notes that it was handled in the transaction in which the ticket is written: both are there, or neither.
"""

from __future__ import annotations

import asyncio
import random
import signal
from uuid import UUID

from sqlalchemy import update
from sqlalchemy.ext.asyncio import async_sessionmaker

from examples.shop.models import Order, inbox
from examples.shop.places import make_engine, make_redis, stream_name
from oncely import Event
from oncely.streams import StreamConsumer

OUT_OF_PAPER = 0.1
"""The share of handlings that fail."""


async def consume() -> None:
    """Handles messages until SIGTERM, and then finishes those that it has begun."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    engine = make_engine()
    sessions = async_sessionmaker(engine)
    async with make_redis() as redis:
        consumer = StreamConsumer(
            redis, stream=stream_name(), group="tickets", retry_after_ms=200, max_attempts=20
        )

        @consumer.subscribe("order.placed")
        async def print_ticket(event: Event) -> None:
            order = update(Order).where(Order.id == UUID(event.payload["order"]))
            async with sessions.begin() as session:
                await session.execute(
                    order.values(
                        deliveries=Order.deliveries + 1, failures=Order.failures + (event.attempt - 1)
                    )
                )
                ticket = order.values(tickets=Order.tickets + 1)
                await inbox.run(session, event, lambda: session.execute(ticket), consumer="tickets")
                if random.random() < OUT_OF_PAPER:
                    raise RuntimeError("the printer is out of paper")

        await consumer.run(stop)
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(consume())
