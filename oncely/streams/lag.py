"""How far behind the groups of a stream are."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from oncely.streams.client import Client, Script
from oncely.streams.entry import position

__all__ = ["GroupLag", "lag"]

_CHUNK = 200  # the script reads so many whole entries


@dataclass(frozen=True, slots=True)
class GroupLag:
    """`unread` entries were given to no worker yet, `pending` ones are not acknowledged.

    `oldest_pending` is the age of the oldest pending entry, since it was published, by Redis's
    clock; None when nothing is pending.
    """

    unread: int
    pending: int
    oldest_pending: timedelta | None


async def lag(redis: Client, stream: str) -> dict[str, GroupLag]:
    """The lag of each group of the stream, by its name."""
    now, length, groups = await _LAG.run(redis, (stream,), ())
    return {
        name.decode(): GroupLag(
            unread=counted if counted is not None else await _unread(redis, stream, last, length),
            pending=pending,
            oldest_pending=None if oldest is None else _age(now, oldest),
        )
        for name, pending, oldest, last, counted in groups
    }


def _age(now: int, entry_id: bytes) -> timedelta:
    return max(timedelta(milliseconds=now - position(entry_id)[0]), timedelta(0))


async def _unread(redis: Client, stream: str, last: bytes, length: int) -> int:
    """Counted entry by entry: servers before Redis 7, and gaps in the stream, leave no other way."""
    if position(last) == (0, 0):
        return length
    unread = 0
    while True:
        found: int
        found, last = await _COUNT.run(redis, (stream,), (last, _CHUNK))
        unread += found
        if found < _CHUNK:
            return unread


# How far behind each group is. Returns the server's time in milliseconds, the stream's length, and
# for each group: name, how many are pending, the id of the oldest of them or nil, the last id it
# read, and how many it has not read as the server counts them, or nil when it cannot tell.
_LAG = Script("""
local length = redis.pcall('XLEN', KEYS[1])
if type(length) == 'table' then return length end
local now = redis.call('TIME')
local lags = {}
if redis.call('EXISTS', KEYS[1]) == 1 then
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local group = {}
    for at = 1, #flat, 2 do group[flat[at]] = flat[at + 1] end
    local lowest = redis.call('XPENDING', KEYS[1], group.name, '-', '+', 1)[1]
    local last = group['last-delivered-id']
    lags[#lags + 1] = {group.name, group.pending, lowest and lowest[1] or false, last, group.lag or false}
  end
end
return {now[1] * 1000 + math.floor(now[2] / 1000), length, lags}
""")

# Counts entries behind an id, at most so many. Returns how many, and the id to go on from.
_COUNT = Script("""
local entries = redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+', 'COUNT', ARGV[2])
return {#entries, #entries > 0 and entries[#entries][1] or ARGV[1]}
""")
