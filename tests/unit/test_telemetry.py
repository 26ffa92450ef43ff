"""The records, the table that lists them, the guard around observers, and the adapters on their own."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from asyncio import Future, new_event_loop
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry
from sqlalchemy import MetaData

import oncely.telemetry
from oncely import Event, Outbox
from oncely.event import uuid7
from oncely.telemetry import EventDied, EventFailed, Observer, Record, WebhookAttempted, observers
from oncely.telemetry.logging import LoggingObserver
from oncely.telemetry.metrics import METRICS
from oncely.telemetry.observer import guarded
from oncely.telemetry.opentelemetry import OpenTelemetryObserver
from oncely.telemetry.prometheus import MetricsServer, PrometheusObserver
from oncely.testing import OBSERVER_CHECKS, RecordingObserver
from tests.telemetry import RECORDS, Recorder, a_record, table

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
DIED = EventDied(outbox="o", topic="t", error="ValueError", attempts=3)


def test_the_docstring_and_the_page_for_operators_have_the_table_of_the_code() -> None:
    assert oncely.telemetry.__doc__ is not None
    assert table() in oncely.telemetry.__doc__
    assert table() in OPERATIONS.read_text()


@pytest.mark.parametrize("make", [PrometheusObserver, OpenTelemetryObserver])
def test_labels_to_leave_out_are_labels(make: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match=r"^without must be names of labels, not a str$"):
        make(without="topic")
    with pytest.raises(ValueError, match=r"^no metric has a label topics, types$"):
        make(without=["topics", "topic", "types"])


@pytest.mark.parametrize("port", [-1, 65_536])
def test_metrics_are_shown_at_a_port_that_there_can_be(port: int) -> None:
    with pytest.raises(ValueError, match=r"^port must be "):
        MetricsServer(port)


def test_every_record_is_in_the_window_and_in_the_union() -> None:
    exported = {getattr(oncely.telemetry, name) for name in oncely.telemetry.__all__}
    assert {one for one in exported if dataclasses.is_dataclass(one)} == set(RECORDS)


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_is_frozen_and_holds_names_counts_and_durations_alone(kind: type) -> None:
    record = a_record(kind)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, dataclasses.fields(kind)[0].name, "another")
    assert not hasattr(record, "__dict__")
    simple = {"str", "int", "bool", "timedelta"}
    types = {str(field.type) for field in dataclasses.fields(kind)}
    assert {type_ for type_ in types if not type_.startswith("Literal")} <= simple
    named = {field.name for field in dataclasses.fields(kind)}
    assert named.isdisjoint({"key", "payload", "headers", "url", "origin", "scope", "account", "body"})


def test_every_record_makes_a_metric_of_fields_that_it_has() -> None:
    assert {metric.record for metric in METRICS} == set(RECORDS)
    for metric in METRICS:
        names = {field.name for field in dataclasses.fields(metric.record)}
        assert {*metric.labels} | ({metric.value} if metric.value else set()) <= names, metric.name
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_the_core_imports_no_vendor() -> None:
    code = (
        "import sys, fastapi, redis.asyncio\n"  # which may import a vendor themselves
        "before = set(sys.modules)\n"
        "import oncely.fastapi, oncely.streams, oncely.telemetry, oncely.webhooks\n"
        "new = set(sys.modules) - before\n"
        "print(sorted(name for name in new if name.startswith(('opentelemetry', 'prometheus_client'))))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_prometheus_has_every_metric_with_its_labels() -> None:
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)
    for kind in RECORDS:
        observer(a_record(kind))
    for metric in METRICS:
        record = a_record(metric.record)
        labels = {
            name: {True: "true"}.get(value := getattr(record, name), str(value)) for name in metric.labels
        }
        series = metric.prometheus + ("_sum" if metric.kind == "histogram" else "")
        assert registry.get_sample_value(series, labels) == pytest.approx(metric.amount(record)), metric.name
    sample = {"outbox": "outbox", "le": "5.0"}
    assert registry.get_sample_value("oncely_batch_size_bucket", sample) == 1.0
    assert registry.get_sample_value("oncely_batch_size_bucket", sample | {"le": "2.0"}) == 0.0


def test_prometheus_counts_up_and_sets_gauges() -> None:
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)
    for lag in (7, 2):
        observer(DIED)
        observer(
            oncely.telemetry.StreamMeasured(
                stream="s", group="g", unread=lag, pending=0, oldest_pending=timedelta(minutes=lag)
            )
        )
    died = {"outbox": "o", "topic": "t", "error": "ValueError"}
    assert registry.get_sample_value("oncely_events_died_total", died) == 2.0
    group = {"stream": "s", "group": "g"}
    assert registry.get_sample_value("oncely_stream_unread", group) == 2.0
    assert registry.get_sample_value("oncely_stream_oldest_pending_seconds", group) == 120.0


def test_labels_can_be_left_out() -> None:
    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    both = observers(
        PrometheusObserver(registry, without={"topic", "error"}),
        OpenTelemetryObserver(meter_provider=MeterProvider([reader]), without={"topic", "error"}),
        PrometheusObserver(bare := CollectorRegistry(), without={"outbox", "topic", "error"}),
    )
    for topic in ("a", "b"):
        both(dataclasses.replace(DIED, topic=topic))
    assert registry.get_sample_value("oncely_events_died_total", {"outbox": "o"}) == 2.0
    assert bare.get_sample_value("oncely_events_died_total") == 2.0
    assert points(reader)["oncely.events.died"] == [({"outbox": "o"}, 2)]


def points(reader: InMemoryMetricReader) -> dict[str, list[tuple[dict[str, object], Any]]]:
    """Each metric's attributes and value, or sum, by its name."""
    found: dict[str, list[tuple[dict[str, object], Any]]] = {}
    data = reader.get_metrics_data()
    assert data is not None
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        found[metric.name] = [
            (dict(point.attributes or {}), getattr(point, "value", None) or getattr(point, "sum", 0.0))
            for point in metric.data.data_points
        ]
    return found


