"""Moves what happened from the database to the stream: at least once, in order for each customer.

    oncely run examples.shop.relay:make_worker

Run as many as you like. One that dies leaves its batch to the others, who take it when its lease has
ended; what it had sent already is then sent twice.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy.ext.asyncio import async_sessionmaker

from examples.shop.models import inbox, keys, outbox
from examples.shop.places import make_engine, make_redis, stream_name
from oncely import Relay, Retention, Worker
from oncely.streams import stream_publisher

__all__ = ["make_worker"]


def make_worker() -> Worker:
    """The relay, and beside it what clears away the finished rows."""
    engine, redis = make_engine(), make_redis()
    sessions = async_sessionmaker(engine)
    publish = stream_publisher(redis, stream_name())
    # Small batches and a short lease: the demo kills relays and does not want to wait.
    relay = Relay(
        outbox,
        sessions,
        publish,
        batch=20,
        lease=timedelta(seconds=2),
        database_timeout=timedelta(seconds=1),
    )
    retention = Retention(sessions, dict.fromkeys((outbox, keys, inbox), timedelta(days=7)))
    return Worker(relay, retention, close=[redis.aclose, engine.dispose])
