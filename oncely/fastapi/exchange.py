"""One request on its way through a guarded route: its session, its claim, and how both end.

    dependencies, validation ─▶ claim ─▶ endpoint ─────────▶ response ─▶ settle, commit ─▶ first byte
                                  │          └─ refusal ─▶ undo ─▶ rendered ─┘
                                  └─ an answer is there ───────────────▶ replay ─────────▶ first byte

The claim comes after the dependencies, so that a replay has passed the route's own authentication, and
after validation. Whatever goes wrong before the commit ends the transaction, and with it the claim. A
refusal goes on as the exception that it is, so that dependencies see it and the application renders it;
what was rendered is stored on its way out.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from fastapi import HTTPException, Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from oncely.answer import Answer, Outcome
from oncely.claim import Claim
from oncely.errors import Refused
from oncely.fastapi.fingerprint import BodyReader
from oncely.fastapi.header import HEADER, SCOPE, missing_key, read_key
from oncely.fastapi.kept import answer_from, body_of, outcome_response
from oncely.fastapi.policy import Policy
from oncely.fastapi.problem import Problem, TransactionConflict, problem_of
from oncely.idempotency import is_retryable

__all__ = ["Exchange", "exchange_of"]

_log = logging.getLogger(__name__)


class Exchange:
    """A context manager around one request's handling; its `receive` and `send` stand before the server's."""

    request: Request
    """FastAPI's own, which remembers the body that it has read."""

    def __init__(self, policy: Policy, scope: Scope, receive: Receive, send: Send) -> None:
        self.policy = policy
        self.guarded = scope["method"] in policy.methods
        self.receive = receive
        self.body: BodyReader | None = None
        if self.guarded and any(name.lower() == _HEADER for name, _ in scope["headers"]):
            self.body = BodyReader(scope, receive)
            self.receive = self.body.receive
        self._scope = scope
        self._send = send
        self._stack = AsyncExitStack()
        self._session: AsyncSession | None = None
        self._claim: Claim | None = None
        self._refusal: HTTPException | Refused | None = None
        self._replayed = False
        self._stored = False
        self._started = False
        self._held: Message | None = None

    async def __aenter__(self) -> Self:
        self._scope[SCOPE] = self
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, traceback)

    async def open(self) -> AsyncSession:
        """The request's session, in a transaction."""
        if self._session is None:
            self._session = await self._stack.enter_async_context(self.policy.sessionmaker())
            if not self._session.in_transaction():
                await self._session.begin()
        return self._session

    async def run(self, endpoint: Callable[[], Awaitable[Any]]) -> Any:
        """Claim the request's key and call the endpoint, or give the answer that is stored."""
        policy, request = self.policy, self.request
        key = read_key(request.headers) if self.guarded else None
        if key is None:
            if self.guarded and policy.required:
                raise missing_key()
            return await endpoint()
        scope = await policy.scope_of(request)
        fingerprint = await policy.fingerprint_of(request)
        session = await self.open()
        held = await policy.keys.claim(
            session, scope=scope, key=key, fingerprint=fingerprint, wait=policy.wait
        )
        if isinstance(held, Outcome):
            self._replayed = True
            return outcome_response(held, media_type=None)
        self._claim = held
        try:
            return await endpoint()
        except HTTPException as error:
            if error.status_code in policy.refusals:
                self._refusal = error
            raise
        except Refused as error:
            if error.status < _SERVER_ERROR:
                self._refusal = error
            raise

    async def finish(self, response: Response) -> None:
        """Store the answer and commit. A 5xx is not an answer: then everything is undone."""
        if self._replayed:
            response.background = None  # they ran with the first answer
        elif response.status_code >= _SERVER_ERROR:
            await self._release()
            return
        elif self._claim is not None:
            await self._settle(response.status_code, response.raw_headers, body_of(response))
        await self._commit()

    async def fail(self, error: Exception) -> None:
        """End the transaction, or, for a refusal, undo the work and keep the claim until it is rendered.

        Raises TransactionConflict for what PostgreSQL ended for others' sake.
        """
        if error is self._refusal and self._claim is not None and not is_retryable(error):
            await self._claim.undo()
            return
        self._refusal = None
        await self._release()
        if self.guarded and is_retryable(error):
            raise TransactionConflict from error

    async def send(self, message: Message) -> None:
        """Send what the route sends. A refusal is held back until it is stored and committed."""
        if self._refusal is None or message["type"] not in _RESPONSE:
            await self._forward(message)
        elif message["type"] == "http.response.start":
            self._held = message
        else:
            start, self._held = self._held, None
            refusal, self._refusal = self._refusal, None
            if start is None:
                raise RuntimeError("a response's body came before its start")
            await self._keep_refusal(refusal, start, message)
            await self._forward(start)
            await self._forward(message)

    async def problem(self, error: Exception) -> Problem | None:
        """What the client is told of an error that nobody has answered; None when it has to go on."""
        if self._started:
            return None
        self._refusal = None
        await self._release()
        return problem_of(error) if self.guarded else None

    async def _keep_refusal(self, refusal: HTTPException | Refused, start: Message, body: Message) -> None:
        named = refusal.status_code if isinstance(refusal, HTTPException) else refusal.status
        if start["status"] != named:
            # Something else is being said in its place. It is no answer of the endpoint's.
            await self._release()
            return
        if body.get("more_body", False):
            raise TypeError(f"the rendered {refusal!r} is a stream, which cannot be stored and replayed")
        await self._settle(start["status"], start.get("headers", ()), body.get("body", b""))
        await self._commit()

    async def _settle(self, status: int, raw_headers: Any, body: bytes) -> None:
        assert self._claim is not None  # noqa: S101  only what was claimed is answered or refused
        await self._claim.settle(self._answer(status, raw_headers, body), ttl=self.policy.ttl)

    def _answer(self, status: int, raw_headers: Any, body: bytes) -> Answer:
        if len(body) > self.policy.max_body:
            raise ValueError(
                f"{self._scope['method']} {self._scope['path']}: the answer's body has {len(body):,} bytes, "
                f"more than idempotent_route(max_body={self.policy.max_body:_}) may store, so nothing was "
                "done; raise max_body, or answer with less"
            )
        return answer_from(status, raw_headers, body, headers=self.policy.headers)

    async def _commit(self) -> None:
        if self._session is not None:
            await self._session.commit()
        self._stored = self._claim is not None

    async def _release(self) -> None:
        """Undo everything at once, and give the connection back."""
        if self._session is not None:
            await self._session.close()

    async def _forward(self, message: Message) -> None:
        self._started = self._started or message["type"] == "http.response.start"
        try:
            await self._send(message)
        except OSError as error:
            # The client has left. Its answer is stored, and what was to run after it still runs.
            if not self._stored:
                raise
            _log.debug("the client left before its answer: %r", error)


async def exchange_of(request: Request) -> Exchange:
    """The request's exchange. RuntimeError on a route that has none."""
    exchange = request.scope.get(SCOPE)
    if not isinstance(exchange, Exchange):
        raise RuntimeError(  # noqa: TRY004  not the type of an argument: there is none
            f"{request.method} {request.scope['path']} is no route of idempotent_route; "
            "give its router route_class=idempotent_route(…)"
        )
    return exchange


_HEADER = HEADER.lower().encode()
_SERVER_ERROR = 500
_RESPONSE = ("http.response.start", "http.response.body")