def test_opentelemetry_has_every_metric_with_its_labels() -> None:
    reader = InMemoryMetricReader()
    observer = OpenTelemetryObserver(meter_provider=MeterProvider([reader]))
    for kind in RECORDS:
        observer(a_record(kind))
    found = points(reader)
    assert set(found) == {metric.name for metric in METRICS}
    for metric in METRICS:
        [(attributes, value)] = found[metric.name]
        assert set(attributes) == set(metric.labels)
        assert value == pytest.approx(metric.amount(a_record(metric.record))), metric.name


def test_a_log_line_has_the_records_fields(caplog: pytest.LogCaptureFixture) -> None:
    failed = EventFailed(outbox="o", topic="t", error="ValueError", attempt=1, retry_in=timedelta(seconds=1))
    with caplog.at_level(logging.DEBUG, "oncely.telemetry.records"):
        observer = LoggingObserver()
        observer(failed)
        observer(DIED)
        for kind in RECORDS:
            observer(a_record(kind))
    assert caplog.messages[0] == "EventFailed outbox=o topic=t error=ValueError attempt=1 retry_in=1.0"
    assert [entry.levelname for entry in caplog.records[:2]] == ["WARNING", "ERROR"]
    facts = caplog.records[0].oncely  # type: ignore[attr-defined]  # an `extra`
    assert json.loads(json.dumps(facts)) == {
        "record": "EventFailed",
        "outbox": "o",
        "topic": "t",
        "error": "ValueError",
        "attempt": 1,
        "retry_in": 1.0,
    }
    assert len(caplog.records) == 2 + len(RECORDS)


