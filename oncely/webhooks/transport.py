"""The way out: an httpx transport that connects to public addresses only, by HTTPS, within a deadline.

    look up once ─▶ check every address ─▶ connect to one of them ─▶ TLS for the name ─▶ one request

Each request has a connection of its own. That is dearer than keeping them, and it is why no request can
ride on the connection of another name that happens to be at the same address. There are no redirects, no
proxies, no cookies and no decoding here, and nothing is logged: httpx's client logs whole addresses, its
engine what endpoints answer.

It can be used by an `httpx.AsyncClient` too, to look at an endpoint under the same rules before it is
entered: `httpx.AsyncClient(transport=PinnedTransport(), trust_env=False)`.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TypeAlias

import h11
import httpx

from oncely.arguments import check_duration
from oncely.errors import AddressRefused
from oncely.webhooks.addresses import Lookup, SystemLookup, is_public

__all__ = ["PinnedConnection", "PinnedTransport", "PrivateAddressesAllowed"]

_log = logging.getLogger(__name__)


class PrivateAddressesAllowed(UserWarning):
    """A transport was made that connects to private addresses: tests may, nobody else."""


class PinnedTransport(httpx.AsyncBaseTransport):
    """Connects to the public address of an HTTPS host.

    `deadline` is for all of it, from the look-up to the last byte of the answer. `ssl_context` verifies
    the endpoints; without one they are checked against certifi's authorities. `lookup` replaces the
    system's resolver.

    `allow_private=True` is for tests, whose endpoints are on this machine: it warns, every time.
    """

    def __init__(
        self,
        *,
        deadline: timedelta = timedelta(seconds=15),
        ssl_context: ssl.SSLContext | None = None,
        lookup: Lookup | None = None,
        allow_private: bool = False,
    ) -> None:
        check_duration(deadline, "deadline")
        if allow_private:
            warnings.warn(_LOUD, PrivateAddressesAllowed, stacklevel=2)
            _log.warning(_LOUD)
        self.deadline = deadline
        self.allow_private = allow_private
        self._ssl_context = ssl_context or httpx.create_ssl_context(trust_env=False)
        self._lookup = lookup or SystemLookup()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Connect and send one request. Raises AddressRefused and httpx's errors."""
        if request.url.scheme != "https":
            raise httpx.UnsupportedProtocol("only https is spoken here", request=request)
        host = request.url.raw_host.decode("ascii")
        connection = await self._open(host, request.url.port or 443)
        try:
            return await connection.handle_async_request(request)
        except BaseException:
            await connection.aclose()
            raise

    @asynccontextmanager
    async def connect(self, host: str, port: int) -> AsyncIterator[PinnedConnection]:
        """A connection that stands, for one request; closed at the end of the block."""
        connection = await self._open(host, port)
        try:
            yield connection
        finally:
            await connection.aclose()

    async def _open(self, host: str, port: int) -> PinnedConnection:
        ends_at = asyncio.get_running_loop().time() + self.deadline.total_seconds()
        try:
            async with asyncio.timeout_at(ends_at):
                addresses = await self._resolve(host, port)
                reader, writer = await self._connect(host, port, addresses, ends_at)
        except TimeoutError as error:
            raise httpx.ConnectTimeout("the deadline passed before there was a connection") from error
        except OSError as error:
            raise httpx.ConnectError("no connection") from error
        return PinnedConnection(reader, writer, ends_at)

    async def _resolve(self, host: str, port: int) -> list[str]:
        """The host's addresses, all of them checked: one that is not public spoils the others."""
        addresses = list(await self._lookup(host, port))
        if not addresses:
            raise OSError("the name has no address")
        if not self.allow_private and not all(map(is_public, addresses)):
            raise AddressRefused("the host is at an address that is not public")
        return addresses[:_MOST_ADDRESSES]

    async def _connect(self, host: str, port: int, addresses: list[str], ends_at: float) -> _Streams:
        """To the first address that answers; each gets its part of the time that is left."""
        loop = asyncio.get_running_loop()
        for left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            part = (ends_at - loop.time()) / left
            try:
                async with asyncio.timeout(part):
                    return await asyncio.open_connection(
                        address,
                        port,
                        ssl=self._ssl_context,
                        server_hostname=host,
                        ssl_handshake_timeout=max(part, 0.001),
                        ssl_shutdown_timeout=_GOODBYE,
                        limit=_CHUNK,
                    )
            except OSError:
                if left == 1:
                    raise
        raise AssertionError("there was no address")  # pragma: no cover  there is one


