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

_PENDING = "oncely.telemetry"
"""Where a session keeps what is to be told, each with the transaction or savepoint that it happened in."""


def tell_when_committed(caller: Caller, observer: GuardedObserver, record: Record) -> None:
    """Tell the observer once the caller's transaction is committed."""
    owner = owner_of(caller)
    if isinstance(owner, AsyncConnection):
        observer(record)
        return
    session = owner.sync_session
    transaction = session.get_nested_transaction() or session.get_transaction()
    assert transaction is not None  # noqa: S101  something was written in it
    pending = session.info.get(_PENDING)
    if pending is None:
        pending = session.info[_PENDING] = []
        # On the class, and once: on each session they would take longer than what they wait for.
        if not event.contains(Session, "after_commit", _tell):
            event.listen(Session, "after_commit", _tell)
            event.listen(Session, "after_soft_rollback", _forget_rolled_back)
            event.listen(Session, "after_transaction_end", _forget_closed)
    pending.append((transaction, observer, record))


def _tell(session: Session) -> None:
    if _PENDING in session.info and not session.in_nested_transaction():
        for _, observer, record in session.info.pop(_PENDING):
            observer(record)


def _forget_rolled_back(session: Session, ended: SessionTransaction) -> None:
    pending = session.info.get(_PENDING)
    if pending:
        pending[:] = [entry for entry in pending if not _is_within(entry[0], ended)]


def _forget_closed(session: Session, ended: SessionTransaction) -> None:
    if ended.parent is None:  # what is left was neither committed nor rolled back
        session.info.pop(_PENDING, None)


def _is_within(transaction: SessionTransaction | None, outer: SessionTransaction) -> bool:
    while transaction is not None and transaction is not outer:
        transaction = transaction.parent
    return transaction is outer
