"""relay_once whatever the engine is set to, and under migrations: what it sends and leaves behind."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import Event, Outbox, PublishFailed
from oncely.testing import RecordingPublisher
from tests.outboxes import (
    Gate,
    Refusing,
    Sessions,
    claiming_is_held_up,
    emit,
    execute,
    payloads,
    rows,
    sent_sql,
    states,
)
from tests.waiting import backend_waits

pytestmark = pytest.mark.in_schema


async def test_one_connection_is_enough(
    outbox: Outbox, engines: Callable[..., AsyncEngine], publish: RecordingPublisher, driver: str
) -> None:
    engine = engines(pool_size=1, max_overflow=0, pool_timeout=2)
    sessions = async_sessionmaker(engine)
    [first, _] = await emit(outbox, sessions, 1, 2)

    async def uses_the_connection(events: Sequence[Event]) -> None:
        assert await states(engine) == {"1": "open, claimed", "2": "open, claimed"}
        raise PublishFailed({first: ValueError()})

    with pytest.raises(PublishFailed):
        await outbox.relay_once(sessions, uses_the_connection)
    with pytest.raises(ValueError, match="no"):
        await outbox.relay_once(sessions, Refusing(ValueError("no")))
    with pytest.raises(TimeoutError):
        await outbox.relay_once(sessions, Gate(), lease=timedelta(milliseconds=50))
    assert payloads(await outbox.relay_once(sessions, publish)) == [1]


@pytest.mark.parametrize("isolation", ["AUTOCOMMIT", "REPEATABLE READ", "SERIALIZABLE"])
async def test_it_works_whatever_the_engines_isolation_is_and_leaves_it_so(
    outbox: Outbox, engines: Callable[..., AsyncEngine], sessions: Sessions, isolation: str, driver: str
) -> None:
    engine = engines(isolation_level=isolation, pool_size=4)
    theirs = async_sessionmaker(engine)
    await emit(outbox, sessions, *range(40), key="k")
    await emit(outbox, sessions, *range(40, 80))
    left: list[Event] = []

    async def publish(events: Sequence[Event]) -> None:
        left.extend(events)

    async def relay() -> None:
        mine = Outbox(MetaData())
        while len(left) < 80:
            await mine.relay_once(theirs, publish, batch=5)

    await asyncio.gather(relay(), relay(), relay())
    assert sorted(payloads(left)) == list(range(80))
    for _ in range(4):
        async with engine.connect() as connection:
            expected = "READ COMMITTED" if isolation == "AUTOCOMMIT" else isolation
            assert await connection.scalar(text("SHOW transaction_isolation")) == expected.lower()
            raw = await connection.get_raw_connection()
            assert raw.dbapi_connection is not None
            assert raw.dbapi_connection.autocommit is (isolation == "AUTOCOMMIT")


async def test_a_pass_is_three_statements_and_an_empty_one_is_two(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher, driver: str
) -> None:
    """The first one of all also ends a claimer that has stalled."""
    await outbox.relay_once(sessions, publish)
    await emit(outbox, sessions, *range(100))
    with sent_sql(engine) as sent:
        assert len(await outbox.relay_once(sessions, publish)) == 100
    assert [kind_of(sql) for sql in sent] == ["lock", "choose", "settle"]
    with sent_sql(engine) as sent:
        assert await outbox.relay_once(sessions, publish) == []
    assert [kind_of(sql) for sql in sent] == ["lock", "choose"]
    await emit(outbox, sessions, 1)
    with sent_sql(engine) as sent, pytest.raises(ValueError):
        await outbox.relay_once(sessions, Refusing(ValueError()))
    assert [kind_of(sql) for sql in sent] == ["lock", "choose", "release"]


def kind_of(sql: str) -> str:
    if "pg_advisory_xact_lock" in sql:
        return "lock"
    if "INSERT INTO outbox_claims" in sql:
        return "choose"
    return "settle" if "published_at = statement_timestamp()" in sql else "release"


async def everything(outbox: Outbox, engine: AsyncEngine, sessions: Sessions) -> list[str]:
    """All the SQL that the outbox sends for each thing that it can do."""
    with sent_sql(engine) as sent:
        ids = await emit(outbox, sessions, *range(4), key="k")
        await emit(outbox, sessions, "d", dedup_key="d")
        await emit(outbox, sessions, "d", dedup_key="d")
        async with sessions.begin() as session:
            await outbox.emit(session, "t", 5)
            assert await outbox.cancel(session, ids[3])
        with pytest.raises(PublishFailed):
            await outbox.relay_once(sessions, Refusing(PublishFailed({ids[0]: ValueError()})))
        with pytest.raises(ValueError):
            await outbox.relay_once(sessions, Refusing(ValueError()))
        claim = await outbox.ledger.claim(sessions, limit=1, lease=timedelta(seconds=1))
        assert claim is not None
        await outbox.ledger.renew(sessions, claim, lease=timedelta(microseconds=1))
        await outbox.relay_once(sessions, RecordingPublisher())
        async with sessions.begin() as session:
            await outbox.lag_seconds(session)
            await outbox.stats(session)
            await outbox.dead(session)
            await outbox.replay(session)
            await outbox.discard(session)
            await outbox.prune(session, older_than=timedelta(0))
    return sent


SAVEPOINTS = ("SAVEPOINT", "RELEASE", "ROLLBACK")


async def test_no_statement_depends_on_the_session_or_on_columns_that_may_be_added(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    sent = await everything(outbox, engine, sessions)
    assert len(sent) > 20
    for sql in sent:
        assert not re.search(r"\*\s+FROM\s+\"?(outbox|outbox_claims)\b", sql, re.IGNORECASE), sql
        assert sql.split()[0] in ("INSERT", "SELECT", "WITH", "UPDATE", "DELETE", *SAVEPOINTS), sql
        assert "pg_advisory_lock" not in sql
        assert not re.search(r"set_config\([^)]*false\s*\)", sql), sql


async def test_settings_of_a_claim_end_with_its_transaction(
    outbox: Outbox, engines: Callable[..., AsyncEngine], publish: RecordingPublisher, driver: str
) -> None:
    engine = engines(pool_size=1, max_overflow=0)
    sessions = async_sessionmaker(engine)
    names = (
        "idle_in_transaction_session_timeout",
        "plan_cache_mode",
        "enable_seqscan",
        "jit",
        "lock_timeout",
        "synchronous_commit",
    )
    asked = f"SELECT {', '.join(f'current_setting({name!r})' for name in names)}"
    before = await rows(engine, asked)
    await emit(outbox, sessions, 1)
    await outbox.relay_once(sessions, publish)
    assert await rows(engine, asked) == before
    locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
    assert await rows(engine, locks) == [(0,)]


async def test_it_works_without_prepared_statements(
    outbox: Outbox, engines: Callable[..., AsyncEngine], driver: str
) -> None:
    settings: dict[str, Any] = (
        {"statement_cache_size": 0, "prepared_statement_cache_size": 0}
        if driver == "asyncpg"
        else {"prepare_threshold": None}
    )
    engine = engines(connect_args=settings)
    await everything(outbox, engine, async_sessionmaker(engine))


REMAKE_THE_UNIQUE_INDEX = """
DROP INDEX outbox_dedup_idx;
CREATE UNIQUE INDEX outbox_dedup_idx ON outbox (topic, dedup_key) WHERE dedup_key IS NOT NULL
"""


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE outbox ADD COLUMN tenant text; ALTER TABLE outbox_claims ADD COLUMN host text",
        REMAKE_THE_UNIQUE_INDEX,
        "DROP INDEX outbox_pending_idx; DROP INDEX outbox_tried_idx; DROP INDEX outbox_deferred_idx",
        "ALTER TABLE outbox ALTER COLUMN topic TYPE varchar(1000)",
    ],
    ids=["columns are added", "the unique index is made anew", "indexes are dropped", "a type changes"],
)
async def test_a_migration_under_a_live_relay_is_not_noticed(
    outbox: Outbox,
    engines: Callable[..., AsyncEngine],
    engine: AsyncEngine,
    publish: RecordingPublisher,
    change: str,
    driver: str,
) -> None:
    live = async_sessionmaker(engines(pool_size=1, max_overflow=0))
    for number in range(8):  # often enough for either driver to prepare its statements
        await emit(outbox, live, number, dedup_key=str(number))
        await outbox.relay_once(live, publish)
    for statement in change.split(";"):
        await execute(engine, statement)
    await emit(outbox, live, 8, dedup_key="8")
    await emit(outbox, live, 8, dedup_key="8")
    assert payloads(await outbox.relay_once(live, publish)) == [8]
    async with live() as session:
        assert await outbox.lag_seconds(session) == 0.0
        assert await outbox.prune(session, older_than=timedelta(0)) == 9


async def test_claims_are_made_one_at_a_time(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    async with claiming_is_held_up(engine):
        relay = asyncio.create_task(outbox.relay_once(sessions, publish))
        await backend_waits(engine, "advisory")
        await emit(outbox, sessions, "committed while the claim waited")
    assert payloads(await relay) == ["committed while the claim waited"]
