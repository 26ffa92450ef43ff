"""What the tests of webhooks share: HTTPS endpoints on this machine, and a table that is there.

    async with endpoint() as server:
        webhooks = await make_webhooks(engine)
        await enqueue(webhooks, sessions, server.url("/hook"))
        await worker(webhooks, sessions, server).run_once()
        server.requests[0].headers["webhook-id"]

Every name under example.com is the endpoint's, so that one server plays many.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID

import h11
import trustme
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from oncely.webhooks import (
    Keyring,
    PinnedTransport,
    PrivateAddressesAllowed,
    StandardWebhooks,
    Webhooks,
    WebhookSender,
    WebhookWorker,
)
from tests.outboxes import execute

__all__ = [
    "KEY",
    "SECRET",
    "Answer",
    "Endpoint",
    "Received",
    "Sessions",
    "authority_file",
    "endpoint",
    "enqueue",
    "execute",
    "make_webhooks",
    "pass_time",
    "row_of",
    "rows",
    "sender",
    "trusting",
    "worker",
]

Sessions = async_sessionmaker[AsyncSession]

KEY = bytes(range(32))
SECRET = "whsec_" + "c2VjcmV0IG9mIHRoZSB3ZWJob29rcyBvZiBhY21l"


@dataclass
class Received:
    """A request as the endpoint got it; `headers` by names in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    raw_headers: list[tuple[str, str]]

    @property
    def host(self) -> str:
        return self.headers["host"].split(":")[0]


@dataclass
class Answer:
    status: int = 204
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""


Script = Callable[[Received, asyncio.StreamWriter], Awaitable[Answer | None]]
"""What to answer; None when the script has written, or done, everything itself."""


class Endpoint:
    """A server that keeps what it is sent, and answers by `answer` or by `script`."""

    def __init__(self) -> None:
        self.requests: list[Received] = []
        self.connections = 0
        self.answer = Answer()
        self.script: Script | None = None
        self.port = 0

    def url(self, target: str = "/", host: str = "hooks.example.com") -> str:
        return f"https://{host}:{self.port}{target}"

    def transport(self, **options: Any) -> PinnedTransport:
        """A transport that finds this endpoint under every name and trusts its certificate."""

        async def here(host: str, port: int) -> Sequence[str]:
            return ["127.0.0.1"]

        defaults: dict[str, Any] = {"lookup": here, "ssl_context": trusting(), "allow_private": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivateAddressesAllowed)
            return PinnedTransport(**(defaults | options))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            received = await _receive(reader)
            if received is not None:
                self.requests.append(received)
                answer = await self.script(received, writer) if self.script else self.answer
                if answer is not None:
                    await _reply(writer, answer)
        except (OSError, h11.RemoteProtocolError):
            pass  # the sender went away, which is its right
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@asynccontextmanager
async def endpoint(
    *, names: Sequence[str] = ("*.example.com",), not_after: datetime | None = None
) -> AsyncIterator[Endpoint]:
    """An HTTPS server on this machine whose certificate has these names, and ends then."""
    made = Endpoint()
    running: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(made.serve(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=_certified(*names, not_after=not_after))
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        if running:
            await asyncio.wait(running)
        await server.wait_closed()
        async with asyncio.timeout(5):
            while getattr(server, "_active_count", 0):  # noqa: ASYNC110  Python 3.11 does not wait for them
                await asyncio.sleep(0.001)


@cache
def trusting() -> ssl.SSLContext:
    """A context that trusts the endpoints' authority and no other."""
    context = ssl.create_default_context()
    _authority().configure_trust(context)
    return context


def sender(server: Endpoint, *secrets: str, **options: Any) -> WebhookSender:
    return WebhookSender(StandardWebhooks(*(secrets or (SECRET,))), transport=server.transport(**options))


def worker(webhooks: Webhooks, sessions: Sessions, server: Endpoint, **options: Any) -> WebhookWorker:
    """A worker with a fixed sender, unless the options say otherwise."""
    if "resolver" not in options:
        options.setdefault("sender", sender(server))
    return WebhookWorker(webhooks, sessions, **options)


async def make_webhooks(
    engine: AsyncEngine, *, keyring: Keyring | None = None, metadata: MetaData | None = None, **options: Any
) -> Webhooks:
    """Webhooks with their table made."""
    metadata = metadata if metadata is not None else MetaData()
    webhooks = Webhooks(metadata, keyring=keyring or Keyring({"one": KEY}, write="one"), **options)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    return webhooks


async def enqueue(
    webhooks: Webhooks, sessions: Sessions, url: str, body: bytes = b'{"ok":true}', **fields: Any
) -> UUID:
    """One committed webhook."""
    fields = {"key": "k", "caller": "shop", "type": "order.paid"} | fields
    async with sessions.begin() as session:
        return await webhooks.enqueue(session, url, body, **fields)


async def rows(engine: AsyncEngine, columns: str = "state, attempts, last_error") -> list[tuple[Any, ...]]:
    """These columns of every webhook, oldest first."""
    async with engine.connect() as connection:
        found = await connection.execute(text(f"SELECT {columns} FROM webhooks ORDER BY id"))
        return [tuple(row) for row in found]


async def row_of(engine: AsyncEngine, columns: str = "state, attempts, last_error") -> tuple[Any, ...]:
    """These columns of the only webhook."""
    [row] = await rows(engine, columns)
    return row


async def pass_time(engine: AsyncEngine, by: timedelta) -> None:
    """Every stored time goes back by so much: to the webhooks, time has passed."""
    times = ("created_at", "due_at", "retry_until", "finished_at")
    earlier = ", ".join(f"{time} = {time} - CAST(:by AS interval)" for time in times)
    await execute(engine, f"UPDATE webhooks SET {earlier}", by=by)


def authority_file(folder: Path) -> Path:
    """The endpoints' authority as a file, for another process that shall trust it."""
    path = folder / "authority.pem"
    _authority().cert_pem.write_to_path(path)
    return path


@cache
def _authority() -> trustme.CA:
    return trustme.CA()


@cache
def _certified(*names: str, not_after: datetime | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    not_before = None if not_after is None else not_after - timedelta(days=1)
    made = _authority().issue_cert(*names, not_before=not_before, not_after=not_after)
    made.configure_cert(context)
    return context


async def _receive(reader: asyncio.StreamReader) -> Received | None:
    connection = h11.Connection(h11.SERVER)
    request: h11.Request | None = None
    body = b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(65_536)
            if not data and request is None:
                return None
            connection.receive_data(data)
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        else:
            break
    assert request is not None
    pairs = [(name.decode().lower(), value.decode()) for name, value in request.headers]
    return Received(request.method.decode(), request.target.decode(), dict(pairs), body, pairs)


async def _reply(writer: asyncio.StreamWriter, answer: Answer) -> None:
    lines = [f"HTTP/1.1 {answer.status} .", *(f"{name}: {value}" for name, value in answer.headers)]
    if answer.status not in (204, 304):
        lines.append(f"content-length: {len(answer.body)}")
    writer.write("\r\n".join([*lines, "", ""]).encode() + answer.body)
    await writer.drain()
    writer.close()
    await writer.wait_closed()
