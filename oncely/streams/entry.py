"""An entry in a worker's hands."""

from __future__ import annotations

from oncely.event import Event
from oncely.streams.wire import Fields

__all__ = ["Entry", "position"]


class Entry:
    """`attempt` is the count that Redis has once this delivery is counted.

    `counted` tells whether it is: a new entry's delivery is counted by reading it, that of one
    taken over is counted when its handler starts. `begun` once its handler has started, `open`
    until that has ended or the entry was given up.
    `stolen` when another worker was seen to have it, `trimmed` when it is no more in the stream.
    """

    __slots__ = ("attempt", "begun", "counted", "event", "fields", "id", "open", "stolen", "trimmed")

    def __init__(self, id: bytes, fields: Fields, event: Event, *, counted: bool) -> None:  # noqa: A002
        self.id = id
        self.fields = fields
        self.event = event
        self.attempt = event.attempt
        self.counted = counted
        self.begun = False
        self.open = True
        self.stolen = False
        self.trimmed = False

    @property
    def position(self) -> tuple[int, int]:
        """Its place in the stream."""
        return position(self.id)


def position(entry_id: bytes) -> tuple[int, int]:
    """An entry id as numbers, which compare as the stream is ordered."""
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number)
