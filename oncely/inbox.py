"""Inbox: a message that arrives twice changes the database once.

A row says that a consumer has handled an event. It is written in the transaction of the handler's own
writes, so the two commit together or not at all: a crash between them cannot be. Delivery stays at
least once; the effect in this database is effectively once, as long as the row is kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import Connection, Engine, Integer, MetaData, Table, Text, Transaction, Uuid, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.event import contains, listen, remove
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, SessionTransaction

from oncely.arguments import check_async, check_callable, check_count, check_id, check_takes
from oncely.errors import InvalidKey, TransactionEnded
from oncely.event import Event, Handler
from oncely.retention import CUTOFF, CUTOFF_TIME, cutoff_parameters, delete_in_batches
from oncely.statement import Statement
from oncely.storable import check_key
from oncely.tables import inbox_table
from oncely.telemetry.commit import tell_when_committed
from oncely.telemetry.observer import Observer, guarded
from oncely.telemetry.records import MessageReceived
from oncely.transaction import Caller, Sessionmaker, check_sessionmaker, execute, join, owner_of, sqlstates

__all__ = ["Inbox", "InboxHandler", "InboxStats"]


@dataclass(frozen=True, slots=True)
class InboxStats:
    """How many rows there are, one for each consumer and event, and when the first and last were written."""

    handled: int
    oldest_at: datetime | None
    newest_at: datetime | None


@dataclass(frozen=True, slots=True, eq=False)
class InboxHandler:
    """What `Inbox.handler` makes; by its `inbox` and `sessionmaker` the command line finds the table."""

    inbox: Inbox
    sessionmaker: Sessionmaker
    handle: Callable[[AsyncSession, Event], Awaitable[object]]
    consumer: str

    async def __call__(self, event: Event) -> None:
        await self.inbox._handle_once(self, event)  # noqa: SLF001  the inbox made it


class Inbox:
    """What the consumers of one application have handled: a table on its MetaData.

    `consumer` names who handles: two consumers of one event each handle it once. Keep rows (`prune`)
    for longer than a message may take to come back, dead letters that are replayed included. The
    `observer` is told which were first and which duplicates (`oncely.telemetry.MessageReceived`).
    """

    table: Table

    def __init__(
        self,
        metadata: MetaData,
        *,
        table_name: str = "inbox",
        schema: str | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.table = inbox_table(metadata, table_name, schema)
        self._observer = guarded(observer)
        tables = {"inbox": self.table}
        self._insert = Statement(_INSERT, tables, {"consumer": Text, "event_id": Uuid})
        self._stats = Statement(_STATS, tables, {"at_most": Integer})
        self._prune = Statement(_PRUNE, tables, CUTOFF | {"limit": Integer})
        self._prunable = Statement(_PRUNABLE, tables, CUTOFF | {"at_most": Integer})

    async def run(
        self,
        session: Caller,
        event: Event | UUID,
        work: Callable[[], Awaitable[object]],
        *,
        consumer: str,
    ) -> bool:
        """Do `work` once for this consumer and event, in the caller's transaction.

        False: it was handled before, and `work` was not called. While another transaction handles
        the same event, this waits for it. When `work` raises, its writes and the row are undone, also
        if the caller catches the error and commits, and a later delivery runs it again.

        Raises, before any SQL: InvalidKey for a consumer that cannot be stored, NoTransaction in
        autocommit. Raises TransactionEnded when the work commits or rolls back the transaction, or
        catches the error of a flush, with which SQLAlchemy rolls back; the database's error when the
        work has caught that of another statement.
        """
        _check_consumer(consumer)
        check_callable(work, "work")
        if not isinstance(event, Event):
            check_id(event, "event")
        await join(session, self.table)
        async with session.begin_nested() as savepoint:
            if not await self._is_first(session, event, consumer):
                return False
            with _kept_open(session, self.table, savepoint.sync_transaction):
                await work()
        if self._observer is not None:
            record = MessageReceived(inbox=self.table.fullname, consumer=consumer, outcome="first")
            tell_when_committed(session, self._observer, record)
        return True

    def handler(
        self,
        sessionmaker: Sessionmaker,
        handle: Callable[[AsyncSession, Event], Awaitable[object]],
        *,
        consumer: str,
    ) -> Handler:
        """A handler for `StreamConsumer.subscribe` that calls `handle(session, event)` once per event.

        Each call is one transaction of its own, which holds the row and what `handle` writes. When
        `handle` has ended it, or caught the error of a statement, after which PostgreSQL rolls back
        whatever follows, that is TransactionEnded, and the message comes again. A statement that may
        fail belongs in a savepoint: `async with session.begin_nested()`. Not seen is what goes past
        SQLAlchemy: the text COMMIT or ROLLBACK, an error caught from the driver's own connection.
        """
        _check_consumer(consumer)
        check_sessionmaker(sessionmaker)
        check_async(handle, "handle")
        check_takes(handle, "handle", "session", "event")

        return InboxHandler(self, sessionmaker, handle, consumer)

    async def _handle_once(self, handler: InboxHandler, event: Event) -> None:
        async with handler.sessionmaker() as session:  # which rolls back what is not committed
            transaction = session.sync_session.begin()
            if not await self._is_first(session, event, handler.consumer):
                return
            _note_failures(session.sync_session.connection({"clause": self.table}))
            with _kept_open(session, self.table, transaction):
                await handler.handle(session, event)
            await session.run_sync(self._commit)
        if self._observer is not None:
            told = MessageReceived(inbox=self.table.fullname, consumer=handler.consumer, outcome="first")
            self._observer(told)

    async def stats(self, session: Caller, *, at_most: int = 100_000) -> InboxStats:
        """Counts of what was handled, by one statement.

        A count that has reached `at_most` may be higher: so far it was counted.
        """
        check_count(at_most, "at_most")
        found = await execute(session, self.table, self._stats, {"at_most": at_most})
        return InboxStats(**found.mappings().one())

    async def prune(
        self, session: Caller, *, older_than: timedelta | datetime, limit: int | None = None
    ) -> int:
        """Forget what was handled before `older_than` (an age or an aware time); returns how many rows.

        In batches of 1,000, skipping rows that somebody has locked, up to `limit`.
        """
        cutoff = cutoff_parameters(older_than)

        async def delete(size: int) -> int:
            return (await execute(session, self.table, self._prune, cutoff | {"limit": size})).rowcount

        return await delete_in_batches(delete, limit)

    async def prunable(
        self, session: Caller, *, older_than: timedelta | datetime, at_most: int = 100_000
    ) -> int:
        """How many rows `prune` would delete, none counted beyond `at_most`."""
        check_count(at_most, "at_most")
        parameters = cutoff_parameters(older_than) | {"at_most": at_most}
        return int((await execute(session, self.table, self._prunable, parameters)).scalar_one())

    async def _is_first(self, session: Caller, event: Event | UUID, consumer: str) -> bool:
        event_id = event.id if isinstance(event, Event) else event
        row = {"consumer": consumer, "event_id": event_id}
        is_first = (await execute(session, self.table, self._insert, row)).rowcount == 1
        if self._observer is not None and not is_first:
            self._observer(MessageReceived(inbox=self.table.fullname, consumer=consumer, outcome="duplicate"))
        return is_first

    def _commit(self, session: Session) -> None:
        """Commits, after a statement has failed only if the transaction still takes one.

        PostgreSQL answers the commit of a transaction in which a statement has failed, and not in a
        savepoint, with a rollback, and the drivers are content with that.
        """
        connection = session.connection({"clause": self.table})
        if connection.info.pop(_FAILED, False):
            try:
                connection.execute(_ANY)
            except DBAPIError as error:
                if "25P02" not in sqlstates(error):
                    raise
                raise TransactionEnded(
                    "the work has caught the error of a statement, so its transaction cannot be committed"
                ) from error
        session.commit()


@contextmanager
def _kept_open(
    session: Caller, table: Table, held: SessionTransaction | Transaction | None
) -> Iterator[None]:
    """The transaction that holds the row lives through the block, or the block ends in TransactionEnded.

    A session, or its connection, that is asked to commit refuses before anything is committed. A
    rollback inside the block, also the one that SQLAlchemy makes when a flush fails, is found at the
    end of it: without the row, the work must not count as done.
    """
    owner = owner_of(session)

    def refuse(committing: Session) -> None:
        current = committing.get_nested_transaction() or committing.get_transaction()
        if current is held:
            raise TransactionEnded(_WAS_TO_COMMIT)

    def undo(committing: Connection) -> None:
        if committing is not connection:
            return
        committing.connection.rollback()  # SQLAlchemy takes a commit that failed for one that has ended it
        raise TransactionEnded(_WAS_TO_COMMIT)

    if isinstance(owner, AsyncSession):
        connection = owner.sync_session.connection({"clause": table})  # it is there, so it asks for nothing
        listen(owner.sync_session, "before_commit", refuse)
    else:
        connection = _started(owner)
    heard: Connection | Engine = connection
    try:
        listen(heard, "commit", undo)
    except InvalidRequestError:  # SQLAlchemy 2.0.36: a connection of an engine with options has no events
        heard = connection.engine
        listen(heard, "commit", undo)
    try:
        yield
        if held is None or not held.is_active:
            raise TransactionEnded(
                "the work, or a flush that failed in it, ended its inbox row's transaction"
            )
    finally:
        remove(heard, "commit", undo)
        if isinstance(owner, AsyncSession):
            remove(owner.sync_session, "before_commit", refuse)


def _check_consumer(consumer: str) -> None:
    check_key(consumer, "consumer")
    if not consumer:
        raise InvalidKey("consumer is empty")


def _note_failures(connection: Connection) -> None:
    """From here on a statement that fails on this connection leaves a note; asking each time costs more."""
    # Engines with options share the dialect, which is what is listened to in the end. It lives as long as the
    # listener; of an engine that is gone SQLAlchemy would still know, and take the next one there for it.
    if not contains(connection.dialect, "handle_error", _note_failure):
        listen(connection.dialect, "handle_error", _note_failure)
    connection.info.pop(_FAILED, None)


def _note_failure(context: ExceptionContext) -> None:
    connection = context.connection
    if connection is not None and not (context.is_disconnect or connection.closed or connection.invalidated):
        connection.info[_FAILED] = True


_ANY = text("SELECT 1")
_FAILED = "oncely: a statement has failed"
_WAS_TO_COMMIT = "the work was to commit the transaction that its inbox row is in"


def _started(connection: AsyncConnection) -> Connection:
    assert connection.sync_connection is not None  # noqa: S101  join was asked
    return connection.sync_connection


# DO NOTHING waits for an open insert of the same row: if that commits, this one is second; if it rolls
# back, this one is first.
_INSERT = """
INSERT INTO {inbox} (consumer, event_id) VALUES (:consumer, :event_id) ON CONFLICT DO NOTHING
"""

_STATS = """
SELECT (SELECT count(*) FROM (SELECT FROM {inbox} LIMIT :at_most) AS counted) AS handled,
       (SELECT min(handled_at) FROM {inbox}) AS oldest_at, (SELECT max(handled_at) FROM {inbox}) AS newest_at
"""

_PRUNE = f"""
DELETE FROM {{inbox}}
WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {{inbox}}
    WHERE handled_at < {CUTOFF_TIME}
    ORDER BY handled_at LIMIT :limit
    FOR UPDATE SKIP LOCKED))
"""  # noqa: S608  a constant

_PRUNABLE = f"""
SELECT count(*) FROM (SELECT FROM {{inbox}} WHERE handled_at < {CUTOFF_TIME} LIMIT :at_most) AS old
"""  # noqa: S608  a constant
