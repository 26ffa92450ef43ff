"""relay_once: one batch, in order, marked when and only when it was sent."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import ClaimLost, Event, Outbox, PublishFailed
from oncely.testing import RecordingPublisher
from tests.database import Database
from tests.outboxes import (
    Gate,
    Sessions,
    emit,
    execute,
    expire_claims,
    payloads,
    rows,
    sent_sql,
    states,
)
from tests.waiting import backend_waits


@pytest.fixture
def database(schema: Database) -> Database:
    return schema


async def claims(engine: AsyncEngine) -> int:
    [(count,)] = await rows(engine, "SELECT count(*) FROM outbox_claims")
    return int(count)


# --- what it does


async def test_it_publishes_in_line_and_no_more_than_a_batch(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit(outbox, sessions, *range(5), key="k")
    await emit(outbox, sessions, *range(5, 8))
    returned = []
    while batch := await outbox.relay_once(sessions, publish, batch=3):
        returned.append(batch)
    assert [payloads(batch) for batch in returned] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert publish.batches == returned
    assert set((await states(engine)).values()) == {"published"}
    assert await claims(engine) == 0


async def test_what_it_marked_is_not_offered_again(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit(outbox, sessions, 1)
    await emit(outbox, sessions, 2, delay=timedelta(microseconds=1))
    assert payloads(await outbox.relay_once(sessions, publish)) == [1, 2]
    asked = "SELECT published_at <= clock_timestamp(), due_at IS NULL, attempts, last_error FROM outbox"
    assert await rows(engine, asked) == [(True, True, 0, None)] * 2
    assert await outbox.relay_once(sessions, publish) == []
    assert len(publish.batches) == 1


async def test_with_nothing_to_send_the_publisher_is_not_called(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit(outbox, sessions, "tomorrow", delay=timedelta(days=1))
    assert await outbox.relay_once(sessions, publish) == []
    assert publish.batches == []
    assert await claims(engine) == 0


async def test_an_uncommitted_event_is_not_seen(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher
) -> None:
    async with sessions() as session:
        await outbox.emit(session, "t", 1)
        assert await outbox.relay_once(sessions, publish) == []
        await session.commit()
    assert payloads(await outbox.relay_once(sessions, publish)) == [1]


async def test_no_transaction_is_open_while_it_publishes(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1)
    gate = Gate()
    relay = asyncio.create_task(outbox.relay_once(sessions, gate))
    await gate.entered.wait()
    open_ = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
    assert await rows(engine, open_) == [(0,)]
    gate.opened.set()
    assert payloads(await relay) == [1]


# --- failures


class Refusing:
    """A publisher that raises what it is given, once for each."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.events: list[Event] = []

    async def __call__(self, events: Sequence[Event]) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.events += events


async def test_a_publisher_that_raises_leaves_everything_as_it_was(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1, 2, key="k")
    await emit(outbox, sessions, 3)
    refusing = Refusing(ValueError("one"), ConnectionError("two"), TimeoutError("three"), KeyboardInterrupt())
    for error in list(refusing.errors):
        with pytest.raises(type(error)) as raised:
            await outbox.relay_once(sessions, refusing)
        assert raised.value is error
        assert await states(engine) == {"1": "open", "2": "open", "3": "open"}
        assert await rows(engine, "SELECT DISTINCT due_at, last_error FROM outbox") == [(None, None)]
    assert payloads(await outbox.relay_once(sessions, refusing)) == [1, 2, 3]
    assert [event.attempt for event in refusing.events] == [1, 1, 1]


