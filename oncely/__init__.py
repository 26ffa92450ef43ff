"""oncely: a network retries; this makes it harmless.

Idempotency keys, a transactional outbox and Redis Streams for async SQLAlchemy on PostgreSQL.
"""

from oncely.effects import NOT_HAPPENED, Effects
from oncely.errors import (
    CancelUnsafe,
    ClaimLost,
    DedupKeyReused,
    EffectFailed,
    EffectLost,
    EffectPending,
    EffectUnknown,
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

__all__ = [  # noqa: RUF022  in the order of `sorted`
    "CancelUnsafe",
    "ClaimLost",
    "DedupKeyReused",
    "EffectFailed",
    "EffectLost",
    "EffectPending",
    "EffectUnknown",
    "Effects",
    "Event",
    "InvalidKey",
    "KeyInFlight",
    "KeyInUse",
    "KeyReused",
    "NOT_HAPPENED",
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
