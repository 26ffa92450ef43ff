"""Records as metrics of Prometheus: `pip install 'oncely[prometheus]'`.

observer = PrometheusObserver()
worker = Worker(relay, MetricsServer(9000))
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import TypeVar

from oncely.arguments import check_count
from oncely.extras import needs

needs("prometheus", "prometheus_client")

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from oncely.telemetry.metrics import METRICS, Metric, check_labels
from oncely.telemetry.records import Record

__all__ = ["MetricsServer", "PrometheusObserver"]

_M = TypeVar("_M", Counter, Gauge, Histogram)


class PrometheusObserver:
    """Keeps the metrics of `oncely.telemetry` in `registry`. One registry takes one observer: share it.

    A label's values must be few, since each is a series for ever. Where an application makes topics or
    types without end, name those labels in `without`: `without={"topic"}`.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY, *, without: Collection[str] = ()) -> None:
        check_labels(without)
        self._notes: dict[type, list[Callable[[Record], None]]] = {}
        for metric in METRICS:
            self._notes.setdefault(metric.record, []).append(_note(metric, registry, without))

    def __call__(self, record: Record) -> None:
        for note in self._notes.get(type(record), ()):
            note(record)


class MetricsServer:
    """A service of a Worker that shows `registry` at http://host:port/metrics while the worker runs.

    It listens when it runs, not when it is made, so that commands which import the worker's module do not.
    The answers come from a thread. Raises OSError when the port is taken, which ends the worker.
    """

    waits_for = None

    def __init__(self, port: int, *, host: str = "0.0.0.0", registry: CollectorRegistry = REGISTRY) -> None:  # noqa: S104  to be scraped
        check_count(port, "port", least=0, most=65_535)
        self.port = port
        self.host = host
        self.registry = registry
        self.last_success: datetime | None = None
        """When it began to listen, by this machine's clock."""

    @property
    def name(self) -> str:
        """What a worker's log and health call it."""
        return f"MetricsServer {self.host}:{self.port}"

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Answer until `stop` is set or the task is cancelled."""
        server, thread = start_http_server(self.port, self.host, self.registry)
        self.last_success = datetime.now(UTC)
        try:
            await (stop if stop is not None else asyncio.Event()).wait()
        finally:
            # In a thread: it waits for the server's loop, which looks twice a second.
            await asyncio.to_thread(server.shutdown)
            server.server_close()
            thread.join()


def _note(metric: Metric, registry: CollectorRegistry, without: Collection[str]) -> Callable[[Record], None]:
    """What enters a record into the metric."""
    names = [label for label in metric.labels if label not in without]
    given = (metric.prometheus, metric.about, names)
    enter: Callable[[Record], Callable[[float], None]]
    if metric.kind == "counter":
        counter = Counter(*given, registry=registry)
        enter = metric.by_labels(lambda labels: _series(counter, labels).inc, without=without)
    elif metric.kind == "gauge":
        # Of several processes the last look counts: those that looked before have seen what is no more.
        gauge = Gauge(*given, registry=registry, multiprocess_mode="mostrecent")
        enter = metric.by_labels(lambda labels: _series(gauge, labels).set, without=without)
    else:
        histogram = Histogram(*given, registry=registry, buckets=metric.buckets)
        enter = metric.by_labels(lambda labels: _series(histogram, labels).observe, without=without)
    return lambda record: enter(record)(metric.amount(record))


def _series(metric: _M, labels: dict[str, str]) -> _M:
    return metric.labels(**labels) if labels else metric