async def test_of_a_batch_that_was_sent_in_part_that_part_is_marked(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit(outbox, sessions, "a1", "a2", "a3", key="a")
    await emit(outbox, sessions, "b1", "b2", key="b")
    await emit(outbox, sessions, "c1", "c2")

    async def send_a_part(events: Sequence[Event]) -> None:
        # It says nothing of a3, which it did not try, and names b2 as not tried.
        by_payload = {event.payload: event.id for event in events}
        raise PublishFailed({by_payload["a2"]: ValueError("no")}, unsent=[by_payload["b2"]])

    with pytest.raises(PublishFailed) as raised:
        await outbox.relay_once(sessions, send_a_part)
    assert list(map(str, raised.value.failures.values())) == ["no"]
    assert await states(engine) == {
        "a1": "published",
        "a2": "open",
        "a3": "open",
        "b1": "published",
        "b2": "open",
        "c1": "published",
        "c2": "published",
    }
    assert await claims(engine) == 0
    assert payloads(await outbox.relay_once(sessions, publish)) == ["a2", "a3", "b2"]


async def test_a_batch_of_which_nothing_was_sent_is_not_marked(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1, 2)

    async def send_nothing(events: Sequence[Event]) -> None:
        raise PublishFailed({events[0].id: ValueError("no")}, unsent=[event.id for event in events])

    with pytest.raises(PublishFailed):
        await outbox.relay_once(sessions, send_nothing)
    assert await states(engine) == {"1": "open", "2": "open"}


# --- leases


async def test_a_publisher_that_outlives_the_lease_is_cancelled_and_nothing_is_marked(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1)
    gate = Gate()
    with pytest.raises(TimeoutError):
        await outbox.relay_once(sessions, gate, lease=timedelta(milliseconds=150))
    assert gate.entered.is_set()
    assert await states(engine) == {"1": "open"}


def replaced(outbox: Outbox, engine: AsyncEngine, sessions: Sessions, error: Exception | None = None) -> Any:
    """A publisher that stalls until another relay has taken its batch over; the other fails to send it."""

    async def publish(events: Sequence[Event]) -> None:
        await expire_claims(engine)
        with pytest.raises(ValueError, match="the other"):
            await Outbox(MetaData()).relay_once(sessions, Refusing(ValueError("the other")))
        if error is not None:
            raise error

    return publish


async def test_a_relay_that_was_replaced_marks_nothing_and_says_so(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    ids = await emit(outbox, sessions, 1, 2)
    with pytest.raises(ClaimLost) as raised:
        await outbox.relay_once(sessions, replaced(outbox, engine, sessions))
    assert raised.value.event_ids == tuple(ids)
    assert await states(engine) == {"1": "open, tried 1", "2": "open, tried 1"}


async def test_a_relay_that_was_replaced_and_sent_a_part_says_both(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    [first, _] = await emit(outbox, sessions, 1, 2)
    failed = PublishFailed({first: ValueError("no")})
    with pytest.raises(PublishFailed) as raised:
        await outbox.relay_once(sessions, replaced(outbox, engine, sessions, failed))
    assert raised.value.__notes__ == [
        "the claim had expired: what was sent is not marked and will be sent again"
    ]
    assert await states(engine) == {"1": "open, tried 1", "2": "open, tried 1"}


async def test_a_relay_that_was_replaced_and_failed_says_what_failed(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1, 2)
    with pytest.raises(ZeroDivisionError):
        await outbox.relay_once(sessions, replaced(outbox, engine, sessions, ZeroDivisionError()))
    assert await states(engine) == {"1": "open, tried 1", "2": "open, tried 1"}


# --- side by side


async def test_two_relays_take_different_events(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, *range(20))
    gates = [Gate(), Gate()]
    relays = [asyncio.create_task(Outbox(MetaData()).relay_once(sessions, gate, batch=10)) for gate in gates]
    for gate in gates:
        await gate.entered.wait()
        gate.opened.set()
    taken = [payloads(await relay) for relay in relays]
    assert sorted(taken) == [list(range(10)), list(range(10, 20))]


async def test_an_event_waits_while_another_relay_has_one_of_its_key(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    await emit(outbox, sessions, "a1", key="a")
    gate = Gate()
    relay = asyncio.create_task(outbox.relay_once(sessions, gate))
    await gate.entered.wait()
    await emit(outbox, sessions, "a2", key="a")
    await emit(outbox, sessions, "b1", key="b")
    other = Outbox(MetaData())
    assert payloads(await other.relay_once(sessions, publish)) == ["b1"]
    assert await other.relay_once(sessions, publish) == []
    gate.opened.set()
    await relay
    assert payloads(await other.relay_once(sessions, publish)) == ["a2"]


async def test_the_events_of_each_key_leave_in_order_by_two_relays(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    for number in range(60):
        await emit(outbox, sessions, (number % 5, number), key=f"k{number % 5}")
    left: list[list[int]] = []

    async def publish(events: Sequence[Event]) -> None:
        for event in events:
            await asyncio.sleep(0)
            left.append(event.payload)

    async def relay() -> None:
        mine = Outbox(MetaData())
        while len(left) < 60:
            await mine.relay_once(sessions, publish, batch=4)

    await asyncio.gather(relay(), relay())
    assert len(left) == 60
    for key in range(5):
        of_key = [number for k, number in left if k == key]
        assert of_key == sorted(of_key)


async def test_a_slow_publisher_stops_neither_emits_nor_other_relays_and_loses_no_connection(
    outbox: Outbox, engines: Callable[..., AsyncEngine], driver: str, publish: RecordingPublisher
) -> None:
    settings: dict[str, Any] = (
        {"server_settings": {"idle_in_transaction_session_timeout": "100", "lock_timeout": "2000"}}
        if driver == "asyncpg"
        else {}
    )
    engine = engines(connect_args=settings)
    sessions = async_sessionmaker(engine)
    await emit(outbox, sessions, "slow", key="k")
    gate = Gate()
    relay = asyncio.create_task(outbox.relay_once(sessions, gate))
    await gate.entered.wait()
    for number in range(4):
        await emit(outbox, sessions, f"quick {number}", key=f"k{number}")
        assert payloads(await outbox.relay_once(sessions, publish)) == [f"quick {number}"]
        async with engine.connect() as connection:
            await connection.execute(text("SELECT pg_sleep(0.05)"))
    gate.opened.set()
    assert payloads(await relay) == ["slow"]
    assert set((await states(engine)).values()) == {"published"}


# --- connections and settings


async def test_one_connection_is_enough(
    outbox: Outbox, engines: Callable[..., AsyncEngine], publish: RecordingPublisher
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
    outbox: Outbox, engines: Callable[..., AsyncEngine], sessions: Sessions, isolation: str
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
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
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
    outbox: Outbox, engines: Callable[..., AsyncEngine], publish: RecordingPublisher
) -> None:
    engine = engines(pool_size=1, max_overflow=0)
    sessions = async_sessionmaker(engine)
    names = (
        "idle_in_transaction_session_timeout",
        "plan_cache_mode",
        "enable_seqscan",
        "jit",
        "lock_timeout",
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


@asynccontextmanager
async def claiming_is_held_up(engine: AsyncEngine) -> Any:
    """As if another relay were claiming just now, for as long as the block lasts."""
    async with engine.connect() as other:
        lock = "SELECT pg_advisory_xact_lock(1869505381, 'outbox_claims'::regclass::oid::int4)"
        await other.execute(text(lock))
        yield


async def test_claims_are_made_one_at_a_time(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    async with claiming_is_held_up(engine):
        relay = asyncio.create_task(outbox.relay_once(sessions, publish))
        await backend_waits(engine, "advisory")
        await emit(outbox, sessions, "committed while the claim waited")
    assert payloads(await relay) == ["committed while the claim waited"]
