"""The thing that travels: an event, and the JSON in which its payload is written.

`Event` is what relays hand to publishers and consumers hand to handlers. `NewEvent` is what an
application emits. `encode_json` is the only encoder of payloads, headers and results in oncely:
what it accepts can be stored in a `jsonb` column and read back, and what it refuses is refused
before any SQL, with the place of the offending value.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from itertools import accumulate
from typing import Any, TypeAlias
from uuid import UUID

from oncely.errors import InvalidKey

if sys.version_info >= (3, 14):
    from uuid import uuid7
else:
    from uuid_utils.compat import uuid7

__all__ = [
    "Event",
    "Handler",
    "NewEvent",
    "Publisher",
    "check_key",
    "decode_json",
    "encode_json",
    "uuid7",
]

LONGEST_KEY = 1_000
"""The longest key, topic or scope that is stored, in bytes of UTF-8; an index entry takes 2,700."""

DEEPEST = 500
"""The most levels of lists and objects in a payload; PostgreSQL's own limit depends on its stack."""


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


def encode_json(value: object, *, what: str = "payload") -> str:
    """JSON text for `value`, in a form that a jsonb column takes.

    Beside JSON's own types: aware datetime and date (ISO 8601), UUID, Decimal (a string), Enum (its
    value), dataclasses and pydantic models (their fields). Numbers, booleans and None as names of
    an object become strings, as in `json.dumps`. ValueError names the place of what cannot be
    stored: naive datetimes, bytes, NaN, infinities, integers too long to print, NUL, unpaired
    surrogates, cycles, more than 500 levels and every other type. `what` names the value in that
    message.
    """
    try:
        text = _ENCODER.encode(value)
        text.encode()  # an unpaired surrogate has no UTF-8
    except (TypeError, ValueError, RecursionError) as error:
        _find_refused(value, what)
        raise ValueError(f"{what}: {error}") from error
    # A NUL, or a harmless backslash before u0000.
    if "\\u0000" in text or (text.count("[") + text.count("{") > DEEPEST and _depth(text) > DEEPEST):
        _find_refused(value, what)
    return text


def decode_json(text: str) -> Any:
    """The values of a JSON text that encode_json wrote."""
    return _DECODER.decode(text)


def check_key(value: object, what: str) -> None:
    """Raise InvalidKey unless `value` is text that a key column and its index can take.

    That is a str of at most 1,000 bytes of UTF-8, without NUL and unpaired surrogates.
    """
    if not isinstance(value, str):
        raise InvalidKey(f"{what} must be a str, not {type(value).__name__}")
    try:
        _check_text(value, what)
    except ValueError as error:
        raise InvalidKey(str(error)) from None
    if len(value) * 4 > LONGEST_KEY and len(value.encode()) > LONGEST_KEY:
        raise InvalidKey(f"{what} has {len(value.encode()):,} bytes; at most {LONGEST_KEY:,} are stored")


def _plain(value: object) -> object:
    """What the encoder writes in the place of a value that JSON has no form for."""
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise ValueError("a datetime without a time zone")
        return value.isoformat()
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError(f"Decimal {value}")
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(type(value), "model_dump") and hasattr(type(value), "__pydantic_serializer__"):
        return value.model_dump()  # type: ignore[attr-defined]  # a pydantic model
    raise ValueError(f"a value of type {type(value).__name__}")


_ENCODER = json.JSONEncoder(default=_plain, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
_DECODER = json.JSONDecoder()  # json.loads looks at its options first, which takes as long as the decoding


_ESCAPED = re.compile(r"\\.")
_QUOTED = re.compile(b'"[^"]*"')
_NEITHER_QUOTE_NOR_BRACKET = bytes(set(range(256)) - set(b'"[]{}'))
_STEPS = dict(zip(b"[{]}", (1, 1, -1, -1), strict=True))


def _depth(text: str) -> int:
    """How many levels of lists and objects a JSON text has."""
    marks = _ESCAPED.sub("", text).encode().translate(None, _NEITHER_QUOTE_NOR_BRACKET)
    # Two quotes side by side do not change what is inside of quotes, and few are not side by side.
    brackets = _QUOTED.sub(b"", marks.replace(b'""', b""))
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def _find_refused(value: object, what: str) -> None:
    """Raise ValueError for the first place in `value` that cannot be stored, if there is one."""
    try:
        _check(value, what, (), 0)
    except RecursionError:  # the caller's own calls have used most of the stack
        raise ValueError(f"{what}: nested too deeply") from None


def _check(value: object, path: str, above: tuple[int, ...], depth: int) -> None:
    """Walks the value as the encoder does. `above` is what it is in, in `depth` lists and objects."""
    if id(value) in above:
        raise ValueError(f"{path}: the value contains itself")
    if isinstance(value, Enum):
        _check(value.value, path, above, depth)
    elif isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, int):
        _printed(value, path)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path}: {value} is not JSON")
    elif isinstance(value, (dict, list, tuple)):
        if depth == DEEPEST:
            raise ValueError(f"{path}: nested too deeply")
        for place, member in _members(value, path):
            _check(member, place, (*above, id(value)), depth + 1)
    elif value is not None:
        try:
            plain = _plain(value)
        except ValueError as error:
            raise ValueError(f"{path}: {error} is not JSON") from None
        _check(plain, path, (*above, id(value)), depth)


def _members(value: dict[Any, Any] | Sequence[Any], path: str) -> Iterator[tuple[str, object]]:
    """What is in a dict, list or tuple, each with its path; a dict's names are checked on the way."""
    if not isinstance(value, dict):
        for index, member in enumerate(value):
            yield f"{path}[{index}]", member
        return
    for name, member in value.items():
        if not (name is None or isinstance(name, (str, int, float))):
            raise ValueError(f"{path}: a key of type {type(name).__name__}; keys are strings")
        printed = _printed(name, f"a key of {path}")
        _check(name, f"{path} key {printed}", (), 0)
        yield f"{path}[{printed}]", member


def _printed(value: object, path: str) -> str:
    try:
        return repr(value)
    except ValueError:  # Python refuses to print integers of more than some thousand digits
        raise ValueError(f"{path}: an integer with too many digits") from None


def _check_text(text: str, path: str) -> None:
    if "\0" in text:
        raise ValueError(f"{path}: a NUL character cannot be stored")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path}: an unpaired surrogate cannot be stored") from None
