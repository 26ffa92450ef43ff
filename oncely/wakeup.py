"""How a commit wakes the relays: one NOTIFY, decided at commit, and a listener that survives.

A NOTIFY is a hint; the outbox is authoritative, and relays poll it anyway. Every transaction that
carries one takes a lock that all such commits of the server share. So it is decided in the session's
outermost commit, and each process sends at most one in `WINDOW`: a relay that was woken looks again one
and two windows later, for those that were left out. On a bare connection there is no such moment, and
it is decided at emit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, Pool, Table, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, async_scoped_session, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from oncely.backoff import Backoff
from oncely.statement import Statement
from oncely.transaction import Caller, Sessionmaker

__all__ = ["WINDOW", "Wakeup"]

WINDOW = timedelta(milliseconds=10)

_KEEPALIVE = 5.0
_SILENCE = 2.0
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

    async def announce(self, caller: Caller) -> None:
        """Wake the relays when the caller's transaction commits, unless they were woken just now."""
        if isinstance(caller, AsyncConnection):
            if self._may_notify(caller.sync_engine.pool):
                await caller.execute(self._notify)
            return
        session = caller() if isinstance(caller, async_scoped_session) else caller
        session.sync_session.info.setdefault(_PENDING, set()).add(self)

    def announce_commit(self, session: Session) -> None:
        """Called in the outermost commit of a session that emitted."""
        connection = session.connection(bind_arguments={"clause": self._events})
        if self._may_notify(connection.engine.pool):
            connection.execute(self._notify)

    async def listen(
        self, sessionmaker: Sessionmaker, wake: Callable[[], object], *, url: str | None, backoff: Backoff
    ) -> None:
        """Call `wake` at every notification, until cancelled.

        `url` is where to listen when the sessionmaker's engine reaches the server through a pooler.
        The connection is one of its own. It is tried every few seconds, so that a dead one is
        noticed, and made again when it is lost; `wake` is called then too.
        """
        failures = 0
        while True:
            try:
                async with self._connection(sessionmaker, url) as connection:
                    channel = str((await connection.execute(self._channel)).scalar_one())
                    await connection.rollback()
                    adapter: Any = (await connection.get_raw_connection()).dbapi_connection
                    driver = adapter.driver_connection
                    if connection.dialect.driver == "psycopg":
                        await _hear_on_psycopg(driver, channel, wake)
                    else:
                        await _hear_on_asyncpg(driver, channel, wake)
            except Exception as error:  # noqa: BLE001  the drivers' errors have no common root; polling goes on
                failures += 1
                delay = backoff.delay(min(failures, 20))
                _log.warning("not listening on %s for %s: %r", self._events.fullname, delay, error)
                await asyncio.sleep(delay.total_seconds())

    def _may_notify(self, pool: Pool) -> bool:
        now = time.monotonic()
        if now - self._notified.get(pool, float("-inf")) < WINDOW.total_seconds():
            return False
        self._notified[pool] = now
        return True

    @asynccontextmanager
    async def _connection(
        self, sessionmaker: Sessionmaker, url: str | None
    ) -> AsyncIterator[AsyncConnection]:
        """A connection outside the pool, closed for good at the end."""
        if url is not None:
            engine = create_async_engine(url, poolclass=NullPool)
        else:
            async with sessionmaker() as session:
                bind: Engine | Connection = session.sync_session.get_bind(clause=self._events)
                engine = AsyncEngine(bind.engine)
        async with engine.connect() as connection:
            if url is None:
                assert connection.sync_connection is not None  # noqa: S101  it is started
                connection.sync_connection.detach()
            yield connection
        if url is not None:
            await engine.dispose()


def _announce_pending(session: Session) -> None:
    if _PENDING in session.info and session.get_nested_transaction() is None:
        for wakeup in session.info.pop(_PENDING):
            wakeup.announce_commit(session)


async def _hear_on_asyncpg(driver: Any, channel: str, wake: Callable[[], object]) -> None:
    ended = asyncio.Event()
    driver.add_termination_listener(lambda _: ended.set())
    await driver.add_listener(channel, lambda *_: wake())
    wake()  # for what was announced while nobody listened
    while not ended.is_set():
        try:
            await asyncio.wait_for(ended.wait(), _KEEPALIVE)
        except TimeoutError:
            await asyncio.wait_for(driver.fetchval("SELECT 1"), _SILENCE)
    raise ConnectionError("the listening connection was closed")


async def _hear_on_psycopg(driver: Any, channel: str, wake: Callable[[], object]) -> None:
    await driver.set_autocommit(True)
    await driver.execute(f"LISTEN {channel}")
    wake()
    while True:
        async for _ in driver.notifies(timeout=_KEEPALIVE):
            wake()
        await asyncio.wait_for(driver.execute("SELECT 1"), _SILENCE)


_CHANNEL = "SELECT 'oncely_' || '{outbox}'::regclass::oid"

_NOTIFY = "SELECT pg_notify('oncely_' || '{outbox}'::regclass::oid, '')"
