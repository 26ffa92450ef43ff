"""What is kept of a response, and the response that is made of it again.

Kept are the status, the body's bytes, what says how to read them (Content-Type, Content-Encoding), and
the headers on the route's list. A response that sends itself, as a stream or a file does, has no body
that could be kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from starlette.responses import Response

from oncely.answer import Answer, Body, Headers, Outcome
from oncely.errors import Refused

__all__ = [
    "answer_from",
    "body_of",
    "kept_headers",
    "outcome_response",
    "refused_response",
    "sends_itself",
]

REPLAYED = "Idempotency-Replayed"


def answer_from(
    status: int, raw_headers: Iterable[tuple[bytes, bytes]], body: bytes, *, headers: Collection[bytes]
) -> Answer:
    """The answer to store; `headers` are the lower-case names that are kept."""
    pairs = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in raw_headers
        if name.lower() in headers
    ]
    return Answer(status, body, pairs)


def body_of(response: Response) -> bytes:
    """The body's bytes. Raises TypeError for a response that sends itself."""
    if sends_itself(type(response)):
        raise TypeError(
            f"a {type(response).__name__} sends its body by itself, so it cannot be stored and replayed; "
            "answer with a body, or take the route off the router of idempotent_route"
        )
    return bytes(response.body)


def sends_itself(response_class: type[Response]) -> bool:
    """Whether such a response does more than to send its `body`: streams, files, server-sent events."""
    return response_class.__call__ is not Response.__call__


def outcome_response(outcome: Outcome, *, media_type: str | None = "application/json") -> Response:
    """The response of an outcome, marked when it is a replay.

    `media_type` is for a body without a Content-Type among the outcome's headers.
    """
    response = _response(outcome.status, outcome.body, outcome.headers, media_type)
    if outcome.replayed:
        response.headers[REPLAYED] = "true"
    return response


def refused_response(refused: Refused) -> Response:
    """The response of a refusal; its body is JSON unless its headers say otherwise."""
    return _response(refused.status, refused.body, refused.headers, "application/json")


def kept_headers(names: Iterable[str]) -> frozenset[bytes]:
    """The names of the headers to keep, in lower case. Raises ValueError for those that never can be."""
    chosen = {name.strip().lower() for name in names}
    never = chosen & _NEVER_KEPT
    if never:
        raise ValueError(f"headers that cannot be stored: {', '.join(sorted(never))}")
    return frozenset(name.encode("latin-1") for name in chosen | _ALWAYS_KEPT)


def _response(status: int, body: Body, headers: Headers, media_type: str | None) -> Response:
    pairs = list(headers.items() if hasattr(headers, "items") else headers)
    typed = not body or any(name.lower() == "content-type" for name, _ in pairs)
    response = Response(body, status, media_type=None if typed else media_type)
    for name, value in pairs:
        response.headers.append(name, value)
    return response


_ALWAYS_KEPT = frozenset({"content-type", "content-encoding"})
# Of one caller, of one connection, or made anew for each response.
_NEVER_KEPT = frozenset(
    {"connection", "content-length", "date", "keep-alive", "set-cookie", "transfer-encoding", "upgrade"}
)
