"""What the tests of the outbox have in common: filling it, looking into it, and reading the SQL it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, event, text
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)

from oncely import Event, NewEvent, Outbox
from oncely.choice import Choice
from oncely.floor import Floor
from oncely.ledger import Claim, Failure
from oncely.testing import RecordingPublisher

__all__ = [
    "LEASE",
    "Gate",
    "Refusing",
    "Sessions",
    "being_claimed",
    "calling",
    "claim",
    "claiming_is_held_up",
    "claims",
    "drained",
    "emit",
    "execute",
    "expire_claims",
    "fail",
    "flat",
    "locked",
    "payloads",
    "rows",
    "sent_sql",
    "states",
]

Sessions = async_sessionmaker[AsyncSession]

LEASE = timedelta(seconds=30)


@asynccontextmanager
async def calling(kind: str, engine: AsyncEngine) -> AsyncIterator[Any]:
    """A caller of each kind that emit takes; a connection commits and rolls back as a session does."""
    if kind == "connection":
        async with engine.connect() as connection:
            yield connection
    elif kind == "session":
        async with AsyncSession(engine) as session:
            yield session
    else:
        scoped = async_scoped_session(async_sessionmaker(engine), lambda: "the request")
        yield scoped
        await scoped.remove()


async def emit(outbox: Outbox, sessions: Sessions, *payloads: object, **fields: Any) -> list[Any]:
    """One committed transaction with an event for each payload; `fields` are NewEvent's. Their ids."""
    fields = {"topic": "t"} | fields
    async with sessions.begin() as session:
        return await outbox.emit_many(session, [NewEvent(payload=payload, **fields) for payload in payloads])


async def claim(outbox: Outbox, sessions: Sessions, *, limit: int = 100, lease: timedelta = LEASE) -> Claim:
    """A claim as a relay makes it; there must be something to claim."""
    made = await outbox.ledger.claim(sessions, limit=limit, lease=lease)
    assert made is not None
    return made


async def being_claimed(outbox: Outbox, claimer: AsyncSession) -> list[Event]:
    """What a relay claims in this transaction, which is left open: as if it had stopped before the commit."""

    def choose(connection: Connection) -> Choice | None:
        outbox.ledger._claimer.become(connection)
        return outbox.ledger._chooser.choose(
            connection,
            Floor(),
            token=uuid4(),
            claimed_by="x:1",
            lease=LEASE,
            limit=100,
            tried_first=False,
        )

    choice = await (await claimer.connection()).run_sync(choose)
    return [] if choice is None else choice.events


async def fail(
    outbox: Outbox,
    sessions: Sessions,
    *payloads: object,
    error: str = "ValueError: no",
    delay: timedelta | None,
) -> None:
    """Let the events with these payloads fail: tried again after `delay`, or dead when it is None."""
    made = await claim(outbox, sessions, limit=10_000)
    failures = [Failure(event.id, error, delay) for event in made.events if event.payload in payloads]
    assert len(failures) == len(payloads)
    assert await outbox.ledger.settle(sessions, made, published=[], failures=failures)


def payloads(events: Sequence[Event]) -> list[Any]:
    return [event.payload for event in events]


async def execute(engine: AsyncEngine, sql: str, **parameters: object) -> None:
    """Commit a statement that no part of oncely sends."""
    async with engine.begin() as connection:
        await connection.execute(text(sql), parameters)


async def rows(engine: AsyncEngine, sql: str, **parameters: object) -> list[Any]:
    """What a query of the test's own finds; a row compares with a tuple."""
    async with engine.connect() as connection:
        return list(await connection.execute(text(sql), parameters))


_STATE = """
    SELECT payload #>> '{}',
           CASE WHEN published_at IS NOT NULL THEN 'published' WHEN dead_at IS NOT NULL THEN 'dead'
                WHEN due_at > statement_timestamp() THEN 'waiting' ELSE 'open' END
           || CASE WHEN attempts > 0 THEN ', tried ' || attempts ELSE '' END
           || CASE WHEN id IN (SELECT unnest(event_ids) FROM outbox_claims) THEN ', claimed' ELSE '' END
    FROM outbox ORDER BY position
"""


async def states(engine: AsyncEngine) -> dict[str, str]:
    """What became of each event, by the text of its payload, in line."""
    return {str(payload): str(state) for payload, state in await rows(engine, _STATE)}


async def expire_claims(engine: AsyncEngine) -> None:
    """As if every lease had ended just now: the relays that hold them are as good as dead."""
    await execute(engine, "UPDATE outbox_claims SET expires_at = statement_timestamp()")


@asynccontextmanager
async def locked(engine: AsyncEngine, *payloads: object) -> AsyncIterator[AsyncConnection]:
    """Somebody else's open transaction that has locked the events with these payloads."""
    async with engine.connect() as connection:
        sql = text("SELECT id FROM outbox WHERE payload #>> '{}' = ANY (:payloads) FOR UPDATE")
        found = (await connection.execute(sql, {"payloads": list(map(str, payloads))})).fetchall()
        assert len(found) == len(payloads)
        yield connection


@contextmanager
def sent_sql(engine: AsyncEngine) -> Iterator[list[str]]:
    """Every statement that goes over this engine, in order, with its white space made one space."""
    sent: list[str] = []

    def note(*arguments: Any) -> None:
        sent.append(" ".join(arguments[2].split()))

    event.listen(engine.sync_engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(engine.sync_engine, "before_cursor_execute", note)


class Gate:
    """A publisher that says when it was `entered` and stays until it is `opened`; then it has the events."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.opened = asyncio.Event()
        self.events: list[Event] = []

    async def __call__(self, events: Sequence[Event]) -> None:
        self.entered.set()
        await self.opened.wait()
        self.events += events


class Refusing:
    """A publisher that raises what it is given, once for each, and then has the events."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.events: list[Event] = []

    async def __call__(self, events: Sequence[Event]) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.events += events


async def drained(outbox: Outbox, sessions: Sessions, *, batch: int = 100) -> list[list[Any]]:
    """What one relay publishes, pass by pass, until two passes in a row find nothing."""
    publish, empty = RecordingPublisher(), 0
    while empty < 2:
        empty = 0 if await outbox.relay_once(sessions, publish, batch=batch) else empty + 1
    return [payloads(batch) for batch in publish.batches]


def flat(batches: list[list[Any]]) -> list[Any]:
    return [payload for batch in batches for payload in batch]


@asynccontextmanager
async def claiming_is_held_up(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """As if another relay were claiming just now, for as long as the block lasts."""
    async with engine.connect() as other:
        lock = "SELECT pg_advisory_xact_lock(1869505381, 'outbox_claims'::regclass::oid::int4)"
        await other.execute(text(lock))
        yield other


async def claims(engine: AsyncEngine) -> int:
    [(count,)] = await rows(engine, "SELECT count(*) FROM outbox_claims")
    return int(count)
