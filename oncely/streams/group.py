"""One worker's place in a consumer group: every command that it sends to Redis, and nothing of handlers.

The group is made when it is missed, at the start of the stream, so nothing that was published
before the first worker came (or before a flush was noticed) is passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from oncely.streams.client import Client, Script, execute
from oncely.streams.faults import code_word, is_lost_group
from oncely.streams.scripts import BEGIN, BURY, PENDING, REAP, RELEASE, RENEW, RETIRE, TAKE_OVER
from oncely.streams.wire import Fields, RawEntry, entries_in

__all__ = ["Begun", "Group", "Taken"]

_CHUNK = 500  # ids in one call

logger = logging.getLogger("oncely.streams")


class Taken(NamedTuple):
    """An entry that was delivered before. `fields` is None when it was trimmed away."""

    id: bytes
    deliveries: int
    fields: Fields | None


class Begun(IntEnum):
    """How it went when a delivery was to be counted."""

    YES = 1
    STOLEN = 0
    TRIMMED = -1


@dataclass
class Group:
    """`due` is how long, in milliseconds, an entry delivered 0, 1, 2, … times has to be idle to be due."""

    redis: Client
    stream: str
    name: str
    consumer: str
    dead_letter_stream: str
    due: Sequence[int]
    _from: str = field(default="-", init=False)
    _own_from: str | None = field(default="-", init=False)
    _was_made: bool = field(default=False, init=False)

    async def read(self, count: int) -> list[RawEntry]:
        """Up to `count` new entries, without waiting."""
        group = ("GROUP", self.name, self.consumer)
        command = ("XREADGROUP", *group, "COUNT", count, "STREAMS", self.stream, ">")
        return entries_in(await self._when_made(lambda: execute(self.redis, *command)))

    async def take_over(self, count: int) -> list[Taken]:
        """Up to `count` entries that are due again, whose delivery is not counted yet.

        A worker's first calls take over what is pending under its own name, however young: that
        was an earlier life of it, or an answer that was lost.
        """
        if self._own_from is not None:
            reply = await self._call(TAKE_OVER, self.consumer, count, self._own_from, self.consumer, 0)
            self._own_from = None if reply[0] == b"-" else reply[0].decode()
            if reply[1]:
                return [Taken(*entry) for entry in reply[1]]
        reply = await self._call(TAKE_OVER, self.consumer, count, self._from, "", *self.due)
        self._from = reply[0].decode()
        return [Taken(*entry) for entry in reply[1]]

    @property
    def has_past(self) -> bool:
        """Whether an earlier life of this worker may have left more than was taken over so far."""
        return self._own_from is not None

    def look_back(self) -> None:
        """The answer to a read was lost: what it held is pending under this worker's name."""
        self._own_from = "-"

    async def begin(self, entry_id: bytes, count: int) -> Begun:
        """Counts a delivery, if the entry is still this worker's."""
        return Begun(await self._call(BEGIN, self.consumer, entry_id, count))

    async def renew(self, ids: Sequence[bytes]) -> tuple[set[bytes], set[bytes]]:
        """Makes entries young again; returns those that others have, and those trimmed away."""
        stolen: set[bytes] = set()
        trimmed: set[bytes] = set()
        for at in range(0, len(ids), _CHUNK):
            reply = await self._call(RENEW, self.consumer, *ids[at : at + _CHUNK])
            stolen.update(reply[0])
            trimmed.update(reply[1])
        return stolen, trimmed

    async def still_pending(self, ids: Sequence[bytes]) -> set[bytes]:
        """Those that are pending, whoever has them."""
        pending: set[bytes] = set()
        for at in range(0, len(ids), _CHUNK):
            pending.update(await self._call(PENDING, *ids[at : at + _CHUNK]))
        return pending

    async def release(self, entries: Iterable[tuple[bytes, int]], *, young: bool = False) -> set[bytes]:
        """Gives entries back, each with the count that it had before; returns those trimmed away.

        They are due at once, or, when `young`, as if they had just been delivered.
        """
        words = [
            word
            for entry_id, count in entries
            for word in (entry_id, 0 if young else self._due_after(count), count)
        ]
        trimmed: set[bytes] = set()
        for at in range(0, len(words), 3 * _CHUNK):
            trimmed.update(await self._call(RELEASE, self.consumer, *words[at : at + 3 * _CHUNK]))
        return trimmed

    async def bury(self, entry_id: bytes, fields: Sequence[bytes]) -> bool:
        """Moves an entry to the dead letters; False when it was no longer this worker's."""
        return await self._call(BURY, self.consumer, entry_id, *fields) is not None

    async def acknowledge(self, ids: Sequence[bytes]) -> None:
        """They are done. Some may be so already, acknowledged by another worker: that is as well."""
        for at in range(0, len(ids), _CHUNK):
            await execute(self.redis, "XACK", self.stream, self.name, *ids[at : at + _CHUNK])

    async def retire(self) -> None:
        """Removes this worker's name, if nothing is pending under it."""
        await RETIRE.run(self.redis, (self.stream,), (self.name, self.consumer))

    async def reap(self, idle: int) -> list[bytes]:
        """Removes the names of workers that have nothing and are silent for `idle` milliseconds."""
        names: list[bytes] = await REAP.run(self.redis, (self.stream,), (self.name, self.consumer, idle))
        return names

    async def make(self) -> None:
        """Makes the group, at the start of the stream. It may be there already."""
        try:
            await execute(self.redis, "XGROUP CREATE", self.stream, self.name, "0", "MKSTREAM")
        except ResponseError as error:
            if code_word(str(error)) != "BUSYGROUP":
                raise

    def _due_after(self, count: int) -> int:
        return self.due[min(count, len(self.due) - 1)]

    async def _call(self, script: Script, *arguments: str | bytes | int) -> Any:
        keys = (self.stream, self.dead_letter_stream) if script is BURY else (self.stream,)
        return await self._when_made(lambda: script.run(self.redis, keys, (self.name, *arguments)))

    async def _when_made(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """The command's reply; when the group is gone, it is made again and the command repeated."""
        try:
            reply = await command()
            self._was_made = True
            return reply
        except ResponseError as error:
            if not is_lost_group(error):
                if code_word(str(error)) == "WRONGTYPE":
                    error.add_note(f"{self.stream!r} or {self.dead_letter_stream!r} holds no stream")
                raise
        await self.make()
        level = logging.INFO if not self._was_made else logging.WARNING  # then it was lost
        logger.log(level, "made group %r of stream %r, which was not there", self.name, self.stream)
        self._was_made = True
        return await command()
