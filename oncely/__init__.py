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
    KeyLost,
    KeyReused,
    KeyUnanswered,
    NoTransaction,
    OncelyError,
    PublisherUnavailable,
    PublishFailed,
    Refused,
    Reject,
    TableNameTaken,
)
from oncely.event import Event, NewEvent
from oncely.idempotency import Answer, IdempotencyKeys, Outcome, fingerprint, is_retryable, is_valid_key
from oncely.outbox import Outbox

__all__ = [  # noqa: RUF022  in the order of `sorted`
    "Answer",
    "CancelUnsafe",
    "ClaimLost",
    "DedupKeyReused",
    "EffectFailed",
    "EffectLost",
    "EffectPending",
    "EffectUnknown",
    "Effects",
    "Event",
    "IdempotencyKeys",
    "InvalidKey",
    "KeyInFlight",
    "KeyInUse",
    "KeyLost",
    "KeyReused",
    "KeyUnanswered",
    "NOT_HAPPENED",
    "NewEvent",
    "NoTransaction",
    "OncelyError",
    "Outbox",
    "Outcome",
    "PublishFailed",
    "PublisherUnavailable",
    "Refused",
    "Reject",
    "TableNameTaken",
    "fingerprint",
    "is_retryable",
    "is_valid_key",
]
