"""Idempotency keys: a request that arrives twice does its work once, and both get the same answer.

The key's row, the work's writes and the stored answer are in the caller's transaction: they commit
together or not at all, so a crash at any point leaves the key free. PostgreSQL alone decides who
works on a key: whoever gets the key's advisory transaction lock and then writes its row.

    free ──claim──▶ held ──settle──▶ answered ──expires · prune · forget──▶ free
                      └──abandon · rollback · crash──▶ free

`run` stands on `claim` and on the `Claim` it returns. Both are public, for a web framework that
renders the response between the two.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Literal, TypeAlias

from sqlalchemy import MetaData, Table

from oncely.answer import Answer, Body, Outcome
from oncely.arguments import check_count, check_wait
from oncely.claim import Claim, check_ttl
from oncely.errors import InvalidKey, KeyInFlight, KeyInUse, KeyReused, KeyUnanswered, Refused
from oncely.gate import Gate, Miss, Request, fingerprint
from oncely.storable import check_key
from oncely.stored_keys import KeyRecord, KeyStats, StoredKeys
from oncely.tables import idempotency_table
from oncely.telemetry.commit import tell_when_committed
from oncely.telemetry.observer import Observer, guarded
from oncely.telemetry.records import RequestGuarded
from oncely.transaction import Caller, is_retryable, owner_of

__all__ = [
    "Answer",
    "Claim",
    "IdempotencyKeys",
    "KeyRecord",
    "KeyStats",
    "Outcome",
    "Work",
    "fingerprint",
    "is_retryable",
    "is_valid_key",
]

Work: TypeAlias = Callable[[], Awaitable[Answer | tuple[int, Body]]]
"""What a key guards: an async callable without arguments that returns `(status, body)` or an Answer."""


class IdempotencyKeys:
    """The keys of one application: a table on its MetaData, and what is done with it.

    `session` is everywhere an AsyncSession, an async_scoped_session or an AsyncConnection, whose
    transaction the caller owns: nothing here commits it or rolls it back. The `observer` is told how
    each request went (`oncely.telemetry.RequestGuarded`).
    """

    table: Table

    def __init__(
        self,
        metadata: MetaData,
        table_name: str = "idempotency_keys",
        schema: str | None = None,
        *,
        observer: Observer | None = None,
    ) -> None:
        self.table = idempotency_table(metadata, table_name, schema)
        self._observer = guarded(observer)
        self._gate = Gate(self.table)
        self._stored = StoredKeys(self.table)

    async def run(
        self,
        session: Caller,
        *,
        scope: str,
        key: str,
        fingerprint: bytes,
        work: Work,
        wait: timedelta | None = None,
        ttl: timedelta | None = None,
    ) -> Outcome:
        """The answer of this key: the stored one, or, if the key is free, that of `work`.

        `scope` says whose key it is, `fingerprint` what was asked. While another transaction works
        on the key, this waits for it: without end, for `wait` at most, or not at all with
        timedelta(0). The answer is kept for `ttl`, or until it is pruned. Pending objects of the
        session are flushed first.

        The work runs in a savepoint. When it raises Refused, its writes are undone and the refusal
        is stored as the answer. When it raises anything else, its writes are undone, nothing is
        stored, and the error goes on; the key is free when the transaction ends. The work must not
        end the transaction: KeyLost.

        Raises, before any SQL: InvalidKey for a scope or key that cannot be stored, TypeError and
        ValueError for other arguments, NoTransaction in autocommit. Raises KeyReused for another
        fingerprint than the stored one, KeyInFlight when the wait has ended (the transaction is
        still usable), KeyInUse inside the key's own work, KeyUnanswered for a key that was committed
        without an answer. Serialization failures and deadlocks pass through: see `is_retryable`.
        """
        check_ttl(ttl)
        if not callable(work):
            raise TypeError(f"work must be an async callable, not {type(work).__name__}")
        held = await self.claim(session, scope=scope, key=key, fingerprint=fingerprint, wait=wait)
        if isinstance(held, Outcome):
            return held
        try:
            try:
                answer = await _answer(work)
            except Refused as refusal:
                answer = Answer(refusal.status, refusal.body, refusal.headers)
                await held.undo()
            return await held.settle(answer, ttl=ttl)
        except BaseException as error:
            if not isinstance(error, GeneratorExit):  # then nothing can be awaited any more
                await held.abandon(error)
            raise

    async def claim(
        self, session: Caller, *, scope: str, key: str, fingerprint: bytes, wait: timedelta | None = None
    ) -> Outcome | Claim:
        """The stored answer of this key, or the claim on it: then the caller does the work.

        The first half of `run`, with its arguments and errors. A claim must be settled or abandoned
        before the transaction is committed.
        """
        check_key(scope, "scope")
        check_key(key, "key")
        if not key:
            raise InvalidKey("key is empty")
        if not isinstance(fingerprint, bytes):
            raise TypeError(f"fingerprint must be bytes, not {type(fingerprint).__name__}")
        if wait is not None:
            check_wait(wait, "wait")
        seconds = math.inf if wait is None else wait.total_seconds()
        caller = owner_of(session)
        request = Request(caller, scope, key, fingerprint)
        begun = time.monotonic()
        try:
            held = await self._enter(request, begun + seconds, max(_RETRY_AFTER, wait or _RETRY_AFTER))
        except tuple(_TOLD) as error:
            if self._observer is not None:
                self._observer(self._told(_TOLD[type(error)], begun))
            raise
        if (observer := self._observer) is None:
            return held
        if isinstance(held, Outcome):
            observer(self._told("replayed", begun))
        else:
            held.on_settled = lambda refused: tell_when_committed(
                session, observer, self._told("refused" if refused else "first", begun)
            )
        return held

    async def _enter(self, request: Request, deadline: float, retry_after: timedelta) -> Outcome | Claim:
        """The answer or the claim, waited for until the monotonic time `deadline`."""
        caller = request.caller
        held = await caller.run_sync(self._gate.enter, request)
        if held is Miss.STALE:
            held = await caller.run_sync(self._gate.enter, request)
        pause = _PAUSE
        while isinstance(held, Miss):
            left = deadline - time.monotonic()
            if held is Miss.TIMEOUT or left <= 0:
                raise KeyInFlight(request.scope, request.key, retry_after)
            if held is Miss.BUSY:
                held = await caller.run_sync(self._gate.enter_in_turn, request, left)
            else:
                await asyncio.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)
                held = await caller.run_sync(self._gate.enter, request)
        return held

    async def get(self, session: Caller, *, scope: str, key: str) -> Outcome | None:
        """The stored answer of this key; None when it has none, or none any more."""
        check_key(scope, "scope")
        check_key(key, "key")
        return await self._stored.answer(session, scope, key)

    async def record(self, session: Caller, *, scope: str, key: str) -> KeyRecord | None:
        """What is stored of this key, also when it has no answer or has expired; None when nothing is."""
        check_key(scope, "scope")
        check_key(key, "key")
        return await self._stored.record(session, scope, key)

    async def stats(self, session: Caller, *, at_most: int = 100_000) -> KeyStats:
        """Counts of the stored keys, by one statement.

        A count that has reached `at_most` may be higher: so far it was counted.
        """
        check_count(at_most, "at_most")
        return await self._stored.stats(session, at_most=at_most)

    async def forget(self, session: Caller, *, scope: str, key: str | None = None) -> int:
        """Make this key, or all of the scope, free once the caller commits; returns how many.

        Waits for transactions that change one of them. A key whose work runs in this very
        transaction stays.
        """
        check_key(scope, "scope")
        if key is not None:
            check_key(key, "key")
        return await self._stored.forget(session, scope, key)

    async def prune(
        self, session: Caller, *, older_than: timedelta | datetime, limit: int | None = None
    ) -> int:
        """Delete keys that have expired, and those without a ttl made before `older_than`; returns how many.

        `older_than` is an age or an aware time. In batches of 1,000, skipping keys that somebody has
        locked, up to `limit`.
        """
        return await self._stored.prune(session, older_than=older_than, limit=limit)

    async def prunable(
        self, session: Caller, *, older_than: timedelta | datetime, at_most: int = 100_000
    ) -> int:
        """How many keys `prune` would delete, none counted beyond `at_most`."""
        check_count(at_most, "at_most")
        return await self._stored.prunable(session, older_than=older_than, at_most=at_most)

    def _told(self, outcome: _Told, begun: float) -> RequestGuarded:
        duration = timedelta(seconds=time.monotonic() - begun)
        return RequestGuarded(keys=self.table.fullname, outcome=outcome, duration=duration)


def is_valid_key(key: object) -> bool:
    """Whether a client may send this as a key: 8 to 255 printable ASCII characters without spaces.

    Stricter than what can be stored: see InvalidKey.
    """
    return isinstance(key, str) and _CLIENT_KEY.fullmatch(key) is not None


async def _answer(work: Work) -> Answer:
    working = work()
    if not inspect.isawaitable(working):
        raise TypeError(f"work must be an async callable; it returned {type(working).__name__} at once")
    given: object = await working
    if isinstance(given, Answer):
        return given
    if not isinstance(given, tuple) or len(given) != 2:
        raise TypeError(f"work must return (status, body) or an Answer, not {type(given).__name__}")
    return Answer(*given)


_Told: TypeAlias = Literal["first", "refused", "replayed", "in_flight", "reused", "in_use", "unanswered"]

_TOLD: dict[type[Exception], _Told] = {
    KeyInFlight: "in_flight",
    KeyReused: "reused",
    KeyInUse: "in_use",
    KeyUnanswered: "unanswered",
}
"""The errors that say how a request went."""

_CLIENT_KEY = re.compile(r"[\x21-\x7e]{8,255}")
_PAUSE = 0.005  # seconds
_LONGEST_PAUSE = 0.1
_RETRY_AFTER = timedelta(seconds=1)
