"""What a request was answered with, and how a row keeps it.

A body is str, bytes or None and comes back as the same type, byte for byte: text in
`response_body`, bytes in `response_bytes`, and neither for None. Headers are kept as pairs, so two
of one name stay two. A row holds an answer when its `response_code` is set; an empty body or no
headers is an answer too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlalchemy import Integer, LargeBinary, Text
from sqlalchemy.types import TypeEngine

from oncely.storable import decode_json, encode_json

__all__ = ["ANSWER", "Answer", "Body", "Headers", "Outcome", "answer_parameters", "read_answer"]

Body: TypeAlias = str | bytes | None
"""What an answer says."""

Headers: TypeAlias = Mapping[str, str] | Iterable[tuple[str, str]]
"""How headers are given. They are kept and returned as a tuple of pairs."""


@dataclass(frozen=True, slots=True, init=False)
class Answer:
    """What the work of a key returns: a status, a body, headers.

    Raises TypeError and ValueError when it is made for what a row cannot hold: a status that is no
    32-bit integer, another type of body, text with NUL or an unpaired surrogate.
    """

    status: int
    body: Body
    headers: tuple[tuple[str, str], ...]

    def __init__(self, status: int, body: Body, headers: Headers = ()) -> None:
        object.__setattr__(self, "status", _status(status))
        object.__setattr__(self, "body", _body(body))
        object.__setattr__(self, "headers", _pairs(headers) if headers else ())


@dataclass(frozen=True, slots=True, init=False)
class Outcome:
    """The answer of a key. `replayed` is True when the work was done by an earlier request."""

    status: int
    body: Body
    replayed: bool
    headers: tuple[tuple[str, str], ...]

    def __init__(self, status: int, body: Body, replayed: bool, headers: Headers = ()) -> None:
        object.__setattr__(self, "status", status)
        object.__setattr__(self, "body", body)
        object.__setattr__(self, "replayed", replayed)
        object.__setattr__(self, "headers", _pairs(headers) if headers else ())


ANSWER: dict[str, TypeEngine[Any] | type[TypeEngine[Any]]] = {
    "status": Integer,
    "headers": Text,
    "text": Text,
    "bytes": LargeBinary,
}
"""The parameters of a statement that stores an answer. `headers` is JSON text."""


def answer_parameters(answer: Answer) -> dict[str, Any]:
    """The values of ANSWER."""
    return {
        "status": answer.status,
        "headers": encode_json(answer.headers, what="headers") if answer.headers else None,
        "text": answer.body if isinstance(answer.body, str) else None,
        "bytes": answer.body if isinstance(answer.body, bytes) else None,
    }


def read_answer(status: int, headers: str | None, text: str | None, data: bytes | None) -> Outcome:
    """The stored answer of a row; `headers` is JSON text, in which version 0.1.0 wrote an object."""
    kept = () if headers is None else decode_json(headers)
    return Outcome(status, text if data is None else data, True, kept)


def _status(status: object) -> int:
    if not isinstance(status, int) or isinstance(status, bool):
        raise TypeError(f"status must be an int, not {type(status).__name__}")
    if not -(2**31) <= status < 2**31:
        raise ValueError(f"status {status} is not a 32-bit integer")
    return int(status)


def _body(body: object) -> Body:
    if body is None or isinstance(body, bytes):
        return body
    if not isinstance(body, str):
        raise TypeError(f"body must be str, bytes or None, not {type(body).__name__}; encode it first")
    if "\0" in body:
        raise ValueError("body: text with a NUL character cannot be stored; pass bytes")
    try:
        body.encode()
    except UnicodeEncodeError:
        raise ValueError("body: text with an unpaired surrogate cannot be stored; pass bytes") from None
    return body


def _pairs(headers: Headers) -> tuple[tuple[str, str], ...]:
    given: object = headers.items() if isinstance(headers, Mapping) else headers
    if not isinstance(given, Iterable):
        raise TypeError(f"headers must be pairs of str, not {type(given).__name__}")
    pairs = tuple(tuple(pair) if isinstance(pair, Iterable) else (pair,) for pair in given)
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(word, str) for word in pair):
            raise TypeError(f"headers must be pairs of str, not {pair!r}")
    encode_json(pairs, what="headers")  # a NUL or an unpaired surrogate is refused here, not when stored
    return pairs
