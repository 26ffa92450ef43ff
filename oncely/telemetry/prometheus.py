"""Records as metrics of Prometheus: `pip install 'oncely[prometheus]'`.

observer = PrometheusObserver()
start_http_server(9000)                  of prometheus_client, or its ASGI application
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

from oncely.extras import needs

needs("prometheus", "prometheus_client")

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from oncely.telemetry.metrics import METRICS, Metric
from oncely.telemetry.records import Record

__all__ = ["PrometheusObserver"]

_M = TypeVar("_M", Counter, Gauge, Histogram)


class PrometheusObserver:
    """Keeps the metrics of `oncely.telemetry` in `registry`. One registry takes one observer: share it.

    A label's values must be few, since each is a series for ever. Where an application makes topics or
    types without end, name those labels in `without`: `without={"topic"}`.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY, *, without: Collection[str] = ()) -> None:
        self._notes: dict[type, list[Callable[[Record], None]]] = {}
        for metric in METRICS:
            self._notes.setdefault(metric.record, []).append(_note(metric, registry, without))

    def __call__(self, record: Record) -> None:
        for note in self._notes.get(type(record), ()):
            note(record)


def _note(metric: Metric, registry: CollectorRegistry, without: Collection[str]) -> Callable[[Record], None]:
    """What enters a record into the metric."""
    names = [label for label in metric.labels if label not in without]
    given = (metric.prometheus, metric.about, names)
    enter: Callable[[Record], Callable[[float], None]]
    if metric.kind == "counter":
        counter = Counter(*given, registry=registry)
        enter = metric.by_labels(lambda labels: _series(counter, labels).inc, without=without)
    elif metric.kind == "gauge":
        gauge = Gauge(*given, registry=registry)
        enter = metric.by_labels(lambda labels: _series(gauge, labels).set, without=without)
    else:
        histogram = Histogram(*given, registry=registry, buckets=metric.buckets)
        enter = metric.by_labels(lambda labels: _series(histogram, labels).observe, without=without)
    return lambda record: enter(record)(metric.amount(record))


def _series(metric: _M, labels: dict[str, str]) -> _M:
    return metric.labels(**labels) if labels else metric
