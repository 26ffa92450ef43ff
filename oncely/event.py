"""The thing that travels.

`Event` is what relays hand to publishers and consumers hand to handlers. `NewEvent` is what an
application emits.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID

from oncely.storable import decode_json, encode_json

if sys.version_info >= (3, 14):
    from uuid import uuid7
else:
    from uuid_utils.compat import uuid7

__all__ = ["Event", "Handler", "NewEvent", "Publisher", "uuid7"]

_UNREAD = object()


class Event:
    """An event on its way out of the outbox or into a handler.

    `id` is the same on every delivery: consumers recognise a duplicate by it. `payload` is decoded
    when it is first read; `payload_json` is the stored text, for whoever passes it on. `key` names
    what must stay in order. `created_at` is the emitting transaction's time by the database's
    clock. `attempt` counts deliveries from 1.
    """

    __slots__ = (
        "_headers",
        "_headers_json",
        "_payload",
        "_payload_json",
        "attempt",
        "created_at",
        "id",
        "key",
        "topic",
    )

    id: UUID
    topic: str
    key: str | None
    created_at: datetime | None
    attempt: int
    _payload: object
    _payload_json: str
    _headers: Mapping[str, str] | None
    _headers_json: str | None

    def __init__(
        self,
        id: UUID,  # noqa: A002  the field's name in the table and on the wire
        topic: str,
        payload: object,
        headers: Mapping[str, str] | None = None,
        key: str | None = None,
        created_at: datetime | None = None,
        attempt: int = 1,
    ) -> None:
        self.id = id
        self.topic = topic
        self.key = key
        self.created_at = created_at
        self.attempt = attempt
        self._payload = payload
        self._headers = headers

    @classmethod
    def from_json(
        cls,
        id: UUID,  # noqa: A002
        topic: str,
        payload_json: str,
        headers_json: str | None = None,
        key: str | None = None,
        created_at: datetime | None = None,
        attempt: int = 1,
        payload: object = _UNREAD,
    ) -> Event:
        """An event whose payload and headers are still text; they are decoded when they are first read.

        `payload` is for a caller who has decoded it already.
        """
        event = cls.__new__(cls)
        event.id = id
        event.topic = topic
        event.key = key
        event.created_at = created_at
        event.attempt = attempt
        event._payload_json = payload_json
        event._headers_json = headers_json
        if payload is not _UNREAD:
            event._payload = payload
        return event

    @classmethod
    def from_rows(cls, rows: Iterable[Any]) -> list[Event]:
        """Such events by the batch. A row has id, topic, payload, headers, key, time, attempt and place."""
        new, events = cls.__new__, []
        for row in rows:  # not a call for each: this is a good part of what a relay does
            event = new(cls)
            (
                event.id,
                event.topic,
                event._payload_json,
                event._headers_json,
                event.key,
                event.created_at,
                event.attempt,
                _,
            ) = row
            events.append(event)
        return events

    # Of each value and its text, the one that was not given is not set until it is asked for.

    @property
    def payload(self) -> Any:
        """The payload as Python values. Raises ValueError when the stored text is not JSON."""
        try:
            return self._payload
        except AttributeError:
            self._payload = decode_json(self._payload_json)
            return self._payload

    @property
    def payload_json(self) -> str:
        """The payload as JSON text, as it was stored."""
        try:
            return self._payload_json
        except AttributeError:
            self._payload_json = encode_json(self._payload)
            return self._payload_json

    @property
    def headers(self) -> Mapping[str, str] | None:
        """The headers given to emit, or None."""
        try:
            return self._headers
        except AttributeError:
            self._headers = None if self._headers_json is None else decode_json(self._headers_json)
            return self._headers

    @property
    def headers_json(self) -> str | None:
        """The headers as JSON text, or None."""
        try:
            return self._headers_json
        except AttributeError:
            self._headers_json = None if self._headers is None else encode_json(self._headers)
            return self._headers_json

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Event):
            return NotImplemented
        return self._facts() == other._facts()

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        # Without the payload: a repr ends up in logs.
        return f"Event(id={self.id}, topic={self.topic!r}, key={self.key!r}, attempt={self.attempt})"

    def _facts(self) -> tuple[object, ...]:
        return (
            self.id,
            self.topic,
            self.key,
            self.created_at,
            self.attempt,
            self.headers,
            self.payload,
        )


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event to emit: see `Outbox.emit` for what each field means."""

    topic: str
    payload: object
    key: str | None = None
    headers: Mapping[str, str] | None = None
    delay: timedelta | None = None
    dedup_key: str | None = None


Publisher: TypeAlias = Callable[[Sequence[Event]], Awaitable[object]]
"""Sends a batch, in order. Returning means that all of it was accepted.

It raises PublishFailed when it sent a part, PublisherUnavailable (or ConnectionError, OSError,
TimeoutError) when the broker is away, Reject for what can never be sent. After the failure of an
event it sends nothing more of that event's key.
"""

Handler: TypeAlias = Callable[[Event], Awaitable[object]]
"""Handles one event. Returning means that it is done; it raises Reject for what can never be."""
