"""Keys that wait: an entry of theirs failed, or could not be begun, and what came after it is held here.

A key is held by its *heads*, entries that are pending and have failed or were given back, here or at
whoever took them over. Its *followers* are entries of this worker that come later in the stream.
They are ready when no head before them is pending any more; until then this worker keeps them young,
so that nobody takes them over.
"""

from __future__ import annotations

from collections.abc import Iterable

from oncely.streams.entry import Entry, Stage, position

__all__ = ["HeldKeys"]


class HeldKeys:
    """Which keys are held, by which entries, and what waits behind them."""

    def __init__(self) -> None:
        self._heads: dict[bytes, set[bytes]] = {}
        self._followers: dict[bytes, dict[bytes, Entry]] = {}

    @property
    def heads(self) -> list[bytes]:
        """The ids of everything that is waited for."""
        return [head for heads in self._heads.values() for head in heads]

    @property
    def followers(self) -> list[Entry]:
        """Everything that waits."""
        return [entry for waiting in self._followers.values() for entry in waiting.values()]

    @property
    def ready(self) -> list[Entry]:
        """What waits for nothing any more."""
        return [entry for key in self._followers for entry in self._ready_of(key)]

    def __contains__(self, entry_id: bytes) -> bool:
        """Whether an entry waits here."""
        return any(entry_id in waiting for waiting in self._followers.values())

    @property
    def waiting(self) -> int:
        """How many entries wait."""
        return sum(map(len, self._followers.values()))

    def __bool__(self) -> bool:
        """Whether any key is held."""
        return bool(self._heads or self._followers)

    def hold(self, key: bytes, head: bytes, followers: Iterable[Entry]) -> None:
        """The entry `head` of this key has failed; `followers` come after it."""
        if self._followers.get(key, {}).pop(head, None) is not None and not self._followers[key]:
            del self._followers[key]
        self._heads.setdefault(key, set()).add(head)
        for entry in followers:
            self._follow(key, entry)

    def keeps(self, entry: Entry) -> bool:
        """Whether the entry has to wait for others of its key; then it is kept here.

        What comes before every head does not, nor does the first of them, when it is tried again.
        """
        key = entry.key
        if key is None or (key not in self._heads and key not in self._followers):
            return False
        heads = self._heads.get(key, set())
        if heads and all(entry.position <= position(head) for head in heads):
            return False
        self._follow(key, entry)
        return True

    def settled(self, heads: Iterable[bytes]) -> None:
        """These are not pending any more."""
        gone = set(heads)
        for key in list(self._heads):
            self._heads[key] -= gone
            if not self._heads[key]:
                del self._heads[key]

    def stolen(self, ids: Iterable[bytes]) -> None:
        """Followers that another worker has by now: from here on the key waits for that one."""
        for entry in self.dropped(ids):
            self._heads.setdefault(entry.key or b"", set()).add(entry.id)

    def dropped(self, ids: Iterable[bytes]) -> list[Entry]:
        """Lets followers go; returns those that were here."""
        gone = set(ids)
        found = [entry for entry in self.followers if entry.id in gone]
        for entry in found:
            key = entry.key or b""
            del self._followers[key][entry.id]
            if not self._followers[key]:
                del self._followers[key]
        return found

    def pop_ready(self) -> list[list[Entry]]:
        """Takes out what is ready: one lane a key, in stream order."""
        lanes = []
        for key in list(self._followers):
            lane = self._ready_of(key)
            if lane:
                self.dropped(entry.id for entry in lane)
                lanes.append(lane)
            for entry in lane:
                entry.stage = Stage.WAITING
        return lanes

    def clear(self) -> list[Entry]:
        """Lets everything go; returns what was waiting."""
        waiting = self.followers
        self._heads.clear()
        self._followers.clear()
        return waiting

    def _ready_of(self, key: bytes) -> list[Entry]:
        """The followers that come before every head, in stream order.

        A head that was stolen may come after some: whoever has it may wait for them.
        """
        first = min(map(position, self._heads.get(key, ())), default=None)
        waiting = self._followers[key].values()
        ready = [entry for entry in waiting if first is None or entry.position < first]
        return sorted(ready, key=lambda entry: entry.position)

    def _follow(self, key: bytes, entry: Entry) -> None:
        entry.stage = Stage.ENDED  # nobody's to handle until it is ready
        # What waits here is waited for no more: it would wait for itself, and be kept for ever.
        self._heads.get(key, set()).discard(entry.id)
        self._followers.setdefault(key, {})[entry.id] = entry
