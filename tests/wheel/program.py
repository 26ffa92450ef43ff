"""A small program of a user's: an order by HTTP, its event over the line, its webhook, all of it twice.

It is run on the installed wheel, and type-checked against it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from fastapi import FastAPI, Request
from httpx import ASGITransport, AsyncClient
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from sqlalchemy import Column, Integer, MetaData, Table, Text, insert, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from oncely import Event, IdempotencyKeys, Inbox, Outbox, Relay
from oncely.fastapi import IdempotentSession, idempotent_route
from oncely.streams import StreamConsumer, stream_publisher
from oncely.telemetry.prometheus import PrometheusObserver
from oncely.testing import EmbeddedPostgres, EmbeddedValkey
from oncely.webhooks import Keyring, Webhooks


def customer(request: Request) -> str:
    return request.headers["X-User"]


async def run(postgres: EmbeddedPostgres, valkey: EmbeddedValkey) -> dict[str, object]:
    """What the tables, the stream and the metrics hold after everything was done twice."""
    registry = CollectorRegistry()
    metadata = MetaData()
    orders = Table("orders", metadata, Column("id", Integer, primary_key=True), Column("item", Text))
    booked = Table("booked", metadata, Column("item", Text))
    outbox = Outbox(metadata, observer=PrometheusObserver(registry))
    keys, inbox = IdempotencyKeys(metadata), Inbox(metadata)
    webhooks = Webhooks(metadata, keyring=Keyring({"one": Keyring.new_key()}, write="one"))
    engine = create_async_engine(postgres.url())
    sessions = async_sessionmaker(engine)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)

    app = FastAPI()
    app.router.route_class = idempotent_route(keys, sessions, scope=customer)

    @app.post("/orders", status_code=201)
    async def order(item: str, session: IdempotentSession) -> dict[str, str]:
        await session.execute(insert(orders).values(item=item))
        await outbox.emit(session, "order.placed", {"item": item}, key=item)
        await webhooks.enqueue(
            session, "https://example.com/hooks", item.encode(), key=item, caller="shop", type="order.placed"
        )
        return {"item": item}

    async def book(session: AsyncSession, event: Event) -> None:
        await session.execute(insert(booked).values(item=event.payload["item"]))

    async with AsyncClient(transport=ASGITransport(app), base_url="http://shop") as client:
        headers = {"X-User": "Ada", "Idempotency-Key": "k-2f1b9c"}
        answers = [await client.post("/orders?item=tea", headers=headers) for _ in range(2)]

    async with Redis.from_url(valkey.url) as redis:
        publish = stream_publisher(redis, "shop")

        async def publish_twice(events: Sequence[Event]) -> None:
            for _ in range(2):
                await publish(events)

        relay = Relay(outbox, sessions, publish_twice)
        consumer = StreamConsumer(redis, stream="shop", group="billing")
        consumer.subscribe("order.*", inbox.handler(sessions, book, consumer="billing"))
        published = (await relay.run_once()).published
        handled = await consumer.run_once()

    async with sessions() as session:
        found = {
            table.name: (await session.scalars(select(table.c.item))).all() for table in (orders, booked)
        }
        waiting = (await webhooks.stats(session)).pending
        pruned = await outbox.prune(session, older_than=timedelta(days=1))
    await engine.dispose()
    emitted = registry.get_sample_value(
        "oncely_events_emitted_total", {"outbox": "outbox", "topic": "order.placed"}
    )
    return {
        "answers": [(each.status_code, each.headers.get("Idempotency-Replayed")) for each in answers],
        "published": published,
        "handled": handled,
        "webhooks": waiting,
        "pruned": pruned,
        "emitted": emitted,
        **found,
    }


def main() -> dict[str, object]:
    """Run it on servers of its own."""
    with EmbeddedPostgres() as postgres, EmbeddedValkey() as valkey:
        return asyncio.run(run(postgres, valkey))
