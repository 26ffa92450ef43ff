"""Redis Streams: events out of the outbox into a stream, and out of a stream into handlers."""

__all__: list[str] = []
