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
    RowsHidden,
    TableNameTaken,
    TablesMissing,
    TransactionEnded,
)
from oncely.event import Event, NewEvent
from oncely.idempotency import Answer, IdempotencyKeys, Outcome, fingerprint, is_retryable, is_valid_key
from oncely.inbox import Inbox
from oncely.outbox import DeadEvent, Outbox, OutboxStats
from oncely.relay import Relay, RelayResult
from oncely.retention import Retention
from oncely.worker import Worker

__all__ = [
    "NOT_HAPPENED",
    "Answer",
    "CancelUnsafe",
    "ClaimLost",
    "DeadEvent",
    "DedupKeyReused",
    "EffectFailed",
    "EffectLost",
    "EffectPending",
    "EffectUnknown",
    "Effects",
    "Event",
    "IdempotencyKeys",
    "Inbox",
    "InvalidKey",
    "KeyInFlight",
    "KeyInUse",
    "KeyLost",
    "KeyReused",
    "KeyUnanswered",
    "NewEvent",
    "NoTransaction",
    "OncelyError",
    "Outbox",
    "OutboxStats",
    "Outcome",
    "PublishFailed",
    "PublisherUnavailable",
    "Refused",
    "Reject",
    "Relay",
    "RelayResult",
    "Retention",
    "RowsHidden",
    "TableNameTaken",
    "TablesMissing",
    "TransactionEnded",
    "Worker",
    "fingerprint",
    "is_retryable",
    "is_valid_key",
]
