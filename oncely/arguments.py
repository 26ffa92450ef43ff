"""What users give as arguments, checked before any SQL: with a type and a sentence, not a driver's error.

TypeError for what is of another type, ValueError for what is out of range, InvalidKey (a ValueError) for
text that no column can hold.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from functools import partial
from uuid import UUID

from oncely.backoff import Backoff
from oncely.storable import check_key

__all__ = [
    "LONGEST",
    "check_async",
    "check_backoff",
    "check_callable",
    "check_count",
    "check_duration",
    "check_id",
    "check_kind",
    "check_name",
    "check_takes",
    "check_text",
    "check_time",
    "check_wait",
    "ids_of",
]

MOST = 2**31 - 1
"""The largest count, an integer of PostgreSQL's."""


LONGEST = timedelta(days=36_500)
"""The longest duration that is counted from a database's now: PostgreSQL's calendar and SQLite's end."""


def check_async(function: object, what: str) -> None:
    """Raise TypeError for what is surely no async callable, such as a plain function.

    Called, it would have done its work already when the answer proves to be nothing to wait for. An
    async function may come bound, decorated, in a partial, or as the `__call__` of an object.
    """
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    if not callable(inner) or isinstance(inner, type):
        raise TypeError(f"{what} must be an async function, not {function!r}")
    known = [
        each for each in (inner, inspect.unwrap(inner), type(inner).__call__) if hasattr(each, "__code__")
    ]
    if known and not any(
        each.__code__.co_flags & _ASYNC or inspect.iscoroutinefunction(each) for each in known
    ):
        raise TypeError(f"{what} must be an async function, not the plain {function!r}")


_ASYNC = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE


def check_takes(function: Callable[..., object], what: str, *arguments: str, instead: str = "") -> None:
    """Raise TypeError for what surely cannot be called with these; `instead` goes after the sentence."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, it has none to show
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{what} is called with ({', '.join(arguments)}): {error}{instead}") from None


def check_callable(value: object, what: str) -> None:
    """Raise unless this can be called. Where it must also be async: `check_async`."""
    if not callable(value):
        raise TypeError(f"{what} must be a function, not {type(value).__name__}")


def check_kind(value: object, kind: type, what: str) -> None:
    """Raise unless this is an instance of `kind`."""
    if not isinstance(value, kind):
        article = "" if kind is bytes else "an " if kind.__name__[0] in "AEIOU" else "a "
        raise TypeError(f"{what} must be {article}{kind.__name__}, not {type(value).__name__}")


def check_name(value: object, what: str) -> None:
    """Raise unless this is a str with something in it, as a stream's name is."""
    check_kind(value, str, what)
    if not value:
        raise ValueError(f"{what} is empty")


def check_duration(value: object, what: str, *, longest: timedelta | None = None) -> None:
    """Raise unless this is a timedelta above zero, and, where a database is to add it, at most `longest`."""
    if not isinstance(value, timedelta):
        raise TypeError(f"{what} must be a timedelta, not {type(value).__name__}")
    if value <= timedelta(0):
        raise ValueError(f"{what} must be positive, not {value}")
    if longest is not None and value > longest:
        raise ValueError(f"{what} must be at most {longest.days:,} days, not {value}")


def check_wait(value: object, what: str) -> None:
    """Raise unless this is a timedelta of zero or more."""
    if not isinstance(value, timedelta):
        raise TypeError(f"{what} must be a timedelta, not {type(value).__name__}")
    if value < timedelta(0):
        raise ValueError(f"{what} is below zero: {value}")


def check_backoff(value: object, what: str) -> None:
    """Raise unless this is a Backoff: another thing would be found out at the first failure."""
    check_kind(value, Backoff, what)


def check_count(value: object, what: str, *, least: int = 1, most: int | None = MOST) -> None:
    """Raise unless this is an int from `least` to `most`, by default 2,147,483,647; True is none."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} must be an int, not {type(value).__name__}")
    if value < least:
        raise ValueError(f"{what} must be {least} or more, not {value}")
    if most is not None and value > most:
        raise ValueError(f"{what} must be {most:,} or less, not {value:,}")


def check_id(value: object, what: str) -> None:
    """Raise unless this is a UUID. Text is refused: what looks like an id may be another's."""
    if not isinstance(value, UUID):
        raise TypeError(f"{what} must be a UUID, not {type(value).__name__}")


def ids_of(values: object) -> list[UUID] | None:
    """The ids as a list; None, which is no choice, stays None, and nothing chosen is an empty list."""
    if values is None:
        return None
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"ids must be an iterable of UUIDs, not {type(values).__name__}")
    ids = list(values)
    for each in ids:
        check_id(each, "each of ids")
    return ids


def check_text(value: object, what: str) -> None:
    """Raise unless this is None, which is no choice, or text that a column can hold."""
    if value is not None:
        check_key(value, what)


def check_time(value: object, what: str) -> None:
    """Raise unless this is None, which is no bound, or a time with a time zone."""
    if value is None:
        return
    if not isinstance(value, datetime):
        raise TypeError(f"{what} must be a datetime, not {type(value).__name__}")
    if value.utcoffset() is None:
        raise ValueError(f"{what} is a time without a time zone")
