"""A dead letter's format: the entry as it was, and five fields behind it that tell why it is here.

    error       what the last attempt raised: its class and text
    attempts    how many deliveries were counted
    group       which group gave up on it
    entry       its id in the stream it came from
    dead_at     when, in milliseconds since 1970 by Redis's clock (added by the script that moves it)

They are told from the entry's own fields by their place, the last five; names may occur twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from redis.asyncio import RedisCluster

from oncely.arguments import check_name
from oncely.description import describe
from oncely.streams.client import Client
from oncely.streams.wire import Fields

__all__ = ["Letter", "compose", "name_for", "parse"]

_ADDED = (b"error", b"attempts", b"group", b"entry", b"dead_at")

_MOST_WORDS = 4000  # a script can pass on about twice as many
_MOST_ERROR = 2000  # characters


class Letter(NamedTuple):
    """A dead letter taken apart; all but `fields` is text."""

    fields: Fields
    error: str
    attempts: str
    group: str
    entry: str
    dead_at: str


def name_for(redis: Client, stream: str, given: str | None) -> str:
    """The name of a stream's dead letters: what was given, or the stream's name and `:dead`.

    A cluster moves an entry there in one step only if the two share a hash slot. There the default
    gets the stream's name as its hash tag when the stream's name has none.
    """
    if given is not None:
        check_name(given, "dead_letter_stream")
    if not isinstance(redis, RedisCluster):
        return given if given is not None else f"{stream}:dead"
    names = (f"{stream}:dead", f"{{{stream}}}:dead") if given is None else (given,)
    for name in names:
        if redis.keyslot(name) == redis.keyslot(stream):
            return name
    raise ValueError(f"{names[0]!r} is not in the slot of {stream!r}: give the two one hash tag, as {{tag}}")


def compose(
    fields: Fields, error: BaseException, *, attempts: int, group: str, entry: bytes
) -> Sequence[bytes]:
    """The dead letter's fields but for `dead_at`."""
    text = describe(error, longest=_MOST_ERROR)
    if len(fields) > _MOST_WORDS:
        text += f" ({(len(fields) - _MOST_WORDS) // 2} more fields were not kept)"
    reasons = (text.encode(), str(attempts).encode(), group.encode(), entry)
    return [
        *fields[:_MOST_WORDS],
        *(word for pair in zip(_ADDED, reasons, strict=False) for word in pair),
    ]


def parse(fields: Fields) -> Letter | None:
    """The dead letter in an entry; None when a consumer did not write it."""
    size = 2 * len(_ADDED)
    added = fields[-size:]
    if tuple(added[::2]) != _ADDED:
        return None
    return Letter(fields[:-size], *(value.decode(errors="replace") for value in added[1::2]))
