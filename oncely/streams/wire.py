"""The wire's format: which fields an entry of a stream has, and the shapes in which a client hands it over.

Publisher and consumer never import each other; this is what they share. An entry is a flat list of
names and values:

    id           the event's id, a UUID                          always
    topic        what happened                                   always
    payload      JSON text, as it was stored by the outbox       always
    headers      a JSON object of strings                        when there are any
    key          what must stay in order                         when there is one
    created_at   ISO 8601 with an offset                         when it is known
    group        the only group that is to handle it             on a replayed dead letter

Fields of other names are ignored. Everything is read as bytes, whatever the client's
`decode_responses` says, so that an entry which is not text fails alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from json import JSONDecodeError, JSONDecoder
from typing import Any, TypeAlias
from uuid import UUID, SafeUUID

from oncely.event import Event

__all__ = ["Fields", "NotAnEvent", "RawEntry", "decode", "encode", "entries_in", "key_of"]

Fields: TypeAlias = Sequence[bytes]
"""An entry's names and values in turn, as Redis keeps them."""


RawEntry: TypeAlias = tuple[bytes, Fields | None]
"""An entry as it was read: its id and its fields, or None when they were trimmed away."""


class NotAnEvent(ValueError):
    """The entry was not written by an oncely publisher, or is damaged: no retry can mend it."""


def encode(event: Event) -> list[bytes]:
    """The entry for an event. The payload's text is passed on as it is.

    ValueError for what has no UTF-8 or no JSON.
    """
    fields = [
        *(b"id", str(event.id).encode()),
        *(b"topic", event.topic.encode()),
        *(b"payload", event.payload_json.encode()),
    ]
    headers = event.headers_json
    if headers is not None:
        fields += (b"headers", headers.encode())
    if event.key is not None:
        fields += (b"key", event.key.encode())
    if event.created_at is not None:
        fields += (b"created_at", event.created_at.isoformat().encode())
    return fields


def decode(fields: Fields, attempt: int, group: bytes) -> Event | None:
    """The event in an entry, with payload and headers decoded; None when it is for another group.

    NotAnEvent tells what is wrong.
    """
    each = iter(fields)
    given = dict(zip(each, each))  # noqa: B905  asking for `strict` takes as long as the rest
    get = given.get
    if get(b"group", group) != group:
        return None
    try:
        key, headers, created_at = get(b"key"), get(b"headers"), get(b"created_at")
        payload_json = given[b"payload"].decode()
        event = Event.from_json(
            _uuid(given[b"id"]),
            given[b"topic"].decode(),
            payload_json,
            None if headers is None else headers.decode(),
            None if key is None else key.decode(),
            None if created_at is None else _time(created_at),
            attempt,
            _json(payload_json),
        )
        if headers is not None:
            _check_headers(event.headers)
    except NotAnEvent:
        raise
    except KeyError as missing:
        raise NotAnEvent(f"no field {missing.args[0].decode()!r}") from None
    except (ValueError, RecursionError) as error:
        raise NotAnEvent(f"{type(error).__name__}: {error}") from error
    return event


def _uuid(text: bytes) -> UUID:
    """UUID(text) in less than half the time: its constructor weighs five ways to be called first."""
    digits = bytes.fromhex(text.replace(b"-", b"").decode())
    if len(digits) != 16:
        raise NotAnEvent("id: not a UUID")
    made = object.__new__(UUID)
    object.__setattr__(made, "int", int.from_bytes(digits))
    object.__setattr__(made, "is_safe", SafeUUID.unknown)
    return made


def _time(text: bytes) -> datetime:
    time = datetime.fromisoformat(text.decode())
    if time.utcoffset() is None:
        raise NotAnEvent("created_at: without an offset")
    return time


def _check_headers(headers: object) -> None:
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise NotAnEvent("headers: not an object of strings")


def _json(text: str) -> Any:
    """The values of a JSON text. Around those that a publisher passed on, there is no white space."""
    try:
        value, end = _DECODER.raw_decode(text)
    except JSONDecodeError:
        return _DECODER.decode(text)
    return value if end == len(text) else _DECODER.decode(text)


def _refuse_constant(name: str) -> Any:
    """NaN and infinities are Python's, not JSON's; PostgreSQL would refuse them wherever they go next."""
    raise NotAnEvent(f"payload: {name} is not JSON")


_DECODER = JSONDecoder(parse_constant=_refuse_constant)


def key_of(fields: Fields) -> bytes | None:
    """An entry's key as it is on the wire, found without looking at the rest."""
    if b"key" not in fields:
        return None
    at = fields.index(b"key")
    while at % 2:  # that was a value
        if b"key" not in fields[at + 1 :]:
            return None
        at = fields.index(b"key", at + 1)
    return fields[at + 1]


def entries_in(reply: Any) -> list[RawEntry]:
    """The entries in the reply of XREADGROUP on one stream, in any of the shapes clients give it.

    The server answers with a list of [stream, entries] (RESP2), a map (RESP3) or nothing; redis-py
    may already have turned each entry's fields into a dict, and in some versions wraps the entries
    of a map once more.
    """
    if not reply:
        return []
    found: list[Any] = next(iter(reply.values())) if isinstance(reply, Mapping) else reply[0][1]
    if found and (not found[0] or isinstance(found[0][0], (list, tuple))):
        found = found[0]
    if found and isinstance(found[0][1], Mapping):
        return [(entry_id, _flat(fields)) for entry_id, fields in found]
    return found


def _flat(fields: Mapping[bytes, bytes] | None) -> Fields | None:
    return None if fields is None else [part for pair in fields.items() for part in pair]
