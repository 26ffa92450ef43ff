"""What the demo stands on: servers, tables and a stream, which are gone when it ends."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from uuid import uuid4

from redis.asyncio import Redis
from sqlalchemy import insert, make_url
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.schema import CreateSchema, DropSchema

from examples.shop.models import Base, Seat
from examples.shop.places import make_engine, make_redis, stream_name
from oncely.testing import EmbeddedPostgres, EmbeddedValkey

__all__ = ["servers", "stream", "tables"]


@asynccontextmanager
async def servers() -> AsyncIterator[None]:
    """PostgreSQL and Redis, and the environment that tells the shop's processes where they are."""
    with ExitStack() as stack:
        database = os.environ.get("ONCELY_TEST_DATABASE_URL") or stack.enter_context(EmbeddedPostgres()).url()
        redis = os.environ.get("ONCELY_TEST_REDIS_URL") or stack.enter_context(EmbeddedValkey()).url
        url = make_url(database).set(drivername="postgresql+asyncpg")
        name = f"oncely_shop_{uuid4().hex[:12]}"
        os.environ |= {
            "SHOP_DATABASE_URL": url.render_as_string(hide_password=False),
            "SHOP_SCHEMA": name,
            "SHOP_REDIS_URL": redis,
            "SHOP_STREAM": name,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        yield


@asynccontextmanager
async def tables(seats: Iterable[str]) -> AsyncIterator[AsyncEngine]:
    """The shop's tables in a schema of their own, with these seats."""
    engine = make_engine()
    schema = os.environ["SHOP_SCHEMA"]
    try:
        async with engine.begin() as connection:
            await connection.execute(CreateSchema(schema))
            await connection.run_sync(Base.metadata.create_all)
            await connection.execute(insert(Seat), [{"name": seat} for seat in seats])
        yield engine
    finally:
        async with engine.begin() as connection:
            await connection.execute(DropSchema(schema, cascade=True, if_exists=True))
        await engine.dispose()


@asynccontextmanager
async def stream() -> AsyncIterator[Redis]:
    """A client of Redis, and the shop's stream in it."""
    async with make_redis() as redis:
        try:
            yield redis
        finally:
            await redis.delete(stream_name(), f"{stream_name()}:dead")
