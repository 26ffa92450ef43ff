"""An entry in a worker's hands."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from oncely.streams.wire import Fields, key_of

__all__ = ["Entry", "Stage", "position"]


class Stage(Enum):
    """Where an entry is: its handler not called yet, called, or nothing is to be done any more."""

    WAITING = "waiting"
    BEGUN = "begun"
    ENDED = "ended"


class Entry:
    """`attempt` is the count that Redis has once this delivery is counted, and `counted` tells
    whether it is: that of a new entry by its reading, that of one taken over when its handler starts.

    `key` is the event's, undecoded. The event itself is decoded when its turn comes: a batch
    would otherwise keep all of them at once, for Python's garbage collector to look through again and
    again. `gone` is set when the entry was seen to be another worker's, or no longer in the stream.
    """

    __slots__ = ("attempt", "counted", "fields", "gone", "id", "key", "stage")

    gone: Literal["stolen", "trimmed"] | None

    def __init__(self, id: bytes, fields: Fields, attempt: int, *, counted: bool) -> None:  # noqa: A002
        self.id = id
        self.fields = fields
        self.key = key_of(fields)
        self.attempt = attempt
        self.counted = counted
        self.stage = Stage.WAITING
        self.gone = None

    @property
    def position(self) -> tuple[int, int]:
        """Its place in the stream."""
        return position(self.id)


def position(entry_id: bytes) -> tuple[int, int]:
    """An entry id as numbers, which compare as the stream is ordered."""
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number)
