"""Records of the caller's transaction: kept until it is committed, forgotten when it is rolled back.

A savepoint that is rolled back takes its records with it. A bare AsyncConnection does not say when it has
committed; there a record is told at once.
"""

from __future__ import annotations

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Session, SessionTransaction

from oncely.telemetry.observer import GuardedObserver
from oncely.telemetry.records import Record
from oncely.transaction import Caller, owner_of

__all__ = ["tell_when_committed"]

_KEY = "oncely.telemetry"


def tell_when_committed(caller: Caller, observer: GuardedObserver, record: Record) -> None:
    """Tell the observer once the caller's transaction is committed."""
    owner = owner_of(caller)
    if isinstance(owner, AsyncConnection):
        observer(record)
        return
    session = owner.sync_session
    pending = session.info.get(_KEY)
    if pending is None:
        pending = session.info[_KEY] = _Pending(session)
    pending.add(session, observer, record)


class _Pending:
    """What one session has to tell, each with the transaction or savepoint that it happened in."""

    def __init__(self, session: Session) -> None:
        self._records: list[tuple[SessionTransaction, GuardedObserver, Record]] = []
        event.listen(session, "after_commit", self._committed)
        event.listen(session, "after_soft_rollback", self._rolled_back)
        event.listen(session, "after_transaction_end", self._ended)

    def add(self, session: Session, observer: GuardedObserver, record: Record) -> None:
        transaction = session.get_nested_transaction() or session.get_transaction()
        assert transaction is not None  # noqa: S101  something was written in it
        self._records.append((transaction, observer, record))

    def _committed(self, session: Session) -> None:
        if session.in_nested_transaction():
            return
        records, self._records = self._records, []
        for _, observer, record in records:
            observer(record)

    def _rolled_back(self, session: Session, ended: SessionTransaction) -> None:
        self._records = [entry for entry in self._records if not _is_within(entry[0], ended)]

    def _ended(self, session: Session, ended: SessionTransaction) -> None:
        if ended.parent is None:  # what is left was neither committed nor rolled back: it was closed
            self._records.clear()


def _is_within(transaction: SessionTransaction | None, outer: SessionTransaction) -> bool:
    while transaction is not None and transaction is not outer:
        transaction = transaction.parent
    return transaction is outer
