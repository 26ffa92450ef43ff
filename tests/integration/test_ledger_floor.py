"""The floor never rises past an event that is not committed yet.

Two ways in which it could: a writer's transaction id may be newer than the newest completed one, and
a writer may have its place in line before it has a transaction id. Each is made to happen here.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Connection, MetaData, text
from sqlalchemy.event import listens_for
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from oncely import Event, Outbox
from oncely.ledger import Failure
from oncely.testing import EmbeddedPostgres, RecordingPublisher
from oncely.transaction import is_unavailable
from tests.outboxes import Gate, claim, emit, execute
from tests.waiting import backend_waits, until

Sessions = async_sessionmaker[AsyncSession]


async def emit_and_relay(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher, *payloads: str
) -> None:
    """Each payload is committed and relayed by a pass of its own, so that the floor may follow."""
    for payload in payloads:
        async with sessions() as session, session.begin():
            await outbox.emit(session, "t", payload)
        await outbox.relay_once(sessions, publish)


async def relay_all(outbox: Outbox, sessions: Sessions, publish: RecordingPublisher) -> list[Event]:
    while await outbox.relay_once(sessions, publish):
        pass
    return publish.events


async def answers(engine: AsyncEngine) -> bool:
    try:
        async with engine.connect() as connection:
            return bool(await connection.scalar(text("SELECT true")))
    except Exception as error:
        if is_unavailable(error):
            return False
        raise


def crash(server: EmbeddedPostgres) -> None:
    """Kill one backend, and return when the server has ended the others for it and recovers."""
    with (
        closing(psycopg.connect(server.dsn())) as victim,
        closing(psycopg.connect(server.dsn())) as witness,
    ):
        os.kill(victim.info.backend_pid, signal.SIGKILL)
        with pytest.raises(psycopg.OperationalError):
            witness.execute("SELECT pg_sleep(30)")


async def test_a_writer_with_a_newer_id_and_an_earlier_place_is_not_passed(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher
) -> None:
    async with sessions() as early, sessions() as late:
        await outbox.emit(early, "t", "gives early its id")
        await outbox.emit(late, "t", "late")  # a newer id, and the place after
        await outbox.emit(early, "t", "early")  # an older id, and the place after late's
        await early.commit()
        await outbox.relay_once(sessions, publish)  # sees early's place; the newest completed id is early's
        await emit_and_relay(outbox, sessions, publish, "a", "b", "c", "d", "e")
        await late.commit()
    events = await relay_all(outbox, sessions, publish)
    assert [event.payload for event in events] == [
        "gives early its id",
        "early",
        "a",
        "b",
        "c",
        "d",
        "e",
        "late",
    ]


async def test_a_writer_that_stalls_between_its_place_and_its_row_is_not_passed(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:

    async with engine.begin() as connection:
        # A row trigger runs after the defaults: the place in line is taken, the row is not written.
        await connection.execute(
            text(
                "CREATE FUNCTION stall() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                " IF NEW.topic = 'stalls' THEN PERFORM pg_advisory_xact_lock(7); END IF;"
                " RETURN NEW; END $$"
            )
        )
        await connection.execute(
            text("CREATE TRIGGER stall BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION stall()")
        )
    async with engine.connect() as gate:
        await gate.execute(text("SELECT pg_advisory_xact_lock(7)"))

        async def stalled() -> None:
            async with sessions() as session, session.begin():
                await outbox.emit(session, "stalls", "stalled")

        # The first place of 32 is written to the log, which would give the writer an id by itself.
        await emit_and_relay(outbox, sessions, publish, "first")
        writer = asyncio.create_task(stalled())
        await backend_waits(engine, "advisory")
        await emit_and_relay(outbox, sessions, publish, "a", "b", "c", "d", "e")
        await gate.rollback()
        await writer
    events = await relay_all(outbox, sessions, publish)
    assert [event.payload for event in events] == ["first", "a", "b", "c", "d", "e", "stalled"]


async def test_it_rises_while_nobody_writes(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit_and_relay(outbox, sessions, publish, "a", "b", "c", "d", "e")
    assert outbox.ledger._floor.floor >= 3


async def test_a_transaction_that_only_reads_does_not_hold_it(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    async with engine.connect() as reader:
        await reader.execute(text("SELECT count(*) FROM outbox"))
        await emit_and_relay(outbox, sessions, publish, "a", "b", "c", "d", "e")
        assert outbox.ledger._floor.floor >= 3


@pytest.mark.parametrize("again", ["TRUNCATE outbox, outbox_claims RESTART IDENTITY", "drop and create"])
async def test_it_is_forgotten_when_the_table_begins_anew(
    outbox: Outbox,
    engines: Callable[..., AsyncEngine],
    metadata: MetaData,
    sessions: Sessions,
    publish: RecordingPublisher,
    again: str,
) -> None:
    await emit_and_relay(outbox, sessions, publish, "a", "b", "c", "d", "e")
    other = engines()
    async with other.begin() as connection:
        if again == "drop and create":
            await connection.run_sync(metadata.drop_all)
            await connection.run_sync(metadata.create_all)
        else:
            await connection.execute(text(again))
    await emit_and_relay(outbox, sessions, publish, "anew")
    assert [event.payload for event in publish.events] == ["a", "b", "c", "d", "e", "anew"]


async def test_a_transaction_that_writes_before_it_claims_teaches_nothing(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    """An engine whose transactions begin with a write: an audit hook, say."""

    @listens_for(engine.sync_engine, "begin")
    def write(connection: Connection) -> None:
        connection.execute(text("SELECT pg_current_xact_id()"))

    await emit_and_relay(outbox, sessions, publish, "a", "b", "c", "d", "e")
    assert outbox.ledger._floor.floor == 0


async def test_it_is_forgotten_after_a_minute(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit_and_relay(outbox, sessions, publish, "a", "b", "c", "d", "e")
    async with engine.begin() as connection:  # what an operator does who wants it sent again
        await connection.execute(text("UPDATE outbox SET published_at = NULL WHERE payload = '\"a\"'"))
    assert await outbox.relay_once(sessions, publish) == []
    outbox.ledger._floor.learnt_at -= 60
    assert [event.payload for event in await outbox.relay_once(sessions, publish)] == ["a"]


async def test_it_is_not_taken_into_another_database_of_the_same_files(
    postgres: EmbeddedPostgres, publish: RecordingPublisher
) -> None:
    outbox = Outbox(MetaData())
    names = [f"test_{uuid4().hex}" for _ in range(3)]
    with psycopg.connect(postgres.dsn(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {names[0]} TEMPLATE template0".encode())
        template = create_async_engine(postgres.url(database=names[0]))
        async with template.begin() as connection:
            await connection.run_sync(outbox.table.metadata.create_all)
        await template.dispose()
        for name in names[1:]:
            admin.execute(f"CREATE DATABASE {name} TEMPLATE {names[0]}".encode())
            tenant = create_async_engine(postgres.url(database=name))
            await emit_and_relay(outbox, async_sessionmaker(tenant), publish, *"abcde")
            await tenant.dispose()
        for name in names:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
    assert [event.payload for event in publish.events] == list("abcdeabcde")


async def test_it_is_forgotten_when_a_crash_takes_committed_rows_along(publish: RecordingPublisher) -> None:
    """With synchronous_commit off, the crash of one backend sets rows and positions back."""
    with EmbeddedPostgres({"synchronous_commit": "off", "wal_writer_delay": "10s"}) as server:
        outbox, engine = Outbox(MetaData()), create_async_engine(server.url())
        sessions = async_sessionmaker(engine)
        async with engine.begin() as connection:
            await connection.run_sync(outbox.table.metadata.create_all)
        with psycopg.connect(server.dsn(), autocommit=True) as admin:
            admin.execute("CHECKPOINT")
        await emit_and_relay(outbox, sessions, publish, *(str(number) for number in range(40)))
        crash(server)
        await engine.dispose(close=False)
        await until(lambda: answers(engine))
        publish.batches.clear()
        await emit_and_relay(outbox, sessions, publish, "after")
        await engine.dispose()
    assert "after" in [event.payload for event in publish.events]


async def test_a_claim_that_a_crash_of_the_server_takes_along_means_that_its_events_are_claimed_again(
    publish: RecordingPublisher,
) -> None:
    """A claim does not wait for the disk. What was emitted and what is settled does."""
    durable = {"fsync": "on", "synchronous_commit": "on", "wal_writer_delay": "10s"}
    with EmbeddedPostgres(durable) as server:
        outbox, engine = Outbox(MetaData()), create_async_engine(server.url())
        sessions = async_sessionmaker(engine)
        async with engine.begin() as connection:
            await connection.run_sync(outbox.table.metadata.create_all)
        await emit_and_relay(outbox, sessions, publish, "settled")
        async with sessions() as session, session.begin():
            await outbox.emit(session, "t", "claimed")
        claim = await outbox.ledger.claim(sessions, limit=10, lease=timedelta(hours=1))
        assert claim is not None
        crash(server)
        await engine.dispose(close=False)
        await until(lambda: answers(engine))
        assert await outbox.ledger.settle(sessions, claim) is False
        events = await relay_all(outbox, sessions, publish)
        await engine.dispose()
    assert [event.payload for event in events] == ["settled", "claimed"]


async def test_passes_of_one_outbox_that_run_together_do_not_mix_up_what_they_have_learnt(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    """One of them learns of a key that it has to pass after the other has begun."""
    gate = Gate()

    @asynccontextmanager
    async def late() -> AsyncIterator[AsyncSession]:
        async with sessions() as session:
            await gate([])
            yield session

    await emit(outbox, sessions, "held 1", "held 2", key="k")
    held = await claim(outbox, sessions, limit=1)
    failed = Failure(held.events[0].id, "ValueError: no", timedelta(hours=1))
    assert await outbox.ledger.settle(sessions, held, published=[], failures=[failed])
    await emit_and_relay(outbox, sessions, publish, "a")
    passing = asyncio.create_task(outbox.relay_once(late, publish))
    await gate.entered.wait()
    await emit_and_relay(outbox, sessions, publish, "b", "c", "d", "e")
    async with sessions() as session, session.begin():
        await outbox.emit(session, "t", "f")
    gate.opened.set()
    await passing
    await execute(engine, "UPDATE outbox SET due_at = now() WHERE attempts > 0")
    publish.batches.clear()
    events = await relay_all(outbox, sessions, publish)
    assert [event.payload for event in events] == ["held 1", "held 2"]


async def test_it_does_not_pass_what_another_relay_gives_back(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher
) -> None:
    other = Outbox(MetaData())
    async with sessions() as session, session.begin():
        await outbox.emit(session, "t", "given back")
    claim = await other.ledger.claim(sessions, limit=10, lease=timedelta(seconds=30))
    assert claim is not None
    await emit_and_relay(outbox, sessions, publish, "a", "b", "c", "d", "e")
    await other.ledger.release(sessions, claim)
    events = await relay_all(outbox, sessions, publish)
    assert [event.payload for event in events] == ["a", "b", "c", "d", "e", "given back"]