class PinnedConnection(httpx.AsyncBaseTransport):
    """A connection to an address that was checked. It takes one request; `ends_at` is its deadline."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ends_at: float) -> None:
        self._reader = reader
        self._writer = writer
        self._ends_at = ends_at
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LARGEST_HEAD)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request and wait for the answer's head; its body comes as it is read, undecoded.

        `request.extensions["target"]` is the path and query as they are sent, where the URL's own
        spelling must be kept. Raises httpx's errors.
        """
        body = await request.aread()
        target = request.extensions.get("target", request.url.raw_path)
        headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"connection"]
        try:
            head = self._http.send(
                h11.Request(
                    method=request.method, target=target, headers=[*headers, (b"Connection", b"close")]
                )
            )
            data = self._http.send(h11.Data(data=body)) if body else b""
            end = self._http.send(h11.EndOfMessage())
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError("the request cannot be sent") from error
        if asyncio.get_running_loop().time() >= self._ends_at:
            raise httpx.WriteTimeout("the deadline passed before the request")
        # Not waited for: an endpoint may answer before it has read everything.
        self._writer.write(b"".join(part for part in (head, data, end) if part))
        event, before = await self.next_event(), 0
        while isinstance(event, h11.InformationalResponse) and before < _MOST_INTERIM_ANSWERS:
            event, before = await self.next_event(), before + 1
        if not isinstance(event, h11.Response):
            raise httpx.RemoteProtocolError("there was no answer")
        return httpx.Response(event.status_code, headers=event.headers.raw_items(), stream=_Body(self))

    async def next_event(self) -> h11.Event:
        """What the endpoint says next. Raises httpx's errors, ReadTimeout when the deadline passes."""
        try:
            async with asyncio.timeout_at(self._ends_at):
                while (event := self._http.next_event()) is h11.NEED_DATA:
                    self._http.receive_data(await self._reader.read(_CHUNK))
        except TimeoutError as error:
            raise httpx.ReadTimeout("the deadline passed before the end of the answer") from error
        except OSError as error:
            raise httpx.ReadError("the connection broke") from error
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError("the answer is not HTTP") from error
        if isinstance(event, type):  # PAUSED: it wants to speak something else
            raise httpx.RemoteProtocolError("the answer is not HTTP")
        return event

    async def aclose(self) -> None:
        """Close it, politely if the other end does the same at once."""
        unread = self._http.their_state not in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)
        if unread or self._writer.transport.get_write_buffer_size():
            self._writer.transport.abort()  # something is on its way that nobody will read
        self._writer.close()
        try:
            async with asyncio.timeout(2 * _GOODBYE):
                await self._writer.wait_closed()
        except OSError:  # TimeoutError is one: it has had its chance
            self._writer.transport.abort()


class _Body(httpx.AsyncByteStream):
    """The bytes of an answer, as the endpoint sends them."""

    def __init__(self, connection: PinnedConnection) -> None:
        self._connection = connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._connection.next_event(), h11.Data):
            yield bytes(event.data)

    async def aclose(self) -> None:
        await self._connection.aclose()


_Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_LOUD = "private addresses are allowed: a webhook may reach into this network. For tests only"
_MOST_ADDRESSES = 4
_LARGEST_HEAD = 32_768
_MOST_INTERIM_ANSWERS = 16
_CHUNK = 16_384
_GOODBYE = 0.5
"""Seconds."""
