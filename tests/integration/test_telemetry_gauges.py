"""Gauges: one look at what waits, told to an observer, on real engines."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import Outbox, TablesMissing
from oncely.backoff import Backoff
from oncely.streams import StreamConsumer, stream_publisher
from oncely.telemetry import (
    DeadLettersMeasured,
    Gauges,
    Outage,
    OutboxMeasured,
    StreamMeasured,
    WebhooksMeasured,
)
from oncely.webhooks import Webhooks
from oncely.worker import Service, Worker
from tests import webhooks as hooks
from tests.outboxes import Sessions, emit, fail, sent_sql
from tests.streams import events
from tests.telemetry import Recorder
from tests.waiting import until

pytestmark = pytest.mark.in_schema

NOTHING = timedelta(0)
MOMENT = Backoff(first=timedelta(milliseconds=1), maximum=timedelta(milliseconds=1), jitter=0)


async def test_each_is_looked_at_once_by_one_statement_or_two(
    engine: AsyncEngine,
    sessions: Sessions,
    outbox: Outbox,
    webhooks: Webhooks,
    redis: Redis,
    stream: str,
    observer: Recorder,
) -> None:
    await emit(outbox, sessions, 1, 2, 3)
    await fail(outbox, sessions, 1, delay=None)
    await fail(outbox, sessions, 2, delay=timedelta(hours=1))
    await emit(outbox, sessions, 4, delay=timedelta(hours=1))
    await hooks.enqueue(webhooks, sessions, "https://hooks.example.com/")
    consumer = StreamConsumer(redis, stream=stream, group="g")
    consumer.subscribe("*", hold)
    await stream_publisher(redis, stream)(events("a", "b"))
    await consumer.run_once(count=1)
    await redis.xadd(consumer.dead_letter_stream, {"a": "b"})
    with sent_sql(engine) as sent:
        told = await Gauges(observer, sessions, outbox, webhooks, consumer).run_once()
    assert len(sent) == 3  # webhooks take two
    assert told == observer.records
    in_outbox, in_webhooks, in_stream, dead = told
    assert isinstance(in_outbox, OutboxMeasured)
    assert isinstance(in_webhooks, WebhooksMeasured)
    assert isinstance(in_stream, StreamMeasured)
    assert in_outbox.lag > NOTHING
    assert in_outbox == OutboxMeasured(
        outbox="outbox", ready=1, deferred=1, in_flight=0, retrying=1, dead=1, lag=in_outbox.lag
    )
    assert in_webhooks.oldest > NOTHING
    assert in_webhooks == WebhooksMeasured(
        webhooks="webhooks", pending=1, failing=0, quarantined=0, oldest=in_webhooks.oldest
    )
    assert dead == DeadLettersMeasured(stream=stream, dead=1)
    assert in_stream.oldest_pending >= NOTHING
    assert in_stream == StreamMeasured(
        stream=stream, group="g", unread=1, pending=1, oldest_pending=in_stream.oldest_pending
    )


async def hold(event: object) -> None:
    raise ValueError("so that it stays pending")


async def test_one_that_is_away_keeps_none_of_the_others_from_being_seen(
    sessions: Sessions, outbox: Outbox, observer: Recorder
) -> None:
    stop = asyncio.Event()
    async with Redis(host="127.0.0.1", port=1) as nowhere:
        consumer = StreamConsumer(nowhere, stream="s")
        gauges = Gauges(observer, sessions, consumer, outbox, outage=MOMENT)
        running = asyncio.create_task(gauges.run(stop))
        await until(lambda: len(observer.records) >= 4)
        assert (gauges.waits_for, gauges.last_success) == ("broker", None)
        stop.set()
        await running
    empty = OutboxMeasured(outbox="outbox", ready=0, deferred=0, in_flight=0, retrying=0, dead=0, lag=NOTHING)
    away = Outage(
        service="gauges",
        name="",
        waits_for="broker",
        error="PublisherUnavailable",
        retry_in=timedelta(milliseconds=1),
    )
    assert observer.records[:4] == [empty, away, empty, away]


async def test_a_database_that_does_not_answer_in_time_is_away(
    sessions: Sessions, observer: Recorder
) -> None:
    class Silent:
        async def measure(self, sessionmaker: object) -> list[Any]:
            await asyncio.sleep(60)
            return []

    stop = asyncio.Event()
    gauges = Gauges(observer, sessions, Silent(), timeout=timedelta(milliseconds=10), outage=MOMENT)
    running = asyncio.create_task(gauges.run(stop))
    await until(lambda: len(observer.records) >= 1)
    assert gauges.waits_for == "database"
    stop.set()
    await running


async def test_it_looks_again_after_its_interval_and_stops_at_once(
    sessions: Sessions, outbox: Outbox, observer: Recorder
) -> None:
    stop = asyncio.Event()
    gauges = Gauges(observer, sessions, outbox, interval=timedelta(milliseconds=5))
    running = asyncio.create_task(gauges.run(stop))
    await until(lambda: len(observer.records) >= 3)
    assert (gauges.waits_for, gauges.last_success is not None) == (None, True)
    stop.set()
    async with asyncio.timeout(5):
        await running


async def test_a_missing_table_ends_it(sessions: Sessions, observer: Recorder) -> None:
    with pytest.raises(TablesMissing):
        await Gauges(observer, sessions, Outbox(MetaData())).run()


def test_it_is_a_service_for_a_worker(sessions: Sessions, observer: Recorder) -> None:
    gauges = Gauges(observer, sessions, Outbox(MetaData()))
    assert isinstance(gauges, Service)
    assert [service.name for service in Worker(gauges).services] == ["Gauges"]


def test_what_makes_no_sense_is_refused(observer: Recorder) -> None:
    with pytest.raises(ValueError):
        Gauges(observer, lambda: None)  # type: ignore[arg-type,return-value]  # it is not called
    with pytest.raises(TypeError, match=r"^an observer is a callable that takes a record, not NoneType$"):
        Gauges(None, async_sessionmaker(), Outbox(MetaData()))  # type: ignore[arg-type]  # there is nobody to tell
