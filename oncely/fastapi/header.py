"""The Idempotency-Key header: what a client may send, and the key that it stands for.

Its value is a string of RFC 8941, in quotation marks with \\" and \\\\ as the only escapes, or the key
bare. Both forms are the same key. Whatever could be read in two ways is refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Depends, Header, HTTPException, Request
from pydantic.json_schema import SkipJsonSchema
from starlette.datastructures import Headers

from oncely.errors import OncelyError
from oncely.idempotency import is_valid_key

__all__ = [
    "HEADER",
    "SCOPE",
    "IdempotencyKeyHeader",
    "InvalidKeyHeader",
    "key_parameter",
    "missing_key",
    "read_key",
]

HEADER = "Idempotency-Key"

SCOPE = "oncely.fastapi"
"""Where a request's ASGI scope holds its Exchange, on a route of `idempotent_route`."""


class InvalidKeyHeader(OncelyError):
    """The request's Idempotency-Key is missing or malformed: 400. `detail` is for the client to read."""

    def __init__(self, detail: str, *, missing: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.missing = missing


def read_key(headers: Headers) -> str | None:
    """The request's key, or None without the header. Raises InvalidKeyHeader."""
    values = headers.getlist(HEADER)
    if not values:
        return None
    if len(values) > 1:
        raise InvalidKeyHeader(f"The {HEADER} header was sent {len(values)} times. Send it once.")
    value = values[0].strip(" \t")
    quoted = _STRING.fullmatch(value)
    key = _ESCAPED.sub(r"\1", quoted[1]) if quoted else value
    if (value.startswith('"') and not quoted) or not is_valid_key(key):
        raise InvalidKeyHeader(f"The {HEADER} header {_flaw(value, key)}. {_RULE}")
    return key


def missing_key() -> InvalidKeyHeader:
    """The error of a request that needs a key and has none."""
    return InvalidKeyHeader(
        f"This request needs an {HEADER} header: a value of your choice, new for each request and the same "
        f"when you send the request again, as a UUID. {_RULE}",
        missing=True,
    )


def key_parameter(*, required: bool) -> dict[str, Any]:
    """The header as a parameter of an OpenAPI operation."""
    schema = {"type": "string", **_SCHEMA}
    return {"name": HEADER, "in": "header", "required": required, "description": _RULE, "schema": schema}


async def _required_key(
    request: Request,
    # For the OpenAPI document. Read from the request, where a header that was sent twice is still two.
    idempotency_key: Annotated[
        str | SkipJsonSchema[None],
        Header(alias=HEADER, description=f"Required. {_RULE}", json_schema_extra=_SCHEMA),
    ] = None,
) -> str:
    try:
        key = read_key(request.headers)
        if key is None:
            raise missing_key()
    except InvalidKeyHeader as error:
        known = {InvalidKeyHeader, OncelyError} & request.app.exception_handlers.keys()
        if SCOPE in request.scope or known:
            raise
        raise HTTPException(400, error.detail) from error
    return key


IdempotencyKeyHeader = Annotated[str, Depends(_required_key)]
"""The request's key, parsed and checked: 400 when it is missing or malformed."""


def _flaw(value: str, key: str) -> str:
    if not key:
        return "is empty"
    if value.startswith('"') and value == key:
        return 'begins with a quotation mark, but is not one string "…" with only \\" and \\\\ as escapes'
    if not _PRINTABLE.fullmatch(key):
        return "has a space or a character that is not printable ASCII"
    return f"is a key of {len(key)} characters"


_RULE = 'A key has 8 to 255 printable ASCII characters without spaces, as it is or as a string "…".'
_STRING = re.compile(r'"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
_ESCAPED = re.compile(r'\\(["\\])')
_PRINTABLE = re.compile(r"[\x21-\x7e]*")

_SCHEMA: dict[str, Any] = {
    "minLength": 8,
    "maxLength": 512,  # 255 escaped characters and two quotation marks
    "pattern": r'^([!#-~][!-~]{7,254}|"([!#-\[\]-~]|\\["\\]){8,255}")$',
}
