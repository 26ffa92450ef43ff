"""Delete finished rows in bounded batches.

What is finished, each room says in its own statement. Here is what they have in common: how a
cutoff is given, and that no statement deletes more than a batch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import DateTime, Interval
from sqlalchemy.types import TypeEngine

__all__ = ["CUTOFF", "cutoff_parameters", "delete_in_batches"]

BATCH = 1_000
"""The most rows that one statement deletes."""

CUTOFF: dict[str, TypeEngine[Any] | type[TypeEngine[Any]]] = {
    "cutoff": DateTime(timezone=True),
    "age": Interval,
}
"""The parameters of a statement that says `coalesce(:cutoff, statement_timestamp() - :age)`."""


def cutoff_parameters(older_than: timedelta | datetime) -> dict[str, Any]:
    """The values of CUTOFF: an age is counted back from now by the database's clock.

    Raises ValueError for a negative age and for a time without a time zone.
    """
    if isinstance(older_than, timedelta):
        if older_than < timedelta(0):
            raise ValueError(f"older_than is below zero: {older_than}")
        return {"cutoff": None, "age": older_than}
    if older_than.utcoffset() is None:
        raise ValueError("older_than is a time without a time zone")
    return {"cutoff": older_than, "age": None}


async def delete_in_batches(delete: Callable[[int], Awaitable[int]], limit: int | None) -> int:
    """Call `delete` with a batch's size until it deletes fewer or `limit` is reached; how many it were."""
    if limit is not None and limit < 0:
        raise ValueError(f"limit is below zero: {limit}")
    total = 0
    while limit is None or total < limit:
        size = BATCH if limit is None else min(BATCH, limit - total)
        deleted = await delete(size)
        total += deleted
        if deleted < size:
            break
    return total
