"""The dead letters of a stream: what no retry could mend, kept until somebody decides.

    letters = DeadLetters(redis, stream="orders")
    for letter in await letters.list(topic="order.paid"): print(letter.id, letter.error)
    await letters.replay(ids=[letter.id])

A replayed event goes to the end of its stream, with its event id, for the group that gave up on it:
the other groups of the stream, which have handled it, pass it over. It comes after whatever was
published of its key in the meantime.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from oncely.arguments import check_count, check_name, check_text, check_time
from oncely.event import Event
from oncely.streams.client import Client, Script, check_client, execute
from oncely.streams.letter import Letter, name_for, parse
from oncely.streams.wire import Fields, NotAnEvent, decode

__all__ = ["DeadLetter", "DeadLetters"]

_PAGE = 100
_ID = re.compile(r"[0-9]{1,19}-[0-9]{1,19}", re.ASCII)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter, as an operator sees it.

    `id` names it among the dead letters, `entry` is the id it had in its stream. `event` is None
    when the entry was no event; its raw fields are in `fields`, names and values in turn. `error`
    is the class and text of what the last attempt raised, `attempts` how many were counted.
    """

    id: str
    event: Event | None
    error: str
    attempts: int
    group: str
    entry: str
    dead_at: datetime
    fields: Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class _Which:
    ids: Iterable[str] | None
    topic: str | None
    group: str | None
    error: str | None
    since: datetime | None
    until: datetime | None
    limit: int

    def __post_init__(self) -> None:
        check_text(self.topic, "topic")
        check_text(self.group, "group")
        check_text(self.error, "error")
        check_time(self.since, "since")
        check_time(self.until, "until")
        check_count(self.limit, "limit")

    def takes(self, letter: DeadLetter) -> bool:
        """What the range of ids does not already choose."""
        return (
            (self.topic is None or (letter.event is not None and letter.event.topic == self.topic))
            and (self.group is None or letter.group == self.group)
            and (self.error is None or letter.error.partition(":")[0] == self.error)
        )


class DeadLetters:
    """List, show, replay and discard. `dead_letter_stream` as the consumers have it."""

    def __init__(self, redis: Client, *, stream: str, dead_letter_stream: str | None = None) -> None:
        check_client(redis)
        check_name(stream, "stream")
        self.stream = stream
        self.dead_letter_stream = name_for(redis, stream, dead_letter_stream)
        self._redis = redis

    async def list(
        self,
        *,
        ids: Iterable[str] | None = None,
        topic: str | None = None,
        group: str | None = None,
        error: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 100,
    ) -> Sequence[DeadLetter]:
        """The dead letters that match all that is given, oldest first.

        `error` is the name of an error's class; `since` and `until` bound the time of death.
        """
        which = _Which(ids=ids, topic=topic, group=group, error=error, since=since, until=until, limit=limit)
        return [letter async for letter in self._find(which)]

    async def length(self) -> int:
        """How many entries the dead letters' stream has."""
        return int(await execute(self._redis, "XLEN", self.dead_letter_stream))

    async def show(self, letter_id: str) -> DeadLetter | None:
        """The dead letter of this id, or None."""
        _check_id(letter_id)
        page = await self._range(letter_id, letter_id, 1)
        return _letter(*page[0]) if page else None

    async def ids(
        self,
        *,
        ids: Iterable[str] | None = None,
        topic: str | None = None,
        group: str | None = None,
        error: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 10_000,
    ) -> Sequence[str]:
        """The ids of the dead letters that `replay` or `discard` would take."""
        which = _Which(ids=ids, topic=topic, group=group, error=error, since=since, until=until, limit=limit)
        return [letter.id async for letter in self._find(which)]

    async def replay(
        self,
        *,
        ids: Iterable[str] | None = None,
        topic: str | None = None,
        group: str | None = None,
        error: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 10_000,
    ) -> int:
        """Put dead letters back into their stream: those that match all that is given, or all.

        Returns how many; when that is `limit`, there may be more.
        """
        which = _Which(ids=ids, topic=topic, group=group, error=error, since=since, until=until, limit=limit)
        replayed = 0
        async for letter in self._find(which):
            words: tuple[str | bytes, ...] = (letter.id, *_for_group(letter.fields, letter.group))
            replayed += await _REPLAY.run(self._redis, (self.stream, self.dead_letter_stream), words)
        return replayed

    async def discard(
        self,
        *,
        ids: Iterable[str] | None = None,
        topic: str | None = None,
        group: str | None = None,
        error: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 10_000,
    ) -> int:
        """Delete dead letters: those that match all that is given, or all; returns how many."""
        which = _Which(ids=ids, topic=topic, group=group, error=error, since=since, until=until, limit=limit)
        discarded = 0
        async for letter in self._find(which):
            discarded += await self._redis.xdel(self.dead_letter_stream, letter.id)
        return discarded

    async def _find(self, which: _Which) -> AsyncIterator[DeadLetter]:
        """Those chosen, read page by page. What was added after the start is left for the next time."""
        left = which.limit
        if which.ids is not None:
            if isinstance(which.ids, (str, bytes)) or not isinstance(which.ids, Iterable):
                raise TypeError(f"ids must be an iterable of ids, not {type(which.ids).__name__}")
            for letter_id in which.ids:
                letter = await self.show(letter_id)
                if left and letter is not None and which.takes(letter):
                    left -= 1
                    yield letter
            return
        newest: bytes | None = await _NEWEST.run(self._redis, (self.dead_letter_stream,), ())
        if newest is None:
            return
        start = "-" if which.since is None else str(_milliseconds(which.since))
        end = newest.decode()
        if which.until is not None and _milliseconds(which.until) < int(newest.split(b"-")[0]):
            end = str(_milliseconds(which.until))
        while left:
            page = await self._range(start, end, _PAGE)
            for entry_id, fields in page:
                letter = _letter(entry_id, fields)
                if left and letter is not None and which.takes(letter):
                    left -= 1
                    yield letter
            if len(page) < _PAGE:
                return
            start = f"({page[-1][0].decode()}"

    async def _range(self, start: str, end: str, count: int) -> Sequence[tuple[bytes, Fields]]:
        reply: Sequence[tuple[bytes, Fields]] = await _RANGE.run(
            self._redis, (self.dead_letter_stream,), (start, end, count)
        )
        return reply


