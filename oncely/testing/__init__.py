"""What an application needs to test its own use of oncely: real servers and a publisher that records."""

from oncely.testing.postgres import EmbeddedPostgres
from oncely.testing.publisher import RecordingPublisher
from oncely.testing.valkey import EmbeddedValkey

__all__ = ["EmbeddedPostgres", "EmbeddedValkey", "RecordingPublisher"]
