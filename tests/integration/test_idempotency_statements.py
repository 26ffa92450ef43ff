"""What keys send to PostgreSQL: how much, by which indexes, and nothing that outlives a transaction."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from oncely import Answer, KeyInFlight, Outcome, Refused
from tests.database import both_drivers
from tests.keys import Shop, sent

pytestmark = [pytest.mark.in_schema, both_drivers]

OLD = timedelta(days=30)
AGE = timedelta(days=1)


@pytest.fixture
async def shop(engine: AsyncEngine) -> Shop:
    return await Shop.open(engine)


def verbs(statements: list[str]) -> list[str]:
    """The first word of each statement that is not the work's."""
    return [statement.split()[0] for statement in statements if "orders" not in statement]


# How many


async def test_a_first_request_sends_a_claim_an_answer_and_a_savepoint_around_the_work(shop: Shop) -> None:
    with sent(shop.engine) as statements:
        await shop.request()
    assert verbs(statements) == ["WITH", "SAVEPOINT", "UPDATE", "RELEASE"]


async def test_a_replay_sends_one_statement(shop: Shop) -> None:
    await shop.request()
    with sent(shop.engine) as statements:
        await shop.request()
    assert verbs(statements) == ["WITH"]


async def test_a_refusal_sends_no_more_than_an_answer(shop: Shop) -> None:
    with sent(shop.engine) as statements:
        await shop.request(raising=Refused(409, ""))
    assert verbs(statements) == ["WITH", "SAVEPOINT", "ROLLBACK", "UPDATE"]


async def test_a_failure_sends_one_statement_to_free_the_key(shop: Shop) -> None:
    with sent(shop.engine) as statements, pytest.raises(ConnectionError):
        await shop.request(raising=ConnectionError())
    assert verbs(statements) == ["WITH", "SAVEPOINT", "ROLLBACK", "DELETE"]


async def test_who_does_not_wait_sends_one_statement(shop: Shop) -> None:
    async with shop.sessions() as first:
        await shop.order(first)
        with sent(shop.engine) as statements, pytest.raises(KeyInFlight):
            await shop.request(wait=timedelta(0))
    assert verbs(statements) == ["WITH"]


# nothing outlives the transaction


async def everything(shop: Shop, prefix: str = "") -> None:
    """Every statement there is."""
    ttl = timedelta(hours=1)
    await shop.request(f"{prefix}first", Answer(201, "made", {"Location": "/"}), ttl=ttl)
    await shop.request(f"{prefix}first", wait=timedelta(0))
    await shop.expire(f"{prefix}first")
    await shop.request(f"{prefix}first", raising=Refused(409, b"\x00"))
    with pytest.raises(ConnectionError):
        await shop.request(f"{prefix}second", raising=ConnectionError())
    for wait in (None, timedelta(milliseconds=1)):
        async with shop.sessions() as first:
            await shop.order(first, f"{prefix}third")
            async with shop.sessions() as second:
                await second.execute(text("SET LOCAL lock_timeout = '5ms'"))
                with pytest.raises(KeyInFlight):
                    await shop.order(second, f"{prefix}third", wait=wait)
    async with shop.sessions.begin() as session:
        assert await shop.keys.get(session, scope="Ada", key=f"{prefix}first") is not None
        assert await shop.keys.forget(session, scope="Ada", key=f"{prefix}first") == 1
        assert await shop.keys.forget(session, scope="Ada") == 0
        assert await shop.keys.prune(session, older_than=AGE) == 0