@pytest.mark.parametrize(
    ("outcome", "level"),
    [
        ("delivered", "INFO"),
        ("retry", "WARNING"),
        ("lost", "WARNING"),
        ("rejected", "ERROR"),
        ("expired", "ERROR"),
        ("quarantined", "ERROR"),
    ],
)
def test_a_webhook_that_will_not_come_is_an_error_in_the_log(
    caplog: pytest.LogCaptureFixture, outcome: str, level: str
) -> None:
    with caplog.at_level(logging.DEBUG, "oncely.telemetry.records"):
        LoggingObserver()(replace(a_record(WebhookAttempted), outcome=outcome))
    assert [entry.levelname for entry in caplog.records] == [level]


def test_a_tracer_that_raises_the_works_own_error_again_is_right(caplog: pytest.LogCaptureFixture) -> None:
    class Again(Broken):
        def handling(self, stream: str, group: str, event: Event, /) -> Any:
            return _RaisesAgain()

    observer = guarded(Again())
    assert observer is not None
    with (
        pytest.raises(LookupError, match="the work's own"),
        observer.handling("stream", "group", Event(uuid7(), "t", 1)),
    ):
        raise LookupError("the work's own")
    assert caplog.records == []


class _RaisesAgain(AbstractContextManager[None]):
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        assert error is not None
        raise error


class Broken:
    """Raises at whatever it is asked."""

    def __call__(self, record: Record) -> None:
        raise RuntimeError("called")

    def headers(self) -> Mapping[str, str]:
        raise RuntimeError("headers")

    @contextmanager
    def publishing(self, outbox: str, events: Sequence[Event], /) -> Iterator[None]:
        yield
        raise RuntimeError("publishing")

    @contextmanager
    def handling(self, stream: str, group: str, event: Event, /) -> Iterator[None]:
        if stream == "before":
            raise RuntimeError("handling")
        with suppress(ValueError):  # a tracer that swallows the work's error
            yield


def test_an_observer_that_raises_is_logged_once_and_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    guard = guarded(Broken())
    assert guard is not None
    event = Event(uuid7(), "t", 1)
    done = []
    for _ in range(2):
        guard(DIED)
        assert guard.headers() == {}
        with guard.publishing("o", [event]):
            done.append("published")
        with guard.handling("before", "g", event):
            done.append("handled")
        with pytest.raises(ValueError, match="the work's own"), guard.handling("s", "g", event):
            raise ValueError("the work's own")
    assert done == ["published", "handled"] * 2
    assert [entry.args for entry in caplog.records if entry.levelname == "ERROR"] == [
        ("EventDied",),
        ("headers",),
        ("publishing",),
        ("handling",),
    ]


@pytest.mark.parametrize("headers", [{"traceparent": "a\0b"}, {"traceparent": 1}, {1: "x"}, {"x": "\ud800"}])
def test_headers_that_cannot_be_stored_are_not_used(headers: dict[str, str]) -> None:
    class Tracer(Broken):
        def headers(self) -> Mapping[str, str]:
            return headers

    guard = guarded(Tracer())
    assert guard is not None
    assert guard.headers() == {}


def test_one_of_several_that_raises_does_not_keep_it_from_the_others() -> None:
    first, second = Recorder(), Recorder()
    several: Observer = observers(first, Broken(), second)
    several(DIED)
    assert (first.records, second.records) == ([DIED], [DIED])


def test_what_is_no_observer_is_refused() -> None:
    async def awaited(record: Record) -> None:
        pass

    class Awaited:
        async def __call__(self, record: Record) -> None:
            pass

    for wrong in (awaited, Awaited(), "observer"):
        with pytest.raises(TypeError):
            Outbox(MetaData(), observer=wrong)  # type: ignore[arg-type]  # that is the point


OBSERVERS: dict[str, Callable[[], Observer]] = {
    "prometheus": lambda: PrometheusObserver(CollectorRegistry()),
    "opentelemetry": lambda: OpenTelemetryObserver(
        meter_provider=MeterProvider(), tracer_provider=TracerProvider()
    ),
    "opentelemetry without an SDK": OpenTelemetryObserver,
    "logging": LoggingObserver,
    "recording": RecordingObserver,
    "several": lambda: observers(
        RecordingObserver(), OpenTelemetryObserver(tracer_provider=TracerProvider())
    ),
}


