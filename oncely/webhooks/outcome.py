"""What an endpoint's answer means: accepted, again later, or never."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Literal, TypeAlias

import httpx

__all__ = ["Outcome", "describe", "judge", "retry_after"]

Outcome: TypeAlias = Literal["delivered", "retry", "rejected", "expired", "quarantined", "released", "lost"]
"""How an attempt ended. delivered: the endpoint said 2xx. retry: it failed and is tried again later.
rejected: the endpoint said what no retry can mend. expired: it failed and there is no time left.
quarantined: it cannot be sent as it is, and is kept until somebody decides. released: it was given back
before anything was sent. lost: its lease had ended, or its end could not be recorded, so it may be sent
again by somebody else."""


def judge(status: int) -> Literal["delivered", "retry", "rejected"]:
    """2xx: delivered. 408, 425, 429 and 5xx: again later. Everything else, redirects too, ends it."""
    if 200 <= status < 300:
        return "delivered"
    return "retry" if status in (408, 425, 429) or 500 <= status < 600 else "rejected"


def retry_after(headers: httpx.Headers) -> timedelta | None:
    """How long the endpoint asks to wait: given in seconds, or as a date; None without a sensible wish.

    A date is read against the answer's own Date, so that two clocks that differ do no harm.
    """
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdecimal():
        return timedelta(seconds=min(int(value.lstrip("0")[:10] or 0), _LONGEST))
    until, now = _date(value), _date(headers.get("date", "")) or datetime.now(UTC)
    if until is None or until <= now:
        return None
    return min(until - now, timedelta(seconds=_LONGEST))


def describe(error: BaseException) -> str:
    """An error by the name of its class: its text may quote addresses, headers and bodies.

    Of the transport's errors, by what caused them.
    """
    if isinstance(error, httpx.TransportError) and error.__cause__ is not None:
        error = error.__cause__
    return type(error).__name__


_LONGEST = 7 * 86_400
"""Seconds. No webhook is tried for longer."""


def _date(value: str) -> datetime | None:
    try:
        parsed = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None
    return parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)
