"""What a supervisor asks over HTTP: whether the process lives, and whether its services are well.

/live    200 as long as the event loop turns. For a liveness probe: a service that fails ends the process,
         and one that waits for its database is not helped by a restart.
/health  200 when every service is healthy, 503 when one waits for something. For people and alerts, and
         for a readiness probe, which lets a rollout wait.

Both answer with {"healthy": …, "services": [{name, alive, healthy, last_success, waits_for}, …]}.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from http import HTTPStatus

from oncely.worker import ServiceHealth, Worker

__all__ = ["HealthServer", "with_health_server"]

_PATIENCE = 5.0
"""Seconds that a client has for its request."""


def with_health_server(worker: Worker, *, host: str, port: int) -> Worker:
    """The worker with one more service, which tells of the others."""

    def others() -> Sequence[ServiceHealth]:
        return [each for each in served.health() if each.name != server.name]

    server = HealthServer(others, host=host, port=port)
    served = Worker(*worker.services, server, grace=worker.grace, close=worker.closing)
    return served


class HealthServer:
    """Answers GET and HEAD, one request a connection, until it is stopped. `port` 0 is any that is free."""

    waits_for: str | None = None

    def __init__(self, health: Callable[[], Sequence[ServiceHealth]], *, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.last_success: datetime | None = None
        """When it last answered, by this machine's clock."""
        self._health = health

    @property
    def name(self) -> str:
        return f"HealthServer {self.host}:{self.port}"

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Listen until `stop` is set. An address that is taken is an OSError."""
        stop = stop if stop is not None else asyncio.Event()
        server = await asyncio.start_server(self._accept, self.host, self.port)
        try:
            await stop.wait()
        finally:
            server.close()  # who is connected still has a moment, but is not waited for

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # A client that is slow, says nonsense or goes away is its own affair.
            with suppress(TimeoutError, OSError, ValueError, EOFError):
                async with asyncio.timeout(_PATIENCE):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    await writer.drain()
                self.last_success = datetime.now(UTC)
        finally:
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        """The response to a request whose first line and headers these are."""
        method, path, _ = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        services = self._health()
        healthy = all(each.healthy for each in services)
        body = json.dumps({"healthy": healthy, "services": [each.to_json() for each in services]}).encode()
        statuses = {
            "/live": HTTPStatus.OK,
            "/health": HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE,
        }
        status = statuses.get(path.partition("?")[0], HTTPStatus.NOT_FOUND)
        if method not in ("GET", "HEAD"):
            status = HTTPStatus.METHOD_NOT_ALLOWED
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        return "\r\n".join((*lines, "", "")).encode() + (b"" if method == "HEAD" else body)
