"""Times on the command line: an age (90s, 15m, 12h, 7d, 2w), or a moment, an age ago or in ISO 8601."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from oncely.cli.failure import WRONG_USE, Failure

__all__ = ["age", "moment"]

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhdw])", re.ASCII)


def age(text: str, option: str) -> timedelta:
    """The age that the text says; Failure when it says none."""
    found = _AGE.fullmatch(text)
    if found is None:
        raise Failure(f"{option}: {text!r} is no age; write 90s, 15m, 12h, 7d or 2w", exit_code=WRONG_USE)
    try:
        return timedelta(**{_UNITS[found[2]]: float(found[1])})
    except OverflowError:
        raise Failure(f"{option}: {text!r} is too long ago", exit_code=WRONG_USE) from None


def moment(text: str | None, option: str) -> datetime | None:
    """The moment that the text says; an age counts back from now by this machine's clock."""
    if text is None:
        return None
    if _AGE.fullmatch(text):
        try:
            return datetime.now(UTC) - age(text, option)
        except OverflowError:
            return datetime.min.replace(tzinfo=UTC)
    try:
        given = datetime.fromisoformat(text)
    except ValueError:
        raise Failure(
            f"{option}: {text!r} is no moment; write 2026-01-31T12:00:00Z, or 2h for two hours ago",
            exit_code=WRONG_USE,
        ) from None
    if given.utcoffset() is None:
        raise Failure(f"{option}: {text!r} has no time zone; write {text}Z for UTC", exit_code=WRONG_USE)
    return given
