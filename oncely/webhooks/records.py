"""What operators see of webhooks: rows without what is sealed in them, and counts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from uuid import UUID

__all__ = ["ENDED_BADLY", "OriginStats", "Resealed", "State", "WebhookRecord", "WebhookStats"]


class State(StrEnum):
    """What has become of a webhook."""

    PENDING = "pending"
    """It waits for an attempt, or one is being made."""
    DELIVERED = "delivered"
    """Its endpoint said 2xx."""
    EXPIRED = "expired"
    """The time for retries is over, and nobody is known to have accepted it."""
    REJECTED = "rejected"
    """Its endpoint said what no retry can mend, or somebody discarded it."""
    QUARANTINED = "quarantined"
    """It cannot be sent as it is. It is kept until it is released or discarded."""


ENDED_BADLY = (State.EXPIRED, State.REJECTED, State.QUARANTINED)
"""What a webhook can be sent again from."""


@dataclass(frozen=True, slots=True)
class WebhookRecord:
    """One webhook. `last_error` is a class, or "HTTP n".

    `due_at` is when the next attempt may begin; of one that is being sent or quarantined, the lease's end.
    """

    id: UUID
    state: State
    caller: str
    account: str | None
    type: str
    key: str
    origin: str
    signing_scope: str | None
    key_id: str
    attempts: int
    last_error: str | None
    created_at: datetime
    due_at: datetime
    retry_until: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class OriginStats:
    """One origin's pending webhooks, how many of them have failed before, and the age of the oldest."""

    origin: str
    pending: int
    failing: int
    oldest_seconds: float


@dataclass(frozen=True, slots=True)
class WebhookStats:
    """All of a table: pending ones, of which some are in flight and some have failed before; those that
    ended badly; the age of the oldest pending one (0.0 if none). `origins` are those with the most pending.

    Delivered ones are not counted: that would read all of them.
    """

    pending: int
    in_flight: int
    failing: int
    oldest_seconds: float
    expired: int
    rejected: int
    quarantined: int
    origins: tuple[OriginStats, ...]


@dataclass(frozen=True, slots=True)
class Resealed:
    """One batch of `reseal`: how many are sealed with the new key, how many do not open and were left,
    and where to go on (None: this was the last batch)."""

    resealed: int
    unopened: int
    last_id: UUID | None
