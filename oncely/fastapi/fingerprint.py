"""What makes two requests of one key the same request.

Query, media type and body; the route adds the method and the path. Of JSON, the order of members and
white space do not matter, and everything else does: numbers count as they are written, so 1, 1.0 and
1.00 are three. Any other body counts byte for byte, with the whole Content-Type. A multipart form that
is encoded again has a new boundary, and is another request.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from oncely.fastapi.header import SCOPE
from oncely.idempotency import fingerprint

__all__ = ["BodyReader", "request_fingerprint"]


async def request_fingerprint(request: Request) -> bytes:
    """A fingerprint of the request's query, media type and body. Reads the body, if nobody has yet."""
    reader = getattr(request.scope.get(SCOPE), "body", None)
    if not isinstance(reader, BodyReader):
        reader = BodyReader(request.scope, request.receive)
        reader.add(await request.body())
    elif not reader.complete:
        await request.body()
    # Sorted by name only: the order of values under one name may have a meaning.
    query = sorted(request.query_params.multi_items(), key=lambda pair: pair[0])
    words = [word for pair in query for word in pair]
    return fingerprint(fingerprint(*words), *reader.content())


class BodyReader:
    """Stands before a request's `receive` and notes the body while others read it, as a form or a stream."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        content_type = Headers(scope=scope).get("content-type", "").strip()
        media_type = content_type.partition(";")[0].strip().lower()
        self.complete = False
        self._is_json = media_type == "application/json" or media_type.endswith("+json")
        self._type = media_type if self._is_json else content_type
        self._receive = receive
        self._digest = hashlib.sha256()
        self._chunks: list[bytes] = []

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.add(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        return message

    def add(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        if self._is_json:
            self._chunks.append(chunk)

    def content(self) -> tuple[str, str, bytes]:
        """The media type, how the body counts, and the body as it counts."""
        if self._is_json:
            canonical = _canonical(b"".join(self._chunks))
            if canonical is not None:
                return self._type, "json", canonical
        return self._type, "bytes", self._digest.digest()


def _canonical(body: bytes) -> bytes | None:
    """The body as JSON with sorted members; None for what is no JSON, or not the same JSON to everybody."""
    try:
        value = json.loads(body, parse_float=_number, parse_constant=_number, object_pairs_hook=_members)
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return None


def _number(written: str) -> dict[str, Any]:
    # As an object that _members never gives: a float would forget how it was written.
    return {"": written}


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("two members of one name")
    return {"": members} if members.keys() == {""} else members
