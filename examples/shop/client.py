"""Customers on a bad line: every third connection is cut after the request was sent.

Whether the order was placed then, the customer cannot know. So the same request is sent again, with
the same key; and as some are impatient, two or three copies of it are on their way at once.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Answer", "Client", "Customer"]


@dataclass(frozen=True)
class Answer:
    """What the shop said."""

    status: int
    body: str
    replayed: bool


@dataclass
class Customer:
    """Wants a seat, and keeps every answer that arrives. `copies` are sent at once."""

    name: str
    seat: str
    copies: int
    key: str = field(default_factory=lambda: str(uuid.uuid4()))
    answers: list[Answer] = field(default_factory=list)


class Client:
    """Sends the customers' requests to a Unix socket, at most `at_once` together, and counts them.

    `fresh_keys` gives each request a key of its own: what clients do that have no such promise.
    """

    def __init__(self, socket_path: Path, *, at_once: int = 30, fresh_keys: bool = False) -> None:
        self.requests = 0
        self.cut = 0
        self.put_off = 0
        self._socket_path = socket_path
        self._line = asyncio.Semaphore(at_once)
        self._fresh_keys = fresh_keys

    async def order(self, customer: Customer) -> None:
        """Sends all copies of the customer's order, each until it is answered."""
        async with asyncio.TaskGroup() as copies:
            for _ in range(customer.copies):
                copies.create_task(self._until_answered(customer))

    async def _until_answered(self, customer: Customer) -> None:
        while True:
            async with self._line:
                response = await self._send(customer)
            if response is None:
                self.cut += 1
            elif "retry-after" in response.headers:
                self.put_off += 1
                await asyncio.sleep(float(response.headers["retry-after"]))
            else:
                replayed = "idempotency-replayed" in response.headers
                customer.answers.append(Answer(response.status, response.body, replayed))
                return

    async def _send(self, customer: Customer) -> Response | None:
        """The response; None when the connection was cut before it arrived."""
        self.requests += 1
        cut = self.requests % 3 == 0
        key = str(uuid.uuid4()) if self._fresh_keys else customer.key
        reader, writer = await asyncio.open_unix_connection(self._socket_path)
        try:
            writer.write(to_http(customer, key))
            await writer.drain()
            return None if cut else from_http(await reader.read())
        finally:
            writer.transport.abort()


@dataclass(frozen=True)
class Response:
    """What came over the wire. Names of headers are in small letters."""

    status: int
    headers: dict[str, str]
    body: str


def to_http(customer: Customer, key: str) -> bytes:
    """A customer's order in HTTP."""
    body = json.dumps({"seat": customer.seat})
    lines = (
        "POST /orders HTTP/1.1",
        "Host: shop",
        f"Idempotency-Key: {key}",
        f"X-Customer: {customer.name}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        "",
        body,
    )
    return "\r\n".join(lines).encode()


def from_http(received: bytes) -> Response:
    """A response in HTTP whose end is that of the connection."""
    head, _, body = received.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Response(int(first.split()[1]), headers, body)
