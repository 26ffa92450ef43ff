"""The answers that a supervisor gets over HTTP, and the clients that get none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime

import httpx
import pytest

from oncely import Worker
from oncely.cli.health import with_health_server

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


class Mailer:
    """A service that does nothing."""

    name = "mailer"
    last_success = NOON

    def __init__(self) -> None:
        self.waits_for: str | None = None

    async def run(self, stop: asyncio.Event | None = None) -> None:
        assert stop is not None
        await stop.wait()


@asynccontextmanager
async def serving(service: Mailer) -> AsyncIterator[httpx.AsyncClient]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stop = asyncio.Event()
    worker = with_health_server(Worker(service), host="127.0.0.1", port=port)
    async with (
        asyncio.TaskGroup() as group,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        group.create_task(worker.run(stop))
        while True:
            try:
                await client.get("/live")
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.005)
        yield client
        stop.set()


def said(*, healthy: bool, waits_for: str | None) -> dict[str, object]:
    return {
        "healthy": healthy,
        "services": [
            {
                "name": "mailer",
                "alive": True,
                "healthy": healthy,
                "last_success": "2026-01-02T12:00:00+00:00",
                "waits_for": waits_for,
            }
        ],
    }


async def test_health_is_200_until_a_service_waits_and_live_is_200_all_the_time() -> None:
    service = Mailer()
    async with serving(service) as client:
        for path in ("/health", "/live"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()) == (200, said(healthy=True, waits_for=None))
        service.waits_for = "database"
        for path, status in (("/health", 503), ("/health?verbose", 503), ("/live", 200)):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()) == (status, said(healthy=False, waits_for="database"))


async def test_a_head_request_gets_the_status_alone() -> None:
    async with serving(Mailer()) as client:
        answer = await client.head("/health")
        assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/", 404), ("POST", "/health", 405)])
async def test_anything_else_is_refused(method: str, path: str, status: int) -> None:
    async with serving(Mailer()) as client:
        assert (await client.request(method, path)).status_code == status


@pytest.mark.parametrize("sent", [b"", b"nonsense\r\n\r\n", b"GET /live HTTP/1.1\r\n", b"x" * 100_000])
async def test_a_client_that_says_nonsense_or_goes_away_harms_nobody(sent: bytes) -> None:
    async with serving(Mailer()) as client:
        port = client.base_url.port
        assert port is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        writer.write_eof()
        with suppress(ConnectionResetError):  # it may be hung up on while it still speaks
            assert await reader.read() == b""
        writer.close()
        assert (await client.get("/live")).status_code == 200


async def test_a_stop_does_not_wait_for_a_client_that_says_nothing() -> None:
    async with asyncio.timeout(4), serving(Mailer()) as client:
        port = client.base_url.port
        assert port is not None
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
