"""Where a process of the shop finds its database and its stream: the environment says so.

SHOP_DATABASE_URL and SHOP_REDIS_URL are needed. The tables are in SHOP_SCHEMA (default: the
database's own), the stream is SHOP_STREAM.
"""

from __future__ import annotations

import os

from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

__all__ = ["make_engine", "make_redis", "stream_name"]


def make_engine() -> AsyncEngine:
    """An engine whose every statement, oncely's too, goes to the shop's schema."""
    return create_async_engine(
        os.environ["SHOP_DATABASE_URL"],
        pool_size=20,
        execution_options={"schema_translate_map": {None: os.environ.get("SHOP_SCHEMA")}},
    )


def make_redis() -> Redis:
    """A client that gives up sooner than the consumer's entries are another worker's: `oncely check` asks."""
    return Redis.from_url(os.environ["SHOP_REDIS_URL"], socket_timeout=0.5)


def stream_name() -> str:
    return os.environ.get("SHOP_STREAM", "shop")
