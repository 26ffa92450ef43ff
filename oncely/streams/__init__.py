"""Redis Streams: events out of the outbox into a stream, and out of a stream into handlers."""

from oncely.event import Handler
from oncely.extras import needs

needs("redis", "redis")

from oncely.streams.consumer import StreamConsumer
from oncely.streams.deadletters import DeadLetter, DeadLetters
from oncely.streams.handling import Around, OnResult, Result
from oncely.streams.lag import GroupLag
from oncely.streams.publisher import stream_publisher
from oncely.streams.trimming import Lost, Trimmed

__all__ = [
    "Around",
    "DeadLetter",
    "DeadLetters",
    "GroupLag",
    "Handler",
    "Lost",
    "OnResult",
    "Result",
    "StreamConsumer",
    "Trimmed",
    "stream_publisher",
]
