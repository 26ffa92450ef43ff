"""A publisher that keeps what it was given, for tests of what an application emits."""

from __future__ import annotations

from collections.abc import Sequence

from oncely.event import Event

__all__ = ["RecordingPublisher"]


class RecordingPublisher:
    """A Publisher whose `events` are all that was published, in order; `batches` keeps the calls apart."""

    def __init__(self) -> None:
        self.batches: list[list[Event]] = []

    @property
    def events(self) -> list[Event]:
        """Everything that was published so far, oldest first."""
        return [event for batch in self.batches for event in batch]

    async def __call__(self, events: Sequence[Event]) -> None:
        self.batches.append(list(events))
