"""What is known of one call: the record, the states it can be in, and the verifier's other answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, StrEnum
from typing import Any, Final

from oncely.storable import decode_json

__all__ = ["NOT_HAPPENED", "EffectRecord", "EffectStats", "NotHappened", "Status"]


class Status(StrEnum):
    """How a call stands. `done` and `failed` are finished; the other two are open."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"

    @property
    def is_finished(self) -> bool:
        """Whether nobody will change the record any more, until its ttl has run out."""
        return self in (Status.DONE, Status.FAILED)


class NotHappened(Enum):
    """The type of `NOT_HAPPENED`, for annotations."""

    NOT_HAPPENED = object()  # no JSON, so that it cannot be stored as a result by mistake


NOT_HAPPENED: Final = NotHappened.NOT_HAPPENED
"""What a verifier returns when the call has not happened and cannot happen any more."""


@dataclass(frozen=True, slots=True)
class EffectRecord:
    """One row, as it was when it was read.

    `status` is UNKNOWN also for a row that still says pending while its owner's time has run out by
    the database's clock. `token` belongs to the last owner; `provider_token` is what the provider
    sees, the same in all `attempts` of this effect. `error` is the class and message of the last
    failure. `expires_at` is when the owner's time runs out (pending) or when the key is free again
    (finished; None: never), and `expired` whether that had passed when the row was read.
    """

    key: str
    args_hash: bytes = field(repr=False)
    status: Status
    result_json: str | None = field(repr=False)
    error: str | None
    token: str
    provider_token: str
    attempts: int
    created_at: datetime
    updated_at: datetime
    expires_at: datetime | None
    expired: bool

    @property
    def result(self) -> Any:
        """What the call returned, as JSON values; None also while there is no result."""
        return None if self.result_json is None else decode_json(self.result_json)


@dataclass(frozen=True, slots=True)
class EffectStats:
    """How many records are in each state. `unknown` counts those, too, whose owner's time has run out."""

    pending: int
    unknown: int
    failed: int
    done: int
