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

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from oncely.event import Event

__all__ = ["Fields", "NotAnEvent", "RawEntry", "decode", "encode", "entries_in"]

Fields: TypeAlias = Sequence[bytes]
"""An entry's names and values in turn, as Redis keeps them."""


class RawEntry(NamedTuple):
    """An entry as it was read. `fields` is None when the entry was trimmed away."""

    id: bytes
    fields: Fields | None


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
    given = dict(zip(each, each, strict=False))
    if given.get(b"group", group) != group:
        return None
    try:
        key, headers, created_at = given.get(b"key"), given.get(b"headers"), given.get(b"created_at")
        event = Event.from_json(
            UUID(given[b"id"].decode()),
            given[b"topic"].decode(),
            given[b"payload"].decode(),
            None if headers is None else headers.decode(),
            None if key is None else key.decode(),
            None if created_at is None else datetime.fromisoformat(created_at.decode()),
            attempt,
        )
        event.payload  # noqa: B018  decodes it now: what is not JSON shall fail here
        if headers is not None and not isinstance(event.headers, dict):
            raise NotAnEvent("headers: not an object")
    except NotAnEvent:
        raise
    except KeyError as missing:
        raise NotAnEvent(f"no field {missing.args[0].decode()!r}") from None
    except (ValueError, RecursionError) as error:
        raise NotAnEvent(f"{type(error).__name__}: {error}") from error
    return event


def entries_in(reply: Any) -> list[RawEntry]:
    """The entries in the reply of XREADGROUP on one stream, in any of the shapes clients give it.

    The server answers with a list of [stream, entries] (RESP2), a map (RESP3) or nothing; redis-py
    may already have turned each entry's fields into a dict, and in some versions wraps the entries
    of a map once more.
    """
    if not reply:
        return []
    found: Iterable[Any]
    found = next(iter(reply.values())) if isinstance(reply, Mapping) else reply[0][1]
    found = list(found)
    if found and found[0] and isinstance(found[0][0], (list, tuple)):
        found = found[0]
    return [RawEntry(entry[0], _flat(entry[1])) for entry in found]


def _flat(fields: Any) -> Fields | None:
    if isinstance(fields, Mapping):
        return [part for pair in fields.items() for part in pair]
    return fields  # type: ignore[no-any-return]  # a list of names and values, or None