def _check_id(letter_id: object) -> None:
    """Raise unless this is the id of an entry, as in "1700000000000-0"."""
    if not isinstance(letter_id, str):
        raise TypeError(f"a dead letter's id must be a str, not {type(letter_id).__name__}")
    if not _ID.fullmatch(letter_id):
        raise ValueError(f"{letter_id!r} is no id of a dead letter; one looks like 1700000000000-0")


def _letter(letter_id: bytes, fields: Fields) -> DeadLetter | None:
    letter = parse(fields)
    if letter is None:
        return None
    try:
        attempts = int(letter.attempts)
        dead_at = datetime.fromtimestamp(int(letter.dead_at) / 1000, UTC)
    except (ValueError, OverflowError):
        return None  # no consumer of ours wrote it
    return DeadLetter(
        id=letter_id.decode(),
        event=_event(letter),
        error=letter.error,
        attempts=attempts,
        group=letter.group,
        entry=letter.entry,
        dead_at=dead_at,
        fields=letter.fields,
    )


def _event(letter: Letter) -> Event | None:
    try:
        return decode(letter.fields, int(letter.attempts), letter.group.encode())
    except NotAnEvent:
        return None


def _for_group(fields: Fields, group: str) -> list[bytes]:
    """The entry's fields, for this group alone."""
    each = iter(fields)
    kept = [word for pair in zip(each, each, strict=False) if pair[0] != b"group" for word in pair]
    return [*kept, b"group", group.encode()]


def _milliseconds(moment: datetime) -> int:
    return (moment - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1)


# Entries of a stream in their raw form. Arguments: from, to, how many.
_RANGE = Script("""
return redis.pcall('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])
""")

# The id of a stream's newest entry, or nil.
_NEWEST = Script("""
local newest = redis.pcall('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if newest.err then return newest end
return newest[1] and newest[1][1] or false
""")

# Puts a dead letter back at the end of its stream, for the group that gave up on it, and removes it.
# Keys: stream, dead letters. Arguments: the letter's id, then the fields. Returns 0 when it is gone.
_REPLAY = Script("""
local letter = redis.pcall('XRANGE', KEYS[2], ARGV[1], ARGV[1])
if letter.err then return letter end
if not letter[1] then return 0 end
local added = redis.pcall('XADD', KEYS[1], '*', unpack(ARGV, 2))
if type(added) == 'table' and added.err then return added end
redis.call('XDEL', KEYS[2], ARGV[1])
return 1
""")
