"""What one `idempotent_route` was asked for, checked once."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from fastapi import Request

from oncely.arguments import check_count, check_kind, check_wait
from oncely.claim import check_ttl
from oncely.idempotency import IdempotencyKeys
from oncely.idempotency import fingerprint as digest
from oncely.transaction import Sessionmaker, check_sessionmaker

__all__ = ["Fingerprint", "Policy", "ScopeOf"]

ScopeOf: TypeAlias = Callable[[Request], str | Awaitable[str]]
"""Whose key a request's is: who was authenticated, never what the client may choose."""

Fingerprint: TypeAlias = Callable[[Request], bytes | Awaitable[bytes]]
"""What was asked, apart from the method and the path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The settings of a route class. `headers` are lower-case names, `max_body` is in bytes.

    Raises TypeError and ValueError for settings that could not work.
    """

    keys: IdempotencyKeys
    sessionmaker: Sessionmaker
    scope: ScopeOf
    required: bool
    methods: frozenset[str]
    wait: timedelta | None
    ttl: timedelta | None
    refusals: frozenset[int]
    headers: frozenset[bytes]
    fingerprint: Fingerprint
    max_body: int

    def __post_init__(self) -> None:
        check_kind(self.keys, IdempotencyKeys, "keys")
        check_sessionmaker(self.sessionmaker)
        check_ttl(self.ttl)
        if self.wait is not None:
            check_wait(self.wait, "wait")
        for what, given in (("scope", self.scope), ("fingerprint", self.fingerprint)):
            if not callable(given):
                raise TypeError(f"{what} must be a function of the request, not {type(given).__name__}")
        if not all(300 <= status < 500 for status in self.refusals):
            raise ValueError(f"refusals must be statuses from 300 to 499, not {sorted(self.refusals)}")
        check_count(self.max_body, "max_body", least=0)

    async def scope_of(self, request: Request) -> str:
        given = self.scope(request)
        found: object = await given if inspect.isawaitable(given) else given
        if not isinstance(found, str):
            raise TypeError(f"scope must return a str, not {type(found).__name__}")
        return found

    async def fingerprint_of(self, request: Request) -> bytes:
        """With the method and the path: an answer is never given to a request for something else."""
        given = self.fingerprint(request)
        found: object = await given if inspect.isawaitable(given) else given
        if not isinstance(found, bytes):
            raise TypeError(f"fingerprint must return bytes, not {type(found).__name__}")
        return digest(request.method, request.scope["path"], found)
