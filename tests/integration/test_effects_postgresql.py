"""Effects where rows have locks, connections are cut by the server, and plans can be read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import ClauseElement, event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import EffectUnknown
from oncely.effects import Status, statements
from oncely.effects.store import FINISHED, OPEN
from oncely.telemetry import EffectRun
from oncely.testing import RecordingObserver
from tests.effects import HOUR, Provider, make_effects, record_of
from tests.waiting import backend_waits


@asynccontextmanager
async def locked(engine: AsyncEngine, key: str) -> AsyncIterator[None]:
    """The row is locked, and not changed, inside the block."""
    async with engine.connect() as connection:
        await connection.execute(text("SELECT 1 FROM effects WHERE key = :key FOR UPDATE"), {"key": key})
        yield
        await connection.rollback()


async def test_an_extension_that_waited_for_the_row_past_its_lease_reports_the_loss(
    engine: AsyncEngine, driver: str
) -> None:
    effects = await make_effects(engine)
    token = await effects.claim("k", b"args")
    assert token is not None
    async with locked(engine, "k"):
        extending = asyncio.create_task(effects.extend("k", token, timedelta(seconds=0.2)))
        await backend_waits(engine, "transactionid")
        await asyncio.sleep(0.3)  # longer than the lease that it asks for
    assert await extending is False
    assert (await record_of(effects, "k")).status is Status.UNKNOWN


async def test_a_take_that_waited_for_the_row_sees_what_became_of_it(
    engine: AsyncEngine, driver: str
) -> None:
    effects = await make_effects(engine)
    token = await effects.claim("k", b"args")
    assert token is not None
    await effects.finish("k", token, Status.UNKNOWN)
    read = await record_of(effects, "k")
    async with engine.connect() as connection:
        await connection.execute(
            text("UPDATE effects SET status = 'done', result = '1' WHERE key = 'k'"),
        )
        taking = asyncio.create_task(effects.take(read, Status.PENDING))
        await backend_waits(engine, "transactionid")
        await connection.commit()
    assert await taking is None
    assert (await record_of(effects, "k")).status is Status.DONE


async def test_purge_does_not_wait_for_a_locked_row(engine: AsyncEngine) -> None:
    effects = await make_effects(engine)
    for key in ("a", "b"):
        token = await effects.claim(key, b"args")
        assert token is not None
        await effects.finish(key, token, Status.DONE)
    async with locked(engine, "a"), asyncio.timeout(5):
        assert await effects.purge(0) == 1
    assert await effects.get("a") is not None


async def cut(engine: AsyncEngine) -> None:
    """The server ends every other connection to this database."""
    async with engine.connect() as connection:
        await connection.execute(
            text(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )
        await connection.rollback()
        await connection.invalidate()


async def test_a_connection_that_the_server_cut_is_tried_once_more(
    engines: Callable[..., AsyncEngine], driver: str
) -> None:
    engine, knife = engines(), engines()
    effects, provider = await make_effects(engine), Provider()

    async def call(provider_token: str) -> object:
        await cut(knife)
        return await provider.charge(provider_token)

    await cut(knife)
    assert await effects.run("k", call) == {"charge": 1}
    await cut(knife)
    assert await effects.run("k", call) == {"charge": 1}
    assert [record.key for record in await effects.records([Status.DONE])] == ["k"]


async def test_a_table_that_takes_no_decision_leaves_the_outcome_unknown_and_no_call_is_made(
    engine: AsyncEngine, driver: str
) -> None:
    """A trigger of the user's, say. It is not asked again and again."""
    observer, provider = RecordingObserver(), Provider()
    effects = await make_effects(engine, observer=observer)

    async def times_out(provider_token: str) -> object:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        await effects.run("k", times_out)
    observer.records.clear()
    async with engine.begin() as connection:
        for statement in (
            "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$",
            "CREATE TRIGGER keep BEFORE UPDATE ON effects FOR EACH ROW EXECUTE FUNCTION keep()",
        ):
            await connection.execute(text(statement))
    with pytest.raises(EffectUnknown):
        await effects.run("k", provider.charge, verify=provider.find)
    assert provider.tokens == []
    assert [record.outcome for record in observer.of(EffectRun)] == ["in_doubt"]


@pytest.mark.parametrize("driver", ["psycopg"])
async def test_purging_and_listing_follow_the_indexes(engine: AsyncEngine, driver: str) -> None:
    effects = await make_effects(engine)
    async with engine.begin() as connection:
        await connection.execute(
            text(
                "INSERT INTO effects SELECT n::text, '', 'done', '1', NULL, n::text, n::text, 1, at, at, NULL"
                " FROM generate_series(1, 50000) n, LATERAL (SELECT now() - n * interval '1 min' AS at) times"
            )
        )
        await connection.exec_driver_sql("ANALYZE effects")

    async def indexes(statement: ClauseElement) -> set[str]:
        compiled = statement.compile(dialect=engine.dialect, compile_kwargs={"render_postcompile": True})
        async with engine.connect() as connection:
            plan = await connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {compiled}", compiled.params)
            return set(re.findall(r"'Index Name': '(\w+)'", str(plan.scalar_one())))

    old = statements.purge(effects.table, timedelta(days=33), list(FINISHED), 100)["postgresql"]
    assert await indexes(old) == {"effects_created_at_idx", "effects_pkey"}
    assert await indexes(statements.records(effects.table, list(OPEN), 100)) == {"effects_open_idx"}
    assert await indexes(statements.records(effects.table, list(Status), 100)) == {"effects_created_at_idx"}


async def test_every_statement_keeps_to_the_schema(engine: AsyncEngine) -> None:
    for schema in ("written", "Tenant"):
        async with engine.begin() as connection:
            await connection.exec_driver_sql(f'CREATE SCHEMA "{schema}"')
    translated = engine.execution_options(schema_translate_map={"written": "Tenant"})
    effects = await make_effects(translated, schema="written")
    seen: list[str] = []

    def look(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        seen.append(statement)

    event.listen(engine.sync_engine, "before_cursor_execute", look)
    token = await effects.claim("k", b"args")
    assert token is not None
    assert await effects.extend("k", token, HOUR)
    assert await effects.finish("k", token, Status.UNKNOWN)
    assert await effects.take(await record_of(effects, "k"), Status.DONE, ttl=timedelta(microseconds=1))
    assert await effects.renew(await record_of(effects, "k"), b"args")
    assert len(await effects.records()) == 1
    assert await effects.purge(0) == 0
    assert not await effects.delete("k", token=token)
    assert await effects.delete("k")
    assert len(seen) == 11
    assert [statement for statement in seen if '"Tenant".effects' not in statement] == []
    assert [statement for statement in seen if "written" in statement] == []
