"""Redis Streams: events out of the outbox into a stream, and out of a stream into handlers."""

from oncely.event import Handler
from oncely.streams.consumer import StreamConsumer
from oncely.streams.handling import Around, OnResult, Result
from oncely.streams.publisher import stream_publisher

__all__ = ["Around", "Handler", "OnResult", "Result", "StreamConsumer", "stream_publisher"]
