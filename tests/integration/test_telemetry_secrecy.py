"""Nothing secret is in any record, log line, metric or span, whatever room it goes through."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from redis.asyncio import Redis
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import Effects, Event, IdempotencyKeys, Inbox, Outbox, Refused, Relay
from oncely.backoff import Backoff
from oncely.streams import StreamConsumer, stream_publisher
from oncely.telemetry import Gauges, observers
from oncely.telemetry.logging import LoggingObserver
from oncely.telemetry.opentelemetry import OpenTelemetryObserver
from oncely.telemetry.prometheus import PrometheusObserver
from tests import webhooks as hooks
from tests.outboxes import Sessions
from tests.telemetry import Recorder
from tests.webhooks import Endpoint

pytestmark = pytest.mark.in_schema

SECRET = "s3cr3t"


async def test_nothing_secret_is_told_or_shown(
    engine: AsyncEngine,
    sessions: Sessions,
    metadata: MetaData,
    redis: Redis,
    stream: str,
    server: Endpoint,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "oncely.telemetry")
    registry, exporter, recorder = CollectorRegistry(), InMemorySpanExporter(), Recorder()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    observer = observers(
        recorder,
        PrometheusObserver(registry),
        OpenTelemetryObserver(tracer_provider=provider),
        LoggingObserver(),
    )
    keys, inbox = IdempotencyKeys(metadata, observer=observer), Inbox(metadata, observer=observer)
    outbox = Outbox(metadata, observer=observer)
    effects = Effects(metadata, stale_after=timedelta(hours=1), sessionmaker=sessions, observer=observer)
    webhooks = await hooks.make_webhooks(engine, metadata=metadata, observer=observer)

    async def work() -> tuple[int, str]:
        raise Refused(409, SECRET)

    async def call(provider_token: str) -> object:
        raise ValueError(f"{SECRET} {provider_token}")

    async def refuse(events: Sequence[Event]) -> None:
        raise ValueError(SECRET)

    failing = True

    async def handle(session: object, event: Event) -> None:
        if failing:
            raise ValueError(f"{SECRET}: {event.payload}")

    consumer = StreamConsumer(redis, stream=stream, retry_after_ms=1, observer=observer)
    consumer.subscribe("order.*", inbox.handler(sessions, handle, consumer="mail"))
    with provider.get_tracer("test").start_as_current_span("request"):
        async with sessions.begin() as session:
            await keys.run(session, scope=SECRET, key=SECRET, fingerprint=SECRET.encode(), work=work)
            await outbox.emit(
                session,
                "order.paid",
                {SECRET: SECRET},
                key=SECRET,
                headers={SECRET: SECRET},
                dedup_key=SECRET,
            )
            await webhooks.enqueue(
                session,
                server.url(f"/{SECRET}?{SECRET}"),
                SECRET.encode(),
                key=SECRET,
                caller="shop",
                account=SECRET,
                type="order.paid",
                headers={"X-Secret": SECRET},
            )
    at_once = Backoff(first=timedelta(microseconds=1), maximum=timedelta(microseconds=1), jitter=0)
    assert (await Relay(outbox, sessions, refuse, retry=at_once).run_once()).failed == 1
    assert (await Relay(outbox, sessions, stream_publisher(redis, stream)).run_once()).published == 1
    await consumer.run_once()
    failing = False
    while not await consumer.run_once():
        pass
    with suppress(ValueError):
        await effects.run(SECRET, call, args=SECRET)
    server.answer = hooks.Answer(500, body=SECRET.encode())
    await hooks.worker(webhooks, sessions, server).run_once()
    await Gauges(observer, sessions, outbox, webhooks, consumer).run_once()

    assert {type(record).__name__ for record in recorder.records} == {
        "RequestGuarded",
        "EventsEmitted",
        "WebhookEnqueued",
        "BatchClaimed",
        "EventFailed",
        "EventsPublished",
        "BatchSettled",
        "MessageHandled",
        "MessagesTakenOver",
        "MessageReceived",
        "EffectRun",
        "WebhookAttempted",
        "OutboxMeasured",
        "WebhooksMeasured",
        "StreamMeasured",
        "DeadLettersMeasured",
    }
    spans = [span.to_json() for span in exporter.get_finished_spans()]
    assert len(spans) == 5
    lines = [
        f"{entry.getMessage()} {entry.__dict__}"
        for entry in caplog.records
        if entry.name.startswith("oncely.telemetry")
    ]
    assert len(lines) == len(recorder.records)
    told = [*map(repr, recorder.records), *spans, *lines, generate_latest(registry).decode()]
    assert [text for text in told if SECRET in text or "hooks.example.com" in text] == []
