"""What one `idempotent_route` was asked for, checked once."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from fastapi import Request

from oncely.claim import check_ttl
from oncely.fastapi.fingerprint import request_fingerprint
from oncely.fastapi.kept import kept_headers
from oncely.idempotency import IdempotencyKeys, fingerprint
from oncely.transaction import Sessionmaker

__all__ = ["Fingerprint", "Policy", "ScopeOf"]

ScopeOf: TypeAlias = Callable[[Request], str | Awaitable[str]]
"""Whose key a request's is: who was authenticated, never what the client may choose."""

Fingerprint: TypeAlias = Callable[[Request], bytes | Awaitable[bytes]]
"""What was asked, apart from the method and the path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The settings of a route class. `headers` are lower-case names, `max_body` is in bytes."""

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

    @classmethod
    def make(
        cls,
        keys: IdempotencyKeys,
        sessionmaker: Sessionmaker,
        *,
        scope: ScopeOf,
        required: bool,
        methods: Iterable[str],
        wait: timedelta | None,
        ttl: timedelta | None,
        refusals: Iterable[int],
        headers: Iterable[str],
        fingerprint: Fingerprint | None,
        max_body: int,
    ) -> Policy:
        """Raises TypeError and ValueError for settings that could not work."""
        check_ttl(ttl)
        if not callable(scope):
            raise TypeError(f"scope must be a function of the request, not {type(scope).__name__}")
        statuses = frozenset(int(status) for status in refusals)
        if not all(300 <= status < 500 for status in statuses):
            raise ValueError(f"refusals must be statuses from 300 to 499, not {sorted(statuses)}")
        if max_body < 0:
            raise ValueError(f"max_body is below zero: {max_body}")
        return cls(
            keys=keys,
            sessionmaker=sessionmaker,
            scope=scope,
            required=required,
            methods=frozenset(method.upper() for method in methods),
            wait=wait,
            ttl=ttl,
            refusals=statuses,
            headers=kept_headers(headers),
            fingerprint=fingerprint or request_fingerprint,
            max_body=max_body,
        )

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
        return fingerprint(request.method, request.scope["path"], found)
