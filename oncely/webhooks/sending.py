"""Sending: one attempt, signed with one set of credentials."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol
from uuid import UUID

import httpx

from oncely.arguments import check_callable, check_kind
from oncely.webhooks.destination import Destination
from oncely.webhooks.outcome import retry_after
from oncely.webhooks.sealing import Content
from oncely.webhooks.signing import Message, Signer
from oncely.webhooks.transport import PinnedTransport

__all__ = ["GOODBYE", "Attempt", "Reply", "WebhookSender"]


GOODBYE = timedelta(seconds=2)
"""The most time that closing a connection takes, after everything else."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What an endpoint answered: the status, and for how long it wants to be left alone."""

    status: int
    retry_after: timedelta | None = None


class Attempt(Protocol):
    """What the sender needs of whoever makes the attempt, in the order of need."""

    def now(self) -> datetime:
        """The time that is signed."""
        ...

    async def confirm(self) -> object:
        """All that takes time is done, and the next thing is the request's first byte. Raises to stop it."""
        ...

    def answered(self, reply: Reply) -> object:
        """This is the answer, whatever becomes of the connection now."""
        ...


class WebhookSender:
    """Sends webhooks that `signer` signs. Senders that sign differently may share a transport."""

    def __init__(self, signer: Signer, *, transport: PinnedTransport | None = None) -> None:
        check_callable(getattr(signer, "sign", None), "signer.sign")
        if transport is not None:
            check_kind(transport, PinnedTransport, "transport")
        self.signer = signer
        self.transport = transport or PinnedTransport()

    @property
    def deadline(self) -> timedelta:
        """The most time that `send` takes, but for closing the connection."""
        return self.transport.deadline

    async def send(self, webhook_id: UUID, content: Content, attempt: Attempt) -> Reply:
        """Connect, sign, ask for the last word, send.

        Raises AddressRefused, httpx's errors, and what the signer and the attempt raise.
        """
        destination = Destination.parse(content.url)
        async with self.transport.connect(destination.host, destination.port) as connection:
            message = Message(webhook_id, attempt.now(), content.url, content.headers, content.body)
            request = httpx.Request(
                "POST",
                content.url,
                headers=[
                    ("Host", destination.authority),  # httpx would decode it, which not every name bears
                    *_defaults(content),
                    *content.headers,
                    *self.signer.sign(message),
                ],
                content=content.body,
                extensions={"target": destination.target.encode()},
            )
            await attempt.confirm()
            response = await connection.handle_async_request(request)
            reply = Reply(response.status_code, retry_after(response.headers))
            attempt.answered(reply)
            await _read_some(response)
        return reply


_PATIENCE = 1.0
"""Seconds for the answer's body, of which nothing is kept."""

_ENOUGH = 16_384
_LEAST = 256
"""What a chunk counts at least, in bytes: a million tiny ones are a million times the work."""


def _defaults(content: Content) -> list[tuple[str, str]]:
    """What an endpoint may count on. Answers are never decoded, so none should be compressed."""
    given = {name.lower() for name, _ in content.headers}
    defaults = [("Accept", "*/*"), ("Accept-Encoding", "identity"), ("User-Agent", "oncely-webhooks")]
    return [(name, value) for name, value in defaults if name.lower() not in given]


async def _read_some(response: httpx.Response) -> None:
    """Let the endpoint say its piece, up to a limit: some fail when nobody listens to them."""
    assert isinstance(response.stream, httpx.AsyncByteStream)  # noqa: S101  as the transport makes it
    size = 0
    # However this ends: the status has been said, and that is the answer.
    with contextlib.suppress(TimeoutError, httpx.TransportError):
        async with asyncio.timeout(_PATIENCE):
            async for chunk in response.stream:
                size += max(len(chunk), _LEAST)
                if size >= _ENOUGH:
                    break
