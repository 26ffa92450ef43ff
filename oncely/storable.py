"""What can be stored: the JSON of payloads, headers and results, the text of keys.

`encode_json` is the only encoder of them in oncely: what it accepts can be stored in a `jsonb` column
and read back, and what it refuses is refused before any SQL, with the place of the offending value.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from itertools import accumulate
from typing import Any
from uuid import UUID

from oncely.errors import InvalidKey

__all__ = ["check_key", "decode_json", "encode_json"]

LONGEST_KEY = 1_000
"""The longest key, topic or scope that is stored, in bytes of UTF-8; an index entry takes 2,700."""

DEEPEST = 500
"""The most levels of lists and objects in a payload; PostgreSQL's own limit depends on its stack."""


def encode_json(value: object, *, what: str = "payload") -> str:
    """JSON text for `value`, in a form that a jsonb column takes.

    Beside JSON's own types: aware datetime and date (ISO 8601), UUID, Decimal (a string), Enum (its
    value), dataclasses and pydantic models (their fields). Numbers, booleans and None as names of
    an object become strings, as in `json.dumps`. ValueError names the place of what cannot be
    stored: naive datetimes, bytes, NaN, infinities, integers too long to print, NUL, unpaired
    surrogates, cycles, more than 500 levels and every other type. `what` names the value in that
    message.
    """
    try:
        text = _ENCODER.encode(value)
        text.encode()  # an unpaired surrogate has no UTF-8
    except (TypeError, ValueError, RecursionError) as error:
        _find_refused(value, what)
        raise ValueError(f"{what}: {error}") from error
    # A NUL, or a harmless backslash before u0000.
    if "\\u0000" in text or (text.count("[") + text.count("{") > DEEPEST and _depth(text) > DEEPEST):
        _find_refused(value, what)
    return text


def decode_json(text: str) -> Any:
    """The values of a JSON text that encode_json wrote."""
    return _DECODER.decode(text)


def check_key(value: object, what: str) -> None:
    """Raise InvalidKey unless `value` is text that a key column and its index can take.

    That is a str of at most 1,000 bytes of UTF-8, without NUL and unpaired surrogates.
    """
    if not isinstance(value, str):
        raise InvalidKey(f"{what} must be a str, not {type(value).__name__}")
    try:
        _check_text(value, what)
    except ValueError as error:
        raise InvalidKey(str(error)) from None
    if len(value) * 4 > LONGEST_KEY and len(value.encode()) > LONGEST_KEY:
        raise InvalidKey(f"{what} has {len(value.encode()):,} bytes; at most {LONGEST_KEY:,} are stored")


def _plain(value: object) -> object:
    """What the encoder writes in the place of a value that JSON has no form for."""
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise ValueError("a datetime without a time zone")
        return value.isoformat()
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError(f"Decimal {value}")
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(type(value), "model_dump") and hasattr(type(value), "__pydantic_serializer__"):
        return value.model_dump()  # type: ignore[attr-defined]  # a pydantic model
    raise ValueError(f"a value of type {type(value).__name__}")


_ENCODER = json.JSONEncoder(default=_plain, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
_DECODER = json.JSONDecoder()  # json.loads looks at its options first, which takes as long as the decoding


_ESCAPED = re.compile(r"\\.")
_QUOTED = re.compile(b'"[^"]*"')
_NEITHER_QUOTE_NOR_BRACKET = bytes(set(range(256)) - set(b'"[]{}'))
_STEPS = dict(zip(b"[{]}", (1, 1, -1, -1), strict=True))


def _depth(text: str) -> int:
    """How many levels of lists and objects a JSON text has."""
    marks = _ESCAPED.sub("", text).encode().translate(None, _NEITHER_QUOTE_NOR_BRACKET)
    # Two quotes side by side do not change what is inside of quotes, and few are not side by side.
    brackets = _QUOTED.sub(b"", marks.replace(b'""', b""))
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def _find_refused(value: object, what: str) -> None:
    """Raise ValueError for the first place in `value` that cannot be stored, if there is one."""
    try:
        _check(value, what, (), 0)
    except RecursionError:  # the caller's own calls have used most of the stack
        raise ValueError(f"{what}: nested too deeply") from None


def _check(value: object, path: str, above: tuple[int, ...], depth: int) -> None:
    """Walks the value as the encoder does. `above` is what it is in, in `depth` lists and objects."""
    if id(value) in above:
        raise ValueError(f"{path}: the value contains itself")
    if isinstance(value, Enum):
        _check(value.value, path, above, depth)
    elif isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, int):
        _printed(value, path)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path}: {value} is not JSON")
    elif isinstance(value, (dict, list, tuple)):
        if depth == DEEPEST:
            raise ValueError(f"{path}: nested too deeply")
        for place, member in _members(value, path):
            _check(member, place, (*above, id(value)), depth + 1)
    elif value is not None:
        try:
            plain = _plain(value)
        except ValueError as error:
            raise ValueError(f"{path}: {error} is not JSON") from None
        _check(plain, path, (*above, id(value)), depth)


def _members(value: dict[Any, Any] | Sequence[Any], path: str) -> Iterator[tuple[str, object]]:
    """What is in a dict, list or tuple, each with its path; a dict's names are checked on the way."""
    if not isinstance(value, dict):
        for index, member in enumerate(value):
            yield f"{path}[{index}]", member
        return
    for name, member in value.items():
        if not (name is None or isinstance(name, (str, int, float))):
            raise ValueError(f"{path}: a key of type {type(name).__name__}; keys are strings")
        printed = _printed(name, f"a key of {path}")
        _check(name, f"{path} key {printed}", (), 0)
        yield f"{path}[{printed}]", member


def _printed(value: object, path: str) -> str:
    try:
        return repr(value)
    except ValueError:  # Python refuses to print integers of more than some thousand digits
        raise ValueError(f"{path}: an integer with too many digits") from None


def _check_text(text: str, path: str) -> None:
    if "\0" in text:
        raise ValueError(f"{path}: a NUL character cannot be stored")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path}: an unpaired surrogate cannot be stored") from None
