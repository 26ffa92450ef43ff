"""Records as metrics of Prometheus: `pip install 'oncely[prometheus]'`.

observer = PrometheusObserver()
start_http_server(9000)                  of prometheus_client, or its ASGI application
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from oncely.telemetry.metrics import METRICS, Metric
from oncely.telemetry.records import Record

__all__ = ["PrometheusObserver"]


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
    names = tuple(name for name in metric.labels if name not in without)
    name, about, values, amount = metric.prometheus, metric.about, metric.label_values, metric.amount
    if metric.kind == "counter":
        counter = Counter(name, about, names, registry=registry)
        return lambda record: counter.labels(*values(record, names)).inc(amount(record))
    if metric.kind == "gauge":
        gauge = Gauge(name, about, names, registry=registry)
        return lambda record: gauge.labels(*values(record, names)).set(amount(record))
    histogram = Histogram(name, about, names, registry=registry, buckets=metric.buckets)
    return lambda record: histogram.labels(*values(record, names)).observe(amount(record))
