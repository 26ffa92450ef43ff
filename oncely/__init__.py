"""oncely: a network retries; this makes it harmless.

Idempotency keys, a transactional outbox and Redis Streams for async SQLAlchemy on PostgreSQL.
"""

from oncely.errors import (
    CancelUnsafe,
    ClaimLost,
    DedupKeyReused,
    InvalidKey,
    KeyInFlight,
    KeyInUse,
    KeyReused,
    NoTransaction,
    OncelyError,
    PublisherUnavailable,
    PublishFailed,
    Refused,
    Reject,
    TableNameTaken,
)
from oncely.event import Event, NewEvent
from oncely.outbox import Outbox

__all__ = [
    "CancelUnsafe",
    "ClaimLost",
    "DedupKeyReused",
    "Event",
    "InvalidKey",
    "KeyInFlight",
    "KeyInUse",
    "KeyReused",
    "NewEvent",
    "NoTransaction",
    "OncelyError",
    "Outbox",
    "PublishFailed",
    "PublisherUnavailable",
    "Refused",
    "Reject",
    "TableNameTaken",
]
