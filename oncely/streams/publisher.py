"""Events into a stream, in order, in chunks of one round trip each.

A chunk is added by one script that stops at the first event which Redis refuses: in a pipeline the
commands behind a refused one are carried out all the same, and a later event of its key would get
past it. What is left of a batch is sent on without the rest of that key.

Whose fault it is: an error of one entry (it cannot be encoded, it is too large) is that event's
failure. Everything that would be the same for every event (no connection, out of memory, read-only,
no permission, a key that is no stream) is the broker's: PublisherUnavailable when nothing of the
batch was sent, and otherwise PublishFailed that blames nobody and lists what was not sent.

A reply that got lost leaves it open whether its chunk was added, so it is sent again, by the client
or the relay: at least once, and the copy has the same event id.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from redis.exceptions import ResponseError

from oncely.arguments import check_count, check_name
from oncely.errors import PublisherUnavailable, PublishFailed
from oncely.event import Event, Publisher
from oncely.streams.client import Client, Script, check_client, leave_demoted
from oncely.streams.faults import BROKER_ERRORS, code_word, is_demoted
from oncely.streams.wire import encode

__all__ = ["stream_publisher"]

_CHUNK_EVENTS = 250
_CHUNK_BYTES = 1_000_000


def stream_publisher(redis: Client, stream: str, *, maxlen: int | None = None) -> Publisher:
    """A Publisher that adds events to `stream`.

    `maxlen` bounds the stream to about so many entries and *ignores what groups have not read*: use
    `StreamConsumer.trim`, which does not, unless losing events is what you want.

    The publisher raises PublishFailed, PublisherUnavailable; see `oncely.event.Publisher`.
    """
    check_client(redis)
    check_name(stream, "stream")
    if maxlen is not None:
        check_count(maxlen, "maxlen")
    limit = str(maxlen or 0)

    async def publish(events: Sequence[Event]) -> None:
        batch = _Batch(events)
        while chunk := batch.next_chunk():
            arguments: list[bytes | str] = [limit]
            for _, words in chunk:
                arguments.append(str(len(words)))
                arguments += words
            try:
                added, refusal = await _PUBLISH.run(redis, (stream,), arguments)
            except BROKER_ERRORS as error:
                raise batch.interrupted(str(error) or type(error).__name__) from error
            batch.sent(added)
            if refusal is not None:
                text = refusal.decode(errors="replace")
                if is_demoted(text):
                    await leave_demoted(redis)
                # Before Redis 7, what was refused before it ran begins with its place in the script.
                if code_word(text) != "ERR" or text.startswith("@user_script"):
                    raise batch.interrupted(text)
                batch.refused(ResponseError(text.removeprefix("ERR ")))
        batch.finish()

    return publish


class _Batch:
    """Which events of a batch are sent, refused, held back by their key, or still to send."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self._next = 0
        self._chunk: list[tuple[Event, list[bytes]]] = []
        self._sent = 0
        self._failures: dict[UUID, Exception] = {}
        self._unsent: list[UUID] = []
        self._stopped_keys: set[str] = set()

    def next_chunk(self) -> list[tuple[Event, list[bytes]]]:
        """The next events with their entries; those left of the chunk before come first."""
        left = [part for part in self._chunk if not self._holds_back(part[0])]
        self._chunk = left
        size = sum(sum(map(len, words)) for _, words in left)
        while self._next < len(self._events) and len(left) < _CHUNK_EVENTS and size < _CHUNK_BYTES:
            event = self._events[self._next]
            self._next += 1
            if self._holds_back(event):
                continue
            try:
                words = encode(event)
            except (ValueError, TypeError, AttributeError) as error:
                self._fail(event, error)
                continue
            size += sum(map(len, words))
            left.append((event, words))
        return left

    def sent(self, count: int) -> None:
        self._sent += count
        del self._chunk[:count]

    def refused(self, error: Exception) -> None:
        """The first event of what is left of the chunk was refused for its own sake."""
        event, _ = self._chunk.pop(0)
        self._fail(event, error)

    def interrupted(self, reason: str) -> PublisherUnavailable | PublishFailed:
        """The error to raise when the broker takes no more of this batch."""
        if not self._sent and not self._failures:
            return PublisherUnavailable(reason)
        rest = [event.id for event, _ in self._chunk] + [event.id for event in self._events[self._next :]]
        return PublishFailed(self._failures, [*self._unsent, *rest])

    def finish(self) -> None:
        if self._failures:
            raise PublishFailed(self._failures, self._unsent)

    def _holds_back(self, event: Event) -> bool:
        if event.key is None or event.key not in self._stopped_keys:
            return False
        self._unsent.append(event.id)
        return True

    def _fail(self, event: Event, error: Exception) -> None:
        self._failures[event.id] = error
        if event.key is not None:
            self._stopped_keys.add(event.key)


# Adds events to the stream in order and stops at the first that is refused, so that nothing of its
# key gets past it. Arguments: maxlen or 0, then for each event how many words it has, and the words.
# Returns how many were added, and the refusal. Without the right to add, Redis has no code word in a script.
_PUBLISH = Script("""
local maxlen = ARGV[1]
local added, at = 0, 2
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  local reply
  if maxlen == '0' then
    reply = redis.pcall('XADD', KEYS[1], '*', unpack(ARGV, at + 1, at + words))
  else
    reply = redis.pcall('XADD', KEYS[1], 'MAXLEN', '~', maxlen, '*', unpack(ARGV, at + 1, at + words))
  end
  if type(reply) == 'table' and reply.err then
    if redis.acl_check_cmd and not redis.acl_check_cmd('XADD', KEYS[1], '*', 'id', '') then
      return {added, 'NOPERM ' .. reply.err}
    end
    return {added, reply.err}
  end
  added = added + 1
  at = at + words + 1
end
return {added, false}
""")