@pytest.mark.parametrize("check", OBSERVER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", OBSERVERS)
def test_the_observers_of_oncely_conform(name: str, check: Callable[[Observer], None]) -> None:
    check(OBSERVERS[name]())


def test_an_observer_that_does_not_conform_is_found() -> None:
    def particular(record: Record) -> None:
        if not isinstance(record, EventDied):
            raise LookupError  # noqa: TRY004  it stands for any error

    def known_alone(record: Record) -> None:
        if type(record) not in RECORDS:
            raise LookupError

    class Odd(Broken):
        def __call__(self, record: Record) -> None:
            pass

        def headers(self) -> Mapping[str, str]:
            return {"traceparent": "\0"}

        @contextmanager
        def handling(self, stream: str, group: str, event: Event, /) -> Iterator[None]:
            with suppress(LookupError):
                yield

        @contextmanager
        def publishing(self, outbox: str, events: Sequence[Event], /) -> Iterator[None]:
            yield

    class NoText(Odd):
        def headers(self) -> Mapping[str, Any]:
            return {"sampled": True}

    wrong: tuple[Observer, ...] = (particular, known_alone, Odd(), NoText())
    failed = {
        getattr(observer, "__name__", type(observer).__name__): list(
            filter(None, map(failure_of(observer), OBSERVER_CHECKS))
        )
        for observer in wrong
    }
    assert failed == {
        "particular": ["takes_every_record", "takes_a_record_that_it_does_not_know"],
        "known_alone": ["takes_a_record_that_it_does_not_know"],
        "Odd": ["writes_headers_that_can_be_stored", "lets_errors_pass"],
        "NoText": ["writes_headers_that_can_be_stored", "lets_errors_pass"],
    }


def test_an_observer_that_is_async_is_found() -> None:
    async def awaited(record: Record) -> None:
        pass

    [check, *_] = OBSERVER_CHECKS
    with pytest.raises(AssertionError, match="must not be async"):
        check(awaited)


def failure_of(observer: Observer) -> Callable[[Callable[[Observer], None]], str | None]:
    def name(check: Callable[[Observer], None]) -> str | None:
        try:
            check(observer)
        except AssertionError:
            return check.__name__
        return None

    return name


def test_what_an_observer_asked_may_have_been_cancelled_and_the_work_is_not() -> None:
    asked: Future[None] = Future(loop=new_event_loop())
    asked.cancel()
    observer = guarded(lambda record: asked.result())
    assert observer is not None
    observer(EventDied(outbox="outbox", topic="t", error="E", attempts=1))
    asked.get_loop().close()


def test_of_several_processes_prometheus_shows_the_last_look(tmp_path: Path) -> None:
    look = """
import sys
from datetime import timedelta
from oncely.telemetry import OutboxMeasured
from oncely.telemetry.prometheus import MetricsServer, PrometheusObserver
none = dict.fromkeys(("ready", "deferred", "in_flight", "retrying", "dead"), 0)
PrometheusObserver()(OutboxMeasured(outbox="outbox", lag=timedelta(seconds=int(sys.argv[1])), **none))
"""
    show = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
registry = CollectorRegistry()
MultiProcessCollector(registry)
lines = generate_latest(registry).decode().splitlines()
print(*(line for line in lines if line.startswith("oncely_outbox_lag")))
"""
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    said = [
        subprocess.run(
            [sys.executable, "-c", *words], env=environment, check=True, capture_output=True, text=True
        ).stdout
        for words in ((look, "100"), (look, "0"), (show,))
    ]
    assert said[-1] == 'oncely_outbox_lag_seconds{outbox="outbox"} 0.0\n'
