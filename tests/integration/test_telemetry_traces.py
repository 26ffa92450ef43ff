"""One trace from an HTTP request to the handler of its event, over PostgreSQL and Redis."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span
from redis.asyncio import Redis
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import Event, NewEvent, Outbox, PublisherUnavailable, Relay
from oncely.streams import StreamConsumer, stream_publisher
from oncely.telemetry.opentelemetry import OpenTelemetryObserver
from tests.outboxes import Sessions

pytestmark = pytest.mark.in_schema

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traces:
    """A tracer provider of the test's own, and the spans that have ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")
        self.observer = OpenTelemetryObserver(tracer_provider=self.provider)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        """By their names, which must differ."""
        ended = self.exporter.get_finished_spans()
        assert len({span.name for span in ended}) == len(ended)
        return {span.name: span for span in ended}


@pytest.fixture
def traces() -> Traces:
    return Traces()


@pytest.fixture
async def outbox(engine: AsyncEngine, metadata: MetaData, traces: Traces) -> Outbox:
    outbox = Outbox(metadata, observer=traces.observer)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    return outbox


def trace_of(span: ReadableSpan) -> int:
    assert span.context is not None
    trace_id: int = span.context.trace_id
    return trace_id


async def published(outbox: Outbox, sessions: Sessions) -> list[Event]:
    """What a relay hands to its publisher."""
    found: list[Event] = []

    async def publish(events: Sequence[Event]) -> None:
        found.extend(events)

    await Relay(outbox, sessions, publish).run_once()
    return found


