"""How a commit wakes the relays: one NOTIFY, decided at commit, and a listener that survives.

A NOTIFY is a hint; the outbox is authoritative, and relays poll it anyway. Every transaction that
carries one takes a lock that all such commits of the server share. So it is decided in the session's
outermost commit, and each process sends at most one in `WINDOW`: a relay that was woken looks again one
and two windows later, for those that were left out. On a bare connection there is no such moment, and
it is decided at emit. A transaction that is to be prepared (two-phase commit) carries none, since
PostgreSQL refuses that; polling finds its events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Pool, PoolProxiedConnection, Table, TwoPhaseTransaction, event
from sqlalchemy.ext.asyncio import AsyncConnection, async_scoped_session, create_async_engine
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.pool import NullPool
from sqlalchemy.util import greenlet_spawn

from oncely.backoff import Backoff
from oncely.loop import complete, within
from oncely.statement import Statement
from oncely.transaction import Caller, Sessionmaker, alone

__all__ = ["WINDOW", "Wakeup"]

WINDOW = timedelta(milliseconds=10)

_PATIENCE = timedelta(seconds=2)
_FAREWELL = timedelta(milliseconds=200)
_PENDING = "oncely.wakeup"
_log = logging.getLogger(__name__)


class Wakeup:
    """The NOTIFY channel of one outbox. Its name carries the table's oid, so a schema has its own."""

    def __init__(self, events: Table) -> None:
        self._events = events
        self._notify = Statement(_NOTIFY, {"outbox": events})
        self._channel = Statement(_CHANNEL, {"outbox": events})
        self._notified: WeakKeyDictionary[Pool, float] = WeakKeyDictionary()
        if not event.contains(Session, "before_commit", _announce_pending):
            event.listen(Session, "before_commit", _announce_pending)
            event.listen(Session, "after_transaction_end", _forget_pending)

    async def announce(self, caller: Caller) -> None:
        """Wake the relays when the caller's transaction commits, unless they were woken just now."""
        if isinstance(caller, AsyncConnection):
            if not _is_twophase(caller.sync_connection) and self._may_notify(caller.sync_engine.pool):
                await caller.execute(self._notify)
            return
        session = caller() if isinstance(caller, async_scoped_session) else caller
        session.sync_session.info.setdefault(_PENDING, set()).add(self)

    def announce_commit(self, session: Session) -> None:
        """Called in the outermost commit of a session that emitted."""
        connection = session.connection(bind_arguments={"clause": self._events})
        if not _is_twophase(connection) and self._may_notify(connection.engine.pool):
            connection.execute(self._notify)

    async def listen(
        self,
        sessionmaker: Sessionmaker,
        wake: Callable[[], object],
        *,
        url: str | None,
        backoff: Backoff,
        keepalive: timedelta = timedelta(seconds=5),
    ) -> None:
        """Call `wake` at every notification, until cancelled.

        `url` is where to listen when the sessionmaker's engine reaches the server through a pooler.
        The connection is one of its own. Every `keepalive` it is asked for an answer, so that one whose
        other end has vanished is noticed. It is made again when it is lost; `wake` is called then too.
        """
        failures = 0

        def heard(*_: object) -> None:
            nonlocal failures
            failures = 0
            wake()

        while True:
            try:
                channel = await within(self._find_channel(sessionmaker), _PATIENCE * 5)
                async with self._connection(sessionmaker, url) as (driver, hear):
                    await hear(driver, channel, heard, keepalive)
            except Exception as error:  # noqa: BLE001  the drivers' errors have no common root; polling goes on
                failures += 1
                delay = backoff.delay(failures)
                seconds = delay.total_seconds()
                _log.warning("not listening on %s for %.1f s: %r", self._events.fullname, seconds, error)
                await asyncio.sleep(delay.total_seconds())

    def _may_notify(self, pool: Pool) -> bool:
        now = time.monotonic()
        if now - self._notified.get(pool, float("-inf")) < WINDOW.total_seconds():
            return False
        self._notified[pool] = now
        return True

    async def _find_channel(self, sessionmaker: Sessionmaker) -> str:
        return await alone(
            sessionmaker, self._events, lambda connection: str(connection.execute(self._channel).scalar_one())
        )

    @asynccontextmanager
    async def _connection(
        self, sessionmaker: Sessionmaker, url: str | None
    ) -> AsyncIterator[tuple[Any, _Hear]]:
        """A driver's connection that takes no place in the application's pool, and how to hear on it."""
        if url is not None:
            engine = create_async_engine(url, poolclass=NullPool).sync_engine
        else:
            async with sessionmaker() as session:
                engine = session.sync_session.get_bind(clause=self._events).engine
        pool = engine.pool.recreate()

        async def hang_up(connection: PoolProxiedConnection) -> None:
            # Closing it in the usual way would wait for ever for a server that has vanished.
            with suppress(TimeoutError):
                await within(greenlet_spawn(connection.invalidate), _FAREWELL)

        # Whoever is stopped while it is made waits for it: cut off, it might be left open.
        making = within(greenlet_spawn(pool.connect), _PATIENCE * 5)
        connection = await complete(making, patience=_PATIENCE, undo=hang_up)
        try:
            hear = _hear_on_psycopg if engine.dialect.driver == "psycopg" else _hear_on_asyncpg
            yield connection.driver_connection, hear
        finally:
            await hang_up(connection)


def _announce_pending(session: Session) -> None:
    if _PENDING in session.info and session.get_nested_transaction() is None:
        for wakeup in session.info.pop(_PENDING):
            wakeup.announce_commit(session)


def _is_twophase(connection: Connection | None) -> bool:
    """Whether SQLAlchemy is to prepare the connection's transaction: a session's, or `begin_twophase`."""
    return connection is not None and isinstance(connection.get_transaction(), TwoPhaseTransaction)


def _forget_pending(session: Session, transaction: SessionTransaction) -> None:
    """What was rolled back is not announced by a later commit."""
    if transaction.parent is None:
        session.info.pop(_PENDING, None)


_Hear: TypeAlias = Callable[[Any, str, Callable[..., object], timedelta], Awaitable[None]]


async def _hear_on_asyncpg(
    driver: Any, channel: str, heard: Callable[..., object], keepalive: timedelta
) -> None:
    ended = asyncio.Event()
    driver.add_termination_listener(lambda _: ended.set())
    await within(driver.add_listener(channel, heard), _PATIENCE)
    heard()  # for what was announced while nobody listened
    while not ended.is_set():
        try:
            await asyncio.wait_for(ended.wait(), keepalive.total_seconds())
        except TimeoutError:
            await within(driver.fetchval("SELECT 1"), _PATIENCE)
    raise ConnectionError("the listening connection was closed")


async def _hear_on_psycopg(
    driver: Any, channel: str, heard: Callable[..., object], keepalive: timedelta
) -> None:
    await driver.set_autocommit(True)
    await within(driver.execute(f"LISTEN {channel}"), _PATIENCE)
    heard()
    while True:
        async for _ in driver.notifies(timeout=keepalive.total_seconds()):
            heard()
        await within(driver.execute("SELECT 1"), _PATIENCE)


_CHANNEL = "SELECT 'oncely_' || '{outbox}'::regclass::oid"

_NOTIFY = "SELECT pg_notify('oncely_' || '{outbox}'::regclass::oid, '')"
