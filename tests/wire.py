"""A wire between a client and a server that can be cut, fall silent, and lose a reply.

    async with Wire.to_postgres(database.url) as wire:
        engine = create_async_engine(wire.url)
        ...
        wire.cut()

It is a proxy on a Unix socket of its own. Cut: both ends see the connection close. Silent: both ends
see nothing at all, as when a machine behind the network is gone (a half-open connection).
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import make_url

__all__ = ["Wire"]


class Wire:
    """`url` reaches the server through this wire."""

    def __init__(self, url: str, target: Path | tuple[str, int]) -> None:
        self.url = url
        self.connections = 0
        """How many connections were made through it so far."""
        self._target = target
        self._silent = False
        self._lines: set[_Line] = set()

    @classmethod
    @asynccontextmanager
    async def to_postgres(cls, url: str) -> AsyncIterator[Wire]:
        """A wire to the PostgreSQL server of a SQLAlchemy URL."""
        given = make_url(url)
        query = dict(given.query)
        host = query.pop("host", None)
        port = given.port or 5432
        target: Path | tuple[str, int] = (given.host or "localhost", port)
        if isinstance(host, str):
            target = Path(host) / f".s.PGSQL.{port}"
        with tempfile.TemporaryDirectory(prefix="wire-") as folder:
            through = given.set(host=None, port=None, query=query | {"host": folder})
            wire = cls(through.render_as_string(hide_password=False), target)
            async with wire._listening(Path(folder) / ".s.PGSQL.5432"):
                yield wire

    @classmethod
    @asynccontextmanager
    async def to_socket(cls, path: Path) -> AsyncIterator[Wire]:
        """A wire to a Redis-compatible server on a Unix socket."""
        with tempfile.TemporaryDirectory(prefix="wire-") as folder:
            own = Path(folder) / "socket"
            wire = cls(f"unix://{own}", path)
            async with wire._listening(own):
                yield wire

    def cut(self) -> None:
        """Close every connection, in the middle of whatever it carries. New ones may be made."""
        for line in list(self._lines):
            line.cut()

    def lead_to(self, target: Path) -> None:
        """New connections reach another server; those that are there stay where they are."""
        self._target = target

    def silence(self) -> None:
        """From now on nothing gets through, on connections that are there and on new ones."""
        self._silent = True
        for line in self._lines:
            line.silent = True

    def restore(self) -> None:
        """New connections work again; those that fell silent stay so for ever."""
        self._silent = False

    def lose_next_reply(self) -> None:
        """The server gets what is sent next, and its reply is lost: the connection is cut instead."""
        self.lose_reply_to(b"")

    def lose_reply_to(self, pattern: bytes) -> None:
        """The same for the next message in which this regular expression is found, on what is connected."""
        for line in self._lines:
            line.losing = pattern

    @asynccontextmanager
    async def _listening(self, path: Path) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._accept, path)
        try:
            yield
        finally:
            server.close()
            self.cut()
            await asyncio.gather(*(line.ended.wait() for line in self._lines))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        line = _Line(writer, silent=self._silent)
        self._lines.add(line)
        try:
            await line.carry(reader, self._target)
        finally:
            line.ended.set()
            self._lines.discard(line)


class _Line:
    """One connection: what the client sends goes to the server, and back."""

    def __init__(self, client: asyncio.StreamWriter, *, silent: bool) -> None:
        self.silent = silent
        self.losing: bytes | None = None
        self._lost = False
        self.ended = asyncio.Event()
        self._closed = asyncio.Event()
        self._writers = [client]

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._closed.set()

    async def carry(self, from_client: asyncio.StreamReader, target: Path | tuple[str, int]) -> None:
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._closed.wait())]
        try:
            if isinstance(target, Path):
                from_server, to_server = await asyncio.open_unix_connection(target)
            else:
                from_server, to_server = await asyncio.open_connection(*target)
            self._writers.append(to_server)
            tasks.append(asyncio.create_task(self._pump(from_client, to_server, reply=False)))
            tasks.append(asyncio.create_task(self._pump(from_server, self._writers[0], reply=True)))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # no server there: the client sees its connection close
        finally:
            self.cut()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, reply: bool) -> None:
        try:
            while data := await source.read(65_536):
                if reply and self._lost:
                    return
                if not reply and self.losing is not None and re.search(self.losing, data):
                    self._lost = True
                if not self.silent:
                    sink.write(data)
                    await sink.drain()
            # A silent end is not heard either.
            if self.silent:
                await self._closed.wait()
        except OSError:
            return