async def test_one_trace_leads_from_the_request_to_the_handler(
    outbox: Outbox, sessions: Sessions, redis: Redis, stream: str, traces: Traces
) -> None:
    app = FastAPI()

    @app.middleware("http")
    async def trace_it(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        with traces.tracer.start_as_current_span(f"POST {request.url.path}", kind=SpanKind.SERVER):
            return await call(request)

    @app.post("/orders")
    async def order() -> None:
        async with sessions.begin() as session:
            await outbox.emit(session, "order.paid", {"secret": 4711}, headers={"tenant": "7"}, key="secret")

    consumer = StreamConsumer(redis, stream=stream, observer=traces.observer)
    handled: list[tuple[object, object]] = []

    @consumer.subscribe("order.*")
    async def handle(event: Event) -> None:
        handled.append((event.payload, (event.headers or {}).get("tenant")))
        with traces.tracer.start_as_current_span("the handler's own"):
            pass

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
        assert (await client.post("/orders")).status_code == 200
    await Relay(outbox, sessions, stream_publisher(redis, stream)).run_once()
    assert await consumer.run_once() == 1

    spans = traces.spans
    request, publish = spans["POST /orders"], spans["publish outbox"]
    process, own = spans["process order.paid"], spans["the handler's own"]
    assert handled == [({"secret": 4711}, "7")]
    assert trace_of(request) == trace_of(process) == trace_of(own)
    assert process.parent is not None
    assert process.parent.span_id == request.context.span_id
    assert own.parent is not None
    assert own.parent.span_id == process.context.span_id
    assert (publish.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert publish.parent is None
    assert [link.context.span_id for link in publish.links] == [request.context.span_id]
    assert publish.attributes is not None
    assert publish.attributes["messaging.batch.message_count"] == 1
    assert process.attributes is not None
    assert process.attributes["messaging.consumer.group.name"] == "workers"
    assert "secret" not in "".join(span.to_json() for span in spans.values())


async def test_a_trace_that_the_emitter_gives_is_kept(
    outbox: Outbox, sessions: Sessions, traces: Traces
) -> None:
    with traces.tracer.start_as_current_span("current"):
        async with sessions.begin() as session:
            await outbox.emit(session, "t", 1, headers={"Traceparent": GIVEN})
            await outbox.emit(session, "t", 2, headers={"traceparent": GIVEN, "tracestate": "a=1"})
    assert [event.headers for event in await published(outbox, sessions)] == [
        {"Traceparent": GIVEN},
        {"traceparent": GIVEN, "tracestate": "a=1"},
    ]


async def test_a_trace_that_is_given_in_capitals_is_continued(
    outbox: Outbox, sessions: Sessions, redis: Redis, stream: str, traces: Traces
) -> None:
    async def handle(event: Event) -> None:
        pass

    consumer = StreamConsumer(redis, stream=stream, observer=traces.observer)
    consumer.subscribe("*", handle)
    async with sessions.begin() as session:
        await outbox.emit(session, "t", 1, headers={"Traceparent": GIVEN})
    await Relay(outbox, sessions, stream_publisher(redis, stream)).run_once()
    await consumer.run_once()
    given = int(GIVEN.split("-")[1], 16)
    assert trace_of(traces.spans["process t"]) == given
    assert [link.context.trace_id for link in traces.spans["publish outbox"].links] == [given]


async def test_without_a_current_span_no_header_is_written(outbox: Outbox, sessions: Sessions) -> None:
    async with sessions.begin() as session:
        await outbox.emit(session, "t", 1)
        await outbox.emit_many(session, [NewEvent("t", 2, headers={"a": "b"})])
    assert [event.headers for event in await published(outbox, sessions)] == [None, {"a": "b"}]


async def test_a_batch_is_linked_to_each_trace_of_its_events_once(
    outbox: Outbox, sessions: Sessions, traces: Traces
) -> None:
    emitting = []
    for name in ("first", "second"):
        with traces.tracer.start_as_current_span(name) as span:
            emitting.append(span.get_span_context().span_id)
            async with sessions.begin() as session:
                await outbox.emit_many(session, [NewEvent("t", 1), NewEvent("t", 2)])
    await published(outbox, sessions)
    assert [link.context.span_id for link in traces.spans["publish outbox"].links] == emitting


async def test_a_batch_is_linked_to_the_first_of_very_many_traces(
    outbox: Outbox, sessions: Sessions, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncely.telemetry.opentelemetry._MOST_LINKS", 2)
    emitting = []
    for name in ("first", "second", "third"):
        with traces.tracer.start_as_current_span(name) as span:
            emitting.append(span.get_span_context().span_id)
            async with sessions.begin() as session:
                await outbox.emit(session, "t", name)
    await published(outbox, sessions)
    links = traces.spans["publish outbox"].links
    assert [link.context.span_id for link in links] == emitting[:2]


async def test_an_error_is_in_the_span_by_its_class_alone(
    outbox: Outbox, sessions: Sessions, redis: Redis, stream: str, traces: Traces
) -> None:
    consumer = StreamConsumer(redis, stream=stream, observer=traces.observer)

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        raise ValueError("secret")

    async def publish(events: Sequence[Event]) -> None:
        raise PublisherUnavailable("redis://user:secret@host")

    async with sessions.begin() as session:
        await outbox.emit(session, "t", 1)
    await Relay(outbox, sessions, publish).run_once()
    await stream_publisher(redis, stream)(await published(Outbox(outbox.table.metadata), sessions))
    await consumer.run_once()
    for name, error in (("publish outbox", "PublisherUnavailable"), ("process t", "ValueError")):
        span = traces.spans[name]
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, error)
        assert span.attributes is not None
        assert span.attributes["error.type"] == error
        assert span.events == ()
        assert "secret" not in span.to_json()


async def test_what_is_around_a_handler_and_the_publisher_runs_inside_of_their_spans(
    outbox: Outbox, sessions: Sessions, redis: Redis, stream: str, traces: Traces
) -> None:
    seen: list[str] = []

    def note() -> None:
        seen.append(getattr(get_current_span(), "name", "none"))

    async def around(event: Event, call: Callable[[], Awaitable[object]]) -> None:
        note()
        await call()

    consumer = StreamConsumer(redis, stream=stream, observer=traces.observer, around=around)

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        note()

    async def publish(events: Sequence[Event]) -> None:
        note()
        await stream_publisher(redis, stream)(events)

    async with sessions.begin() as session:
        await outbox.emit(session, "t", 1)
    await Relay(outbox, sessions, publish).run_once()
    await consumer.run_once()
    note()
    assert seen == ["publish outbox", "process t", "process t", "none"]