async def test_no_statement_leaves_a_mark_on_the_connection(shop: Shop) -> None:
    with sent(shop.engine) as statements:
        await everything(shop)
    own = [
        statement for statement in statements if not statement.startswith("SET LOCAL lock_timeout = '5ms'")
    ]
    for statement in own:
        assert not re.search(r"SELECT\s+\*|\.\*|^SET|LISTEN|^PREPARE|TEMP", statement), statement
        assert not re.search(r"pg_(try_)?advisory_(lock|unlock)", statement), statement
    async with shop.engine.connect() as connection:
        locks = await connection.scalar(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"))
    assert locks == 0


async def test_keys_work_without_prepared_statements_as_behind_a_pooler(
    shop: Shop, engines: Callable[..., AsyncEngine]
) -> None:
    if shop.engine.dialect.driver == "psycopg":
        engine = engines(connect_args={"prepare_threshold": None})
    else:
        options: dict[str, Any] = {"statement_cache_size": 0, "prepared_statement_cache_size": 0}
        engine = engines(
            connect_args=options | {"prepared_statement_name_func": lambda: f"__oncely_{uuid.uuid4()}__"}
        )
    await everything(Shop(engine))


async def test_keys_go_on_after_a_migration_under_their_prepared_statements(shop: Shop) -> None:
    for number in range(6):  # so that both drivers have prepared everything, and PostgreSQL planned it
        await everything(shop, f"{number} ")
    changes = [
        "ALTER TABLE idempotency_keys ADD COLUMN note text DEFAULT 'x', ADD COLUMN tag int",
        "ALTER TABLE idempotency_keys DROP CONSTRAINT idempotency_keys_pkey",
        "ALTER TABLE idempotency_keys ADD PRIMARY KEY (scope, key)",
        "ALTER TABLE idempotency_keys DROP COLUMN tag",
    ]
    for change in changes[:1], changes[1:3], changes[3:]:
        async with shop.engine.begin() as connection:
            for statement in change:
                await connection.execute(text(statement))
        await everything(shop)


# On which indexes


async def fill(shop: Shop) -> None:
    """100,000 keys: in turn without a ttl, with one that goes on, expired; half of them old."""
    statement = text("""
        INSERT INTO idempotency_keys (scope, key, request_hash, response_code, created_at, expires_at)
        SELECT 'scope ' || number % 100, 'key ' || number, '\\x00', 200,
               now() - CASE WHEN number % 2 = 0 THEN interval '30 days' ELSE interval '1 hour' END,
               CASE number % 3 WHEN 1 THEN now() + interval '1 day'
                               WHEN 2 THEN now() - interval '1 minute' END
        FROM generate_series(1, 100000) AS number
    """)
    async with shop.engine.begin() as connection:
        await connection.execute(statement)
    async with shop.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        await connection.execute(text("VACUUM ANALYZE idempotency_keys"))


async def plans(shop: Shop, call: Callable[[AsyncSession], Awaitable[object]]) -> list[Any]:
    """The generic plans of what a call sends, one for each statement: what a prepared statement ends with."""
    found: list[tuple[str, Any]] = []

    def note(
        connection: Connection, cursor: object, statement: str, parameters: Any, context: object, many: bool
    ) -> None:
        found.append((statement, parameters))

    async with shop.sessions() as session:
        await session.execute(text("SET LOCAL plan_cache_mode = force_generic_plan"))
        event.listen(shop.engine.sync_engine, "before_cursor_execute", note)
        await call(session)
        event.remove(shop.engine.sync_engine, "before_cursor_execute", note)
        connection = await session.connection()
        explained = []
        for statement, parameters in found:
            if not statement.strip().startswith(("WITH", "SELECT", "UPDATE", "DELETE")):
                continue
            plan = await connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", parameters)
            given = plan.scalar_one()
            explained.append((json.loads(given) if isinstance(given, str) else given)[0]["Plan"])
        await session.rollback()
    return explained


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", []) for node in nodes(child))]


@pytest.mark.parametrize("driver", ["asyncpg"], indirect=True)
async def test_every_statement_finds_its_rows_by_an_index(shop: Shop) -> None:
    await fill(shop)

    async def call(session: AsyncSession) -> None:
        await shop.order(session, "key 3", scope="scope 3", fingerprint=b"\x00")  # a replay
        await shop.order(session, "key 2", scope="scope 2", fingerprint=b"\x00")  # expired
        with pytest.raises(ConnectionError):
            await shop.order(session, "new", raising=ConnectionError())
        await shop.keys.get(session, scope="scope 1", key="key 1")
        await shop.keys.forget(session, scope="scope 1", key="key 1")
        await shop.keys.forget(session, scope="scope 1")
        await shop.keys.prune(session, older_than=AGE, limit=100)
        await shop.keys.prune(session, older_than=datetime.now(UTC), limit=100)

    explained = await plans(shop, call)
    assert len(explained) == 10
    for plan in explained:
        kinds = {node["Node Type"] for node in nodes(plan) if node.get("Relation Name") == "idempotency_keys"}
        assert kinds <= {"Index Scan", "Index Only Scan", "Tid Scan", "Bitmap Heap Scan", "ModifyTable"}, plan
        scans = [node for node in nodes(plan) if node["Node Type"] == "Index Scan"]
        assert all("Index Cond" in node for node in scans), plan


@pytest.mark.parametrize("driver", ["asyncpg"], indirect=True)
async def test_pruning_walks_over_nothing_that_stays(shop: Shop) -> None:
    await fill(shop)
    async with shop.sessions.begin() as session:
        assert await shop.keys.prune(session, older_than=AGE, limit=90_000) == 49_999
    explained = await plans(shop, lambda session: shop.keys.prune(session, older_than=AGE))
    (plan,) = explained
    by_index = {node["Index Name"] for node in nodes(plan) if "Index Name" in node}
    assert by_index == {"idempotency_keys_expires_at_idx", "idempotency_keys_created_at_idx"}


# What is pruned


async def counted(shop: Shop) -> int:
    return len(await shop.stored())


@pytest.fixture
async def aged(shop: Shop) -> Shop:
    """Keys that are new, old, old with a ttl that goes on, and expired."""
    hour = timedelta(hours=1)
    for key, ttl in [("expired", hour), ("new", None), ("old", None), ("old, ttl", hour)]:
        await shop.request(key, ttl=ttl)
    await shop.expire("expired")
    table = shop.keys.table
    async with shop.engine.begin() as connection:
        old = text("now() - interval '30 days'")
        await connection.execute(table.update().where(table.c.key.like("old%")).values(created_at=old))
    return shop


@pytest.mark.parametrize("older_than", [AGE, "time"])
async def test_prune_takes_the_expired_and_of_those_without_a_ttl_the_old(
    aged: Shop, older_than: timedelta | str
) -> None:
    cutoff = datetime.now(UTC) - AGE if isinstance(older_than, str) else older_than
    async with aged.sessions.begin() as session:
        assert await aged.keys.prune(session, older_than=cutoff) == 2
        assert await aged.keys.prune(session, older_than=cutoff) == 0
    assert await aged.stored() == ["new", "old, ttl"]


async def test_prune_takes_all_without_a_ttl_when_the_age_is_zero(aged: Shop) -> None:
    async with aged.sessions.begin() as session:
        assert await aged.keys.prune(session, older_than=timedelta(0)) == 3
    assert await aged.stored() == ["old, ttl"]


async def test_prune_is_the_callers_to_commit(aged: Shop) -> None:
    async with aged.sessions() as session:
        assert await aged.keys.prune(session, older_than=AGE) == 2
        await session.rollback()
    assert await counted(aged) == 4


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
async def test_prune_stops_at_its_limit(aged: Shop, limit: int) -> None:
    async with aged.sessions.begin() as session:
        assert await aged.keys.prune(session, older_than=timedelta(0), limit=limit) == limit
    assert await counted(aged) == 4 - limit


async def test_prune_goes_on_past_one_batch(shop: Shop) -> None:
    statement = text("""
        INSERT INTO idempotency_keys (scope, key, request_hash, response_code)
        SELECT 'Ada', number::text, '\\x00', 200 FROM generate_series(1, 2500) AS number
    """)
    async with shop.engine.begin() as connection:
        await connection.execute(statement)
    async with shop.sessions.begin() as session:
        assert await shop.keys.prune(session, older_than=timedelta(0), limit=1200) == 1200
        assert await shop.keys.prune(session, older_than=timedelta(0)) == 1300


@pytest.mark.parametrize(
    ("older_than", "limit", "message"),
    [
        (datetime(2026, 1, 1), None, "without a time zone"),  # noqa: DTZ001  that is the point
        (timedelta(seconds=-1), None, "below zero"),
        (AGE, -1, "limit must be 0 or more, not -1"),
    ],
)
async def test_prune_refuses_what_makes_no_sense(
    aged: Shop, older_than: timedelta | datetime, limit: int | None, message: str
) -> None:
    async with aged.sessions() as session:
        with pytest.raises(ValueError, match=message):
            await aged.keys.prune(session, older_than=older_than, limit=limit)
    assert await counted(aged) == 4


async def test_prune_passes_over_what_is_locked_and_waits_for_nobody(aged: Shop) -> None:
    async with aged.sessions() as busy, aged.sessions.begin() as session:
        await busy.execute(text("SELECT FROM idempotency_keys WHERE key = 'old' FOR UPDATE"))
        await session.execute(text("SET LOCAL lock_timeout = '300ms'"))
        assert await aged.keys.prune(session, older_than=AGE) == 1
    assert await aged.stored() == ["new", "old", "old, ttl"]


async def test_prune_passes_over_a_key_that_is_used_again(aged: Shop) -> None:
    async with aged.sessions() as user, aged.sessions.begin() as session:
        await aged.order(user, "expired")
        assert await aged.keys.prune(session, older_than=AGE) == 1
        await user.commit()
    assert await aged.stored() == ["expired", "new", "old, ttl"]


async def test_two_prunes_at_once_share_the_work(shop: Shop) -> None:
    for number in range(20):
        await shop.request(f"order-{number}")

    async def prune() -> int:
        async with shop.sessions.begin() as session:
            return await shop.keys.prune(session, older_than=timedelta(0))

    assert sum(await asyncio.gather(prune(), prune(), prune())) == 20
    assert await counted(shop) == 0


async def test_a_pruned_key_is_free(aged: Shop) -> None:
    async with aged.sessions.begin() as session:
        await aged.keys.prune(session, older_than=AGE)
    assert await aged.request("old") == Outcome(201, "made", replayed=False)
