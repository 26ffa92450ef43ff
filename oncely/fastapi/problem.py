"""What a client is told when its key cannot be honoured: problem documents (RFC 9457).

| status | type ends in  | raised as                                                               |
|--------|---------------|-------------------------------------------------------------------------|
| 400    | key-missing   | InvalidKeyHeader                                                        |
| 400    | key-malformed | InvalidKeyHeader                                                        |
| 409    | key-in-flight | KeyInFlight; with Retry-After                                           |
| 409    | conflict      | TransactionConflict, serialization failures, deadlocks; with Retry-After |
| 422    | key-reused    | KeyReused                                                               |

An application that has an exception handler of its own for one of these answers in its own way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from oncely.errors import KeyInFlight, KeyReused, OncelyError
from oncely.fastapi.header import HEADER, InvalidKeyHeader
from oncely.idempotency import is_retryable

__all__ = ["Problem", "TransactionConflict", "add_problem_handlers", "problem_of", "problem_response"]


class TransactionConflict(OncelyError):
    """PostgreSQL ended the request's transaction for the sake of another one. Nothing of it was done.

    `__cause__` is the serialization failure or the deadlock.
    """

    def __str__(self) -> str:
        return "the request's transaction was ended for the sake of another one; nothing was done, try again"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem document. `retry_after` is in seconds."""

    status: int
    name: str
    title: str
    detail: str
    retry_after: int | None = None

    def response(self) -> Response:
        document = {
            "type": TYPE + self.name,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        headers = None if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return JSONResponse(document, self.status, headers, MEDIA_TYPE)


def problem_of(error: BaseException) -> Problem | None:
    """What the client is told of this error; None when it is not for the client."""
    if isinstance(error, InvalidKeyHeader):
        name, flaw = ("key-missing", "missing") if error.missing else ("key-malformed", "malformed")
        return Problem(400, name, f"{HEADER} is {flaw}", error.detail)
    if isinstance(error, KeyReused):
        return Problem(422, "key-reused", f"{HEADER} was used for another request", _REUSED)
    if isinstance(error, KeyInFlight):
        seconds = max(1, math.ceil(error.retry_after.total_seconds()))
        title = "The first request with this key is not finished"
        return Problem(409, "key-in-flight", title, _IN_FLIGHT, seconds)
    if isinstance(error, TransactionConflict) or is_retryable(error):
        return Problem(409, "conflict", "The request met another one", _CONFLICT, 1)
    return None


def add_problem_handlers(app: FastAPI) -> None:
    """Let the whole application answer oncely's errors of the table above as a guarded route does.

    For routes that use IdempotencyKeyHeader and `keys.run` by themselves. Serialization failures and
    deadlocks, which other routes have too, are left to the application.
    """
    for error in (InvalidKeyHeader, KeyReused, KeyInFlight, TransactionConflict):
        app.add_exception_handler(error, _answer)


def problem_response(
    status: int, description: str, *, schema: dict[str, Any] | None = None
) -> dict[str, Any]:
    """An OpenAPI response that is a problem document; `schema` is that of an application/json beside it."""
    content = {MEDIA_TYPE: {"schema": _schema()}}
    if schema is not None:
        content = {"application/json": {"schema": schema}, **content}
    response: dict[str, Any] = {"description": description, "content": content}
    if status == HTTPStatus.CONFLICT:
        seconds = {"type": "integer", "minimum": 1}
        response["headers"] = {"Retry-After": {"description": "In seconds.", "schema": seconds}}
    return response


async def _answer(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    assert problem is not None  # noqa: S101  each of the errors that it handles has one
    return problem.response()


def _schema() -> dict[str, Any]:
    text = {"type": "string"}
    return {
        "title": "Problem",
        "description": "A problem document of RFC 9457.",
        "type": "object",
        "properties": {
            "type": {"type": "string", "format": "uri"},
            "title": text,
            "status": {"type": "integer"},
            "detail": text,
        },
        "required": ["type", "title", "status", "detail"],
    }


MEDIA_TYPE = "application/problem+json"
TYPE = "urn:oncely:idempotency:"

_REUSED = (
    f"This {HEADER} came before with another method, path, query or body. Send a new key with a new "
    "request, and the same request with its own key."
)
_IN_FLIGHT = "Another request with this key is being worked on. Send this request again, with the same key."
_CONFLICT = "It was undone for the sake of another one. Nothing was done. Send it again, with the same key."
