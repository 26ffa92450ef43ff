"""The metrics of a worker, over HTTP."""

from __future__ import annotations

import asyncio
import errno
import socket
from datetime import timedelta

import httpx
import pytest
from prometheus_client import CollectorRegistry

from oncely import Worker
from oncely.telemetry import RowsPruned
from oncely.telemetry.prometheus import MetricsServer, PrometheusObserver
from tests.waiting import until


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port: int = asked.getsockname()[1]
        return port


async def test_a_worker_shows_its_metrics_while_it_runs_and_frees_the_port() -> None:
    registry = CollectorRegistry()
    PrometheusObserver(registry)(RowsPruned(table="outbox", count=3, duration=timedelta(seconds=1)))
    server = MetricsServer(free_port(), host="127.0.0.1", registry=registry)
    stop = asyncio.Event()
    working = asyncio.create_task(Worker(server).run(stop))
    await until(lambda: server.last_success is not None)
    async with httpx.AsyncClient() as client:
        shown = await client.get(f"http://127.0.0.1:{server.port}/metrics")
    stop.set()
    await working
    assert 'oncely_rows_pruned_total{table="outbox"} 3.0' in shown.text.splitlines()
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", server.port)) == errno.ECONNREFUSED


async def test_a_port_that_is_taken_ends_the_worker() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            await Worker(MetricsServer(taken.getsockname()[1], host="127.0.0.1")).run()


async def test_it_listens_to_nothing_before_it_runs() -> None:
    port = free_port()
    MetricsServer(port, host="127.0.0.1")
    with socket.socket() as asked:
        assert asked.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED
