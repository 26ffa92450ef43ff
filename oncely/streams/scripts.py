"""What a group asks of Redis in one step, on one stream: taking over, renewing, giving back, burying.

*Mine* in the comments: XPENDING still names this consumer. Whoever changes a pending entry asks that
first, in the same step: a plain XCLAIM would take the entry back from its new owner.
"""

from __future__ import annotations

from oncely.streams.client import Script

__all__ = ["BEGIN", "BURY", "PENDING", "REAP", "RELEASE", "RENEW", "RETIRE", "TAKE_OVER"]

# Takes over entries that were delivered and not acknowledged for as long as their delivery count
# asks. XCLAIM … JUSTID does not count as a delivery; an entry that was given back uncounted (0) is
# counted here, as a first delivery would be.
# Arguments: group, consumer, how many at most, where to go on, whose ('' for anybody's), then the
# idle time asked for by counts 0, 1, 2, …
# Returns where to go on, and [id, count, fields] of what was taken over (fields nil: trimmed away,
# and acknowledged here). At most ten pages are looked through at a time.
TAKE_OVER = Script("""
local stream, group, me = KEYS[1], ARGV[1], ARGV[2]
local want, from, whose = tonumber(ARGV[3]), ARGV[4], ARGV[5]
local taken, pages = {}, 0
while #taken < want and pages < 10 do
  local page
  if whose == '' then
    page = redis.pcall('XPENDING', stream, group, 'IDLE', ARGV[6], from, '+', 100)
  else
    page = redis.pcall('XPENDING', stream, group, 'IDLE', ARGV[6], from, '+', 100, whose)
  end
  if page.err then return page end
  pages = pages + 1
  local seen = 0
  for _, pending in ipairs(page) do
    if #taken == want then break end
    local id, idle, count = pending[1], pending[3], pending[4]
    seen = seen + 1
    from = '(' .. id
    if idle >= tonumber(ARGV[math.min(6 + count, #ARGV)]) then
      if count == 0 then
        redis.call('XCLAIM', stream, group, me, 0, id, 'RETRYCOUNT', 1, 'JUSTID')
      else
        redis.call('XCLAIM', stream, group, me, 0, id, 'JUSTID')
      end
      local entry = redis.call('XRANGE', stream, id, id)[1]
      if entry then
        taken[#taken + 1] = {id, count, entry[2]}
      else
        redis.call('XACK', stream, group, id)
        taken[#taken + 1] = {id, count, false}
      end
    end
  end
  if seen == #page and #page < 100 then
    from = '-'
    break
  end
end
return {from, taken}
""")

# Counts a delivery just before its handler starts, if the entry is still mine.
# Arguments: group, consumer, id, count. Returns 1, or 0 when it is another's, or -1 when it was
# trimmed away (a claim then removes it from what is pending).
BEGIN = Script("""
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)
if pending.err then return pending end
if not pending[1] or pending[1][2] ~= ARGV[2] then return 0 end
local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'RETRYCOUNT', ARGV[4], 'JUSTID')
return claimed[1] and 1 or -1
""")

# Makes entries young again, those that are still mine. Arguments: group, consumer, ids.
# Returns the ids that are not, and the ids of those that were trimmed away.
RENEW = Script("""
local stolen, trimmed = {}, {}
for at = 3, #ARGV do
  local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[at], ARGV[at], 1)
  if pending.err then return pending end
  if not pending[1] or pending[1][2] ~= ARGV[2] then
    stolen[#stolen + 1] = ARGV[at]
  elseif not redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[at], 'JUSTID')[1] then
    trimmed[#trimmed + 1] = ARGV[at]
  end
end
return {stolen, trimmed}
""")

# Gives entries back, those that are still mine, with the count that they had before this delivery.
# By the idle time that is said they are due at once for anybody, or later.
# Arguments: group, consumer, then for each its id, idle time and count.
# Returns the ids of those that were trimmed away.
RELEASE = Script("""
local trimmed = {}
for at = 3, #ARGV, 3 do
  local id = ARGV[at]
  local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], id, id, 1)
  if pending.err then return pending end
  if pending[1] and pending[1][2] == ARGV[2] then
    local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, id,
                               'IDLE', ARGV[at + 1], 'RETRYCOUNT', ARGV[at + 2], 'JUSTID')
    if not claimed[1] then trimmed[#trimmed + 1] = id end
  end
end
return trimmed
""")

# Moves an entry that is still mine to the dead letters: added there first, then acknowledged, and
# not acknowledged when it could not be added (a MULTI would). Keys: stream, dead letters.
# Arguments: group, consumer, id, then the fields. Returns the dead letter's id, or nil.
BURY = Script("""
local group, me, id = ARGV[1], ARGV[2], ARGV[3]
local pending = redis.pcall('XPENDING', KEYS[1], group, id, id, 1)
if pending.err then return pending end
if not pending[1] or pending[1][2] ~= me then return false end
local now = redis.call('TIME')
local fields = {unpack(ARGV, 4)}
fields[#fields + 1] = 'dead_at'
fields[#fields + 1] = string.format('%d%03d', now[1], math.floor(now[2] / 1000))
local added = redis.pcall('XADD', KEYS[2], '*', unpack(fields))
if type(added) == 'table' and added.err then return added end
redis.call('XACK', KEYS[1], group, id)
return added
""")

# Which of these entries are still pending, whoever has them. Arguments: group, ids.
PENDING = Script("""
local pending = {}
for at = 2, #ARGV do
  local found = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[at], ARGV[at], 1)
  if found.err then return found end
  if found[1] then pending[#pending + 1] = ARGV[at] end
end
return pending
""")

# Removes my name from the group when nothing is pending under it; removing a name drops what is.
# Arguments: group, consumer.
RETIRE = Script("""
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2])
if pending.err or pending[1] then return 0 end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
return 1
""")

# Removes the names of others that have nothing pending and were not heard of for so long.
# Arguments: group, consumer, milliseconds. Returns the names.
REAP = Script("""
local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])
local reaped = {}
if consumers.err then return reaped end
for _, flat in ipairs(consumers) do
  local known = {}
  for at = 1, #flat, 2 do known[flat[at]] = flat[at + 1] end
  if known.pending == 0 and known.idle >= tonumber(ARGV[3]) and known.name ~= ARGV[2] then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], known.name)
    reaped[#reaped + 1] = known.name
  end
end
return reaped
""")
