"""What an application needs to test its own use of oncely: real servers, crashes, and what records."""

from oncely.testing.observer import OBSERVER_CHECKS, RecordingObserver
from oncely.testing.postgres import EmbeddedPostgres
from oncely.testing.publisher import RecordingPublisher
from oncely.testing.steps import STEPS, Steps, crash_at
from oncely.testing.valkey import EmbeddedValkey

__all__ = [
    "OBSERVER_CHECKS",
    "STEPS",
    "EmbeddedPostgres",
    "EmbeddedValkey",
    "RecordingObserver",
    "RecordingPublisher",
    "Steps",
    "crash_at",
]
