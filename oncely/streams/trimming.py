"""Bounding a stream without losing what a group still needs.

What a group needs begins at its lowest pending entry or, when nothing is pending, after the last
entry that it read; the oldest need of all groups is where trimming stops. Both are looked at and
acted on in one step, a bounded number of entries at a time. A stream without groups is needed whole:
the first group would begin at its start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oncely.streams.client import Client, Script

__all__ = ["Lost", "Trimmed", "trim"]

_CHUNK = 100  # the script reads so many whole entries


@dataclass(frozen=True, slots=True)
class Lost:
    """Entries that a group needed: not read yet, and read but not acknowledged."""

    unread: int
    pending: int


@dataclass(frozen=True, slots=True)
class Trimmed:
    """How many entries were removed, and which groups lost some: only `force` loses any."""

    removed: int
    lost: Mapping[str, Lost]


async def trim(redis: Client, stream: str, *, keep: int, force: bool) -> Trimmed:
    """Removes the oldest entries until `keep` are left; without `force`, none that is needed."""
    removed, lost = 0, dict[str, Lost]()
    while True:
        count, is_all, losses = await _TRIM.run(redis, (stream,), (keep, _CHUNK, int(force)))
        removed += count
        for name, unread, pending in losses:
            before = lost.get(name.decode(), Lost(0, 0))
            lost[name.decode()] = Lost(before.unread + unread, before.pending + pending)
        if is_all:
            return Trimmed(removed, lost)


# Removes the oldest entries, as many as are over the bound and at most so many at a time, and none
# that a group has not read or not acknowledged, unless forced. Arguments: bound, how many, force.
# Returns how many it removed, whether that was all, and for each group that lost by it: name, how
# many it had not read, how many were pending. Ids are compared as text, by length first: as numbers
# they would not fit.
_TRIM = Script("""
local function before(a, b)
  local a1, a2 = string.match(a, '(%d+)-(%d+)')
  local b1, b2 = string.match(b, '(%d+)-(%d+)')
  if a1 == b1 then a1, b1 = a2, b2 end
  if #a1 ~= #b1 then return #a1 < #b1 end
  return a1 < b1
end
local length = redis.pcall('XLEN', KEYS[1])
if type(length) == 'table' then return length end
local over, force = length - tonumber(ARGV[1]), ARGV[3] == '1'
if over <= 0 then return {0, 1, {}} end
local groups = {}
for _, flat in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = {}
  for at = 1, #flat, 2 do group[flat[at]] = flat[at + 1] end
  local lowest = redis.call('XPENDING', KEYS[1], group.name, '-', '+', 1)[1]
  groups[#groups + 1] = {name = group.name, last = group['last-delivered-id'], lowest = lowest and lowest[1]}
end
local entries = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', math.min(over, tonumber(ARGV[2])))
local function is_needed(id)
  for _, group in ipairs(groups) do
    if before(group.last, id) or (group.lowest and not before(id, group.lowest)) then return true end
  end
  return #groups == 0
end
local remove, lost = 0, {}
for _, entry in ipairs(entries) do
  if not force and is_needed(entry[1]) then break end
  remove = remove + 1
end
if remove == 0 then return {0, 1, {}} end
if force then
  local first, last = entries[1][1], entries[remove][1]
  for _, group in ipairs(groups) do
    local unread = 0
    for at = 1, remove do
      if before(group.last, entries[at][1]) then unread = unread + 1 end
    end
    local pending = #redis.call('XPENDING', KEYS[1], group.name, first, last, remove)
    if unread + pending > 0 then lost[#lost + 1] = {group.name, unread, pending} end
  end
end
redis.call('XTRIM', KEYS[1], 'MAXLEN', length - remove)
return {remove, (remove < #entries or remove == over) and 1 or 0, lost}
""")
