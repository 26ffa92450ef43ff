"""The claim on an idempotency key: what its owner holds between finding it free and answering it.

The key's row is written, with no answer yet, and a savepoint stands before the work. A claim ends in
one of two ways: `settle` stores the answer in the row, `abandon` deletes the row. Until then the
transaction must not be committed; an AsyncSession refuses to.

    open ──settle──▶ ended          open ──undo──▶ undone ──settle──▶ ended
      └──abandon──▶ ended                            └──abandon──▶ ended
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Interval, RootTransaction, Table, Text, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from oncely.answer import ANSWER, Answer, Outcome, answer_parameters
from oncely.errors import KeyLost
from oncely.savepoint import Savepoint
from oncely.statement import Statement

__all__ = ["NAME", "Claim", "ClaimStatements", "check_ttl"]

NAME = {"scope": Text, "key": Text}
"""The parameters that name a key."""


class ClaimStatements:
    """The statements of the claims on one table, built once."""

    def __init__(self, table: Table) -> None:
        self.settle = Statement(_SETTLE, {"keys": table}, {**NAME, **ANSWER, "ttl": Interval})
        self.delete = Statement(_DELETE, {"keys": table}, {**NAME})


class Claim:
    """This caller owns the key until the claim is settled or abandoned. `IdempotencyKeys.claim` makes it."""

    scope: str
    key: str
    on_settled: Callable[[bool], object] | None = None
    """Told when an answer was stored, and whether it is a refusal."""

    def __init__(
        self,
        caller: AsyncSession | AsyncConnection,
        joined: Session | Connection,
        connection: Connection,
        statements: ClaimStatements,
        *,
        scope: str,
        key: str,
    ) -> None:
        self.scope = scope
        self.key = key
        self._caller = caller
        self._statements = statements
        self._connection = connection
        self._transaction = _begun(connection)
        self._ended = False
        self._undone = False
        self._releasing = False
        if isinstance(joined, Session):
            self._outer = joined.get_nested_transaction()
        self._savepoint = Savepoint(joined, connection)
        if isinstance(joined, Session):
            event.listen(joined, "before_commit", self._refuse_commit)

    async def settle(self, answer: Answer, *, ttl: timedelta | None = None) -> Outcome:
        """Keep the work's writes and store its answer, for `ttl` from now; the caller commits both.

        Raises KeyLost when the work has ended the transaction. After an error the claim is still to
        be abandoned.
        """
        check_ttl(ttl)
        await self._caller.run_sync(self._settle, answer, ttl)
        if self.on_settled is not None:
            self.on_settled(self._undone)
        return Outcome(answer.status, answer.body, False, answer.headers)

    async def undo(self) -> None:
        """Undo the work's writes and keep the claim, to settle it with a refusal.

        What the session had loaded before the work, and the work has changed, is loaded again.
        """
        await self._caller.run_sync(self._undo)

    async def abandon(self, error: BaseException | None = None) -> None:
        """Undo the work's writes and delete the key's row: the key is free when the transaction ends.

        With the `error` that is the reason, a failure to do so (when the connection is dead, PostgreSQL
        undoes everything by itself) becomes a note on it. Nothing happens when the claim has ended.
        """
        try:
            await self._caller.run_sync(self._abandon, reload=error is None or isinstance(error, Exception))
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"oncely: key {self.key!r} was not released by hand: {failure!r}")

    def __repr__(self) -> str:
        return f"Claim(scope={self.scope!r}, key={self.key!r})"

    def _settle(self, joined: Session | Connection, answer: Answer, ttl: timedelta | None) -> None:
        self._require_open()
        # Inside the savepoint, so that whatever goes wrong here undoes the work with the answer.
        self._savepoint.require_active()
        values = self._name | answer_parameters(answer) | {"ttl": ttl}
        if self._connection.execute(self._statements.settle, values).rowcount != 1:
            raise KeyLost(self.scope, self.key)
        if not self._undone:
            self._releasing = True
            try:
                self._savepoint.release()
            finally:
                self._releasing = False
        self._end(joined)

    def _undo(self, joined: Session | Connection) -> None:
        self._require_open()
        if self._undone:
            return
        self._savepoint.rollback()
        self._undone = True
        self._savepoint.reload()

    def _abandon(self, joined: Session | Connection, *, reload: bool) -> None:
        if self._ended:
            return
        try:
            if self._savepoint.is_open:
                self._savepoint.rollback()
        finally:
            if self._stands and not self._connection.invalidated:
                self._connection.execute(self._statements.delete, self._name)
        self._end(joined)
        if reload and self._stands:
            self._savepoint.reload()

    @property
    def _name(self) -> dict[str, Any]:
        return {"scope": self.scope, "key": self.key}

    @property
    def _stands(self) -> bool:
        """Whether the transaction that the key's row was written in goes on."""
        return self._connection.get_transaction() is self._transaction and self._transaction.is_active

    def _require_open(self) -> None:
        if self._ended:
            raise RuntimeError(f"{self!r} has ended: it was settled or abandoned")
        if not self._stands or not (self._undone or self._savepoint.is_open):
            raise KeyLost(self.scope, self.key)

    def _end(self, joined: Session | Connection) -> None:
        self._ended = True
        if isinstance(joined, Session):
            event.remove(joined, "before_commit", self._refuse_commit)

    def _refuse_commit(self, session: Session) -> None:
        """Before any commit of the session, savepoints included: none may go beyond the work."""
        if self._releasing or not self._stands or self._connection.invalidated:
            return
        if self._savepoint.is_innermost or session.get_nested_transaction() is self._outer:
            raise KeyLost(self.scope, self.key)


def _begun(connection: Connection) -> RootTransaction:
    transaction = connection.get_transaction()
    assert transaction is not None  # noqa: S101  the key's row was written in it
    return transaction


def check_ttl(ttl: timedelta | None) -> None:
    """Raise TypeError or ValueError unless an answer can be kept for so long."""
    if ttl is None:
        return
    if not isinstance(ttl, timedelta):
        raise TypeError(f"ttl must be a timedelta, not {type(ttl).__name__}")
    if not timedelta(0) < ttl <= _LONGEST_TTL:
        raise ValueError(f"ttl must be above zero and at most {_LONGEST_TTL.days:,} days, not {ttl}")


# PostgreSQL's calendar ends, and its error would come after the work.
_LONGEST_TTL = timedelta(days=365_000)

# A row of this transaction without an answer, and no other: the work may have ended the transaction.
_DELETE = """
DELETE FROM {keys} WHERE scope = :scope AND key = :key AND response_code IS NULL AND created_at = now()
"""

_SETTLE = """
UPDATE {keys}
SET response_code = :status, response_headers = CAST(:headers AS jsonb),
    response_body = :text, response_bytes = :bytes,
    expires_at = statement_timestamp() + CAST(:ttl AS interval)
WHERE scope = :scope AND key = :key AND response_code IS NULL AND created_at = now()
"""
