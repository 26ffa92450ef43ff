"""Prints one ticket for each order, however often its message arrives.

    oncely run examples.shop.consumer:make_worker

A message may come twice: a relay died before it could mark it as sent, or a handler failed. The inbox
notes that it was handled in the transaction in which the ticket is written: both are there, or neither.
"""

from __future__ import annotations

import random
from uuid import UUID

from sqlalchemy import update
from sqlalchemy.ext.asyncio import async_sessionmaker

from examples.shop.models import Order, inbox, observer
from examples.shop.places import make_engine, make_redis, stream_name
from oncely import Event, Worker
from oncely.streams import StreamConsumer

__all__ = ["make_worker"]

OUT_OF_PAPER = 0.1
"""The share of handlings that fail."""


def make_worker() -> Worker:
    """The consumer of the stream."""
    engine, redis = make_engine(), make_redis()
    sessions = async_sessionmaker(engine)
    # Soon again: the printer is often out of paper. The client's timeout, in places.py, has to be shorter.
    consumer = StreamConsumer(
        redis,
        stream=stream_name(),
        group="tickets",
        retry_after_ms=1_000,
        max_attempts=20,
        observer=observer,
    )

    @consumer.subscribe("order.placed")
    async def print_ticket(event: Event) -> None:
        order = update(Order).where(Order.id == UUID(event.payload["order"]))
        async with sessions.begin() as session:
            await session.execute(
                order.values(deliveries=Order.deliveries + 1, failures=Order.failures + (event.attempt - 1))
            )
            ticket = order.values(tickets=Order.tickets + 1)
            await inbox.run(session, event, lambda: session.execute(ticket), consumer="tickets")
            if random.random() < OUT_OF_PAPER:
                raise RuntimeError("the printer is out of paper")

    return Worker(consumer, close=[redis.aclose, engine.dispose])
