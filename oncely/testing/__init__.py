"""What an application needs to test its own use of oncely: real servers, crashes, a recording publisher."""

from oncely.testing.postgres import EmbeddedPostgres
from oncely.testing.publisher import RecordingPublisher
from oncely.testing.steps import STEPS, Steps, crash_at
from oncely.testing.valkey import EmbeddedValkey

__all__ = ["STEPS", "EmbeddedPostgres", "EmbeddedValkey", "RecordingPublisher", "Steps", "crash_at"]
