"""Records as metrics of OpenTelemetry, and one trace from where an event is emitted to its handler.

    observer = OpenTelemetryObserver()       needs the API alone: `pip install 'oncely[opentelemetry]'`

Two spans are made, `publish <outbox>` by a relay and `process <topic>` by a consumer:

    HTTP request ─▶ emit ┃ traceparent in the event's headers ┃ ─▶ process <topic>     one trace
                      ◀── link ── publish <outbox>                                    a trace of its own

A batch holds events of many traces, so its span is in none of them and links to all, up to 128.
Only W3C Trace Context is written to headers, and no baggage, which may hold anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from oncely.extras import needs

needs("opentelemetry", "opentelemetry.trace")

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import Meter, MeterProvider, get_meter
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from oncely.event import Event
from oncely.telemetry.metrics import METRICS, SPANS, Metric, check_labels
from oncely.telemetry.records import BatchSettled, MessageHandled, Record

__all__ = ["OpenTelemetryObserver"]

_MOST_LINKS = 128  # what the SDK keeps of them by default

_W3C = TraceContextTextMapPropagator()


class OpenTelemetryObserver:
    """Metrics and spans, by the global providers or by those that are given.

    A label's values must be few; `without={"topic"}` leaves labels out of the metrics. Spans of events
    carry ids of events, which are no secret, and of an error its class alone.
    """

    def __init__(
        self,
        *,
        meter_provider: MeterProvider | None = None,
        tracer_provider: TracerProvider | None = None,
        without: Collection[str] = (),
    ) -> None:
        self._tracer = trace.get_tracer("oncely", tracer_provider=tracer_provider)
        meter = get_meter("oncely", meter_provider=meter_provider)
        check_labels(without)
        self._notes: dict[type, list[Callable[[Record], None]]] = {}
        for metric in METRICS:
            self._notes.setdefault(metric.record, []).append(_note(metric, meter, without))

    def __call__(self, record: Record) -> None:
        for note in self._notes.get(type(record), ()):
            note(record)

    def headers(self) -> Mapping[str, str]:
        """The current span's `traceparent` and `tracestate`; nothing when there is no span."""
        headers: dict[str, str] = {}
        _W3C.inject(headers)
        return headers

    @contextmanager
    def publishing(self, outbox: str, events: Sequence[Event], /) -> Iterator[None]:
        """The span `publish <outbox>`, linked to those in which its events were emitted."""
        with (
            self._tracer.start_as_current_span(
                SPANS[BatchSettled].replace("<outbox>", outbox),
                kind=SpanKind.PRODUCER,
                links=_links(events),
                attributes={
                    "messaging.system": "oncely",
                    "messaging.operation.name": "publish",
                    "messaging.operation.type": "send",
                    "messaging.destination.name": outbox,
                    "messaging.batch.message_count": len(events),
                },
                record_exception=False,
                set_status_on_exception=False,
            ) as span,
            _told(span),
        ):
            yield

    @contextmanager
    def handling(self, stream: str, group: str, event: Event, /) -> Iterator[None]:
        """The span `process <topic>`, in the trace in which the event was emitted."""
        with (
            self._tracer.start_as_current_span(
                SPANS[MessageHandled].replace("<topic>", event.topic),
                context=_W3C.extract(_carrier(event)),
                kind=SpanKind.CONSUMER,
                attributes={
                    "messaging.system": "oncely",
                    "messaging.operation.name": "process",
                    "messaging.operation.type": "process",
                    "messaging.destination.name": stream,
                    "messaging.consumer.group.name": group,
                    "messaging.message.id": str(event.id),
                    "oncely.topic": event.topic,
                    "oncely.attempt": event.attempt,
                },
                record_exception=False,
                set_status_on_exception=False,
            ) as span,
            _told(span),
        ):
            yield


@contextmanager
def _told(span: Span) -> Iterator[None]:
    """An error of the block ends in the span by its class: its message may quote anything."""
    try:
        yield
    except BaseException as error:
        name = type(error).__name__
        span.set_status(Status(StatusCode.ERROR, name))
        span.set_attribute("error.type", name)
        raise


def _carrier(event: Event) -> dict[str, str]:
    """The event's headers, which whoever emitted it may have written in capitals."""
    return {name.lower(): value for name, value in (event.headers or {}).items()}


def _links(events: Sequence[Event]) -> list[Link]:
    found: dict[str, Link] = {}
    for event in events:
        carrier = _carrier(event)
        parent = carrier.get("traceparent")
        if parent is None or parent in found:
            continue
        context = trace.get_current_span(_W3C.extract(carrier, Context())).get_span_context()
        if context.is_valid:
            found[parent] = Link(context)
        if len(found) == _MOST_LINKS:
            break
    return list(found.values())


def _note(metric: Metric, meter: Meter, without: Collection[str]) -> Callable[[Record], None]:
    """What enters a record into the metric."""
    name, unit, about, amount = metric.name, metric.unit, metric.about, metric.amount
    labels = metric.by_labels(lambda labels: labels, without=without)
    if metric.kind == "counter":
        counter = meter.create_counter(name, unit, about)
        return lambda record: counter.add(amount(record), labels(record))
    if metric.kind == "gauge":
        gauge = meter.create_gauge(name, unit, about)
        return lambda record: gauge.set(amount(record), labels(record))
    histogram = meter.create_histogram(name, unit, about, explicit_bucket_boundaries_advisory=metric.buckets)
    return lambda record: histogram.record(amount(record), labels(record))
