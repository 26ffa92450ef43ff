"""A savepoint in the caller's transaction, so that a piece of work can be undone alone.

Rolling a session back to a savepoint expires the objects that were changed inside it; under asyncio
the next look at such an object would raise MissingGreenlet. So what was loaded before and is expired
by the rollback is loaded again, here, while the database may be asked.

These functions are synchronous: they run inside `run_sync`, several statements in one switch.
"""

from __future__ import annotations

from sqlalchemy import Connection, NestedTransaction, Table, inspect
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import InstanceState, Session, SessionTransaction

__all__ = ["Savepoint", "connection_of"]


def connection_of(caller: Session | Connection, table: Table) -> Connection:
    """The connection of the caller's transaction; `table` decides where a session has several engines."""
    if isinstance(caller, Connection):
        return caller
    return caller.connection(bind_arguments={"clause": table})


class Savepoint:
    """Set when it is made. `release` keeps what was done since, `rollback` undoes it.

    On a session it is the session's own nested transaction, so pending objects are flushed when it
    is set and when it is released, and every database of the session takes part.
    """

    def __init__(self, caller: Session | Connection, connection: Connection) -> None:
        self._session = caller if isinstance(caller, Session) else None
        self._connection = connection
        self._loaded: list[tuple[InstanceState[object], tuple[str, ...]]] = []
        self._nested: SessionTransaction | NestedTransaction
        if isinstance(caller, Session):
            states = map(inspect, caller.identity_map.values())
            self._loaded = [(state, tuple(state.dict)) for state in states]
        self._nested = caller.begin_nested()
        # A session sets its savepoint when it first uses the connection. Work that was given the
        # connection before would run ahead of it.
        self.require_active()

    @property
    def is_open(self) -> bool:
        """False when it was released or rolled back, or when its transaction ended."""
        if self._session is None:
            return self._nested.is_active
        nested = self._session.get_nested_transaction()
        while nested is not None and nested is not self._nested:
            nested = nested.parent
        return nested is not None

    @property
    def is_innermost(self) -> bool:
        """Whether the session's next commit of a savepoint would be of this one."""
        return self._session is not None and self._session.get_nested_transaction() is self._nested

    def require_active(self) -> None:
        """Raise PendingRollbackError when a flush has failed inside and the session rolled back with it."""
        if self._session is not None:
            self._session.connection(bind_arguments={"bind": self._connection})

    def release(self) -> None:
        """Keep what was done. Flushes first, so the errors of the work's objects are raised here."""
        self._nested.commit()

    def rollback(self) -> None:
        """Undo what was done. Then `reload`, before the session's objects are read."""
        self._nested.rollback()

    def reload(self) -> None:
        """Load what was loaded when the savepoint was set and is expired now."""
        for state, names in self._loaded:
            instance = state.object
            if instance is None or self._session is None or state.session is not self._session:
                continue
            mapper = state.mapper
            expired = [
                name
                for name in names
                if name not in state.dict and (name in mapper.column_attrs or name in mapper.relationships)
            ]
            if expired and state.persistent:
                _refresh(self._session, instance, expired)


def _refresh(session: Session, instance: object, names: list[str]) -> None:
    try:
        session.refresh(instance, names)
    except InvalidRequestError:
        # Another transaction has deleted the row meanwhile: there is nothing to load.
        return
