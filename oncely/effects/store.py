"""The store level: what `Effects.run` needs from the place that keeps the records.

Every function is a transaction of its own, over before it returns; none is open while a call is
made. Every change of an open record is conditional on the owner's token, and losing is an answer
(None or False), not an error. Tokens are random and never used again. Times are the store's clock.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Protocol
from uuid import uuid4

from oncely.effects.record import EffectRecord, Status

__all__ = ["FINISHED", "OPEN", "Store", "new_token"]

OPEN = frozenset({Status.PENDING, Status.UNKNOWN})
FINISHED = frozenset({Status.DONE, Status.FAILED})


def new_token() -> str:
    """122 random bits as a UUID's text, the form that providers know as an idempotency key."""
    return str(uuid4())


class Store(Protocol):
    """What is below `Effects.run`. `result` is what encode_json takes; `error` is class and message."""

    async def claim(self, key: str, args_hash: bytes, *, provider_token: str | None = None) -> str | None:
        """The token of the new owner, who may make the call; None when there is a record already."""
        ...

    async def extend(self, key: str, token: str, lease: timedelta) -> bool:
        """Whether the owner has `lease` from now. False once its time had run out, or it has finished.

        An owner that is told False must stop: somebody else may be making the call.
        """
        ...

    async def finish(
        self,
        key: str,
        token: str,
        status: Status,
        *,
        result: object = None,
        error: str | None = None,
        ttl: timedelta | None = None,
    ) -> bool:
        """Whether the end was recorded: done, failed or unknown. False when the record has changed hands.

        The time may have run out: as long as nobody took the record, what its owner knows is true.
        """
        ...

    async def take(
        self,
        record: EffectRecord,
        status: Status,
        *,
        result: object = None,
        error: str | None = None,
        ttl: timedelta | None = None,
    ) -> str | None:
        """Decide about an unknown record as it was read: the new token, or None when it has changed.

        PENDING makes the taker its owner, who calls again with the same provider token. DONE and
        FAILED record what was found out. UNKNOWN only shuts the old owner out. An owner whose time
        has not run out is not taken from, and a finished record stays as it is: both give None.
        """
        ...

    async def renew(
        self, record: EffectRecord, args_hash: bytes, *, provider_token: str | None = None
    ) -> str | None:
        """Open a finished record whose ttl has run out, as new: the token for one of many, else None."""
        ...

    async def get(self, key: str) -> EffectRecord | None:
        """The record of this key as it is now."""
        ...

    async def records(
        self, statuses: Collection[Status] | None = None, limit: int | None = None
    ) -> list[EffectRecord]:
        """Records of these statuses, newest first; without any, the open ones: pending and unknown."""
        ...

    async def purge(
        self,
        older_than: timedelta | float,
        statuses: Collection[Status] = FINISHED,
        *,
        limit: int | None = None,
    ) -> int:
        """Remove records that finished so long ago (seconds or a timedelta) and have no ttl to run.

        Returns how many. Never an open record: statuses other than done and failed are a ValueError.
        """
        ...

    async def delete(self, key: str, *, token: str | None = None) -> bool:
        """Remove the record, whatever it says; with `token`, only from its owner before the end."""
        ...
