"""`oncely check` wherever tables may be: odd schemas and names, several engines, roles with few rights."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from examples.shop.models import Base
from examples.shop.places import make_engine
from oncely.testing import EmbeddedPostgres
from tests.command import Ran, oncely
from tests.database import Database

_MODULE = """
from datetime import timedelta
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from oncely import Effects, IdempotencyKeys, Inbox, Outbox, Relay, Retention
url = {url!r}
"""

Application = Callable[[str, str], str]
"""Makes a module of lines after those above; its name."""


@pytest.fixture
def application(tmp_path: Path) -> Iterator[Application]:
    """Makes a module of `text`, in which `url` is the database's; its name."""
    made = []

    def make(url: str, text: str) -> str:
        made.append(f"app_{uuid.uuid4().hex}")
        (tmp_path / f"{made[-1]}.py").write_text(_MODULE.format(url=url) + text)
        return made[-1]

    sys.path.insert(0, str(tmp_path))
    yield make
    sys.path.remove(str(tmp_path))
    for name in made:
        sys.modules.pop(name, None)


async def create(module: str) -> None:
    """Make the tables of the module's `metadata`, by its `engine`."""
    made = __import__(module)
    async with made.engine.begin() as connection:
        await connection.run_sync(made.metadata.create_all)
    await made.engine.dispose()


async def execute(url: str, *statements: str) -> None:
    dsn = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            await connection.execute(statement.encode())


def findings(ran: Ran) -> list[dict[str, Any]]:
    """What was found, without the advice that every new table gets."""
    assert ran.stderr == ""
    return [each for each in ran.json["findings"] if "autovacuum comes as late" not in each["message"]]


async def check(module: str, *words: str) -> list[dict[str, Any]]:
    return findings(await oncely("check", f"{module}:rooms", "--json", *words))


_ODD = """
odd = 'Sales "of" 5% é'
metadata = MetaData({metadata})
outbox = Outbox(metadata, table_name='Out"box %s')
inbox = Inbox(metadata, table_name='Ünbox')
keys = IdempotencyKeys(metadata, table_name='select')
effects = Effects(metadata, stale_after=timedelta(seconds=5))
engine = create_async_engine(url{engine})
rooms = [async_sessionmaker(engine), outbox, inbox, keys, effects]
"""
_ODD_SCHEMA = '"Sales ""of"" 5% é"'
_CONVENTION = """naming_convention={"ix": "ix_%(table_name)s_%(column_0_name)s", "pk": "pk_%(table_name)s",
"uq": "uq_%(table_name)s_%(column_0_name)s", "ck": "ck_%(table_name)s_%(constraint_name)s"}"""

PLACES = {
    "a schema of the MetaData": _ODD.format(metadata="schema=odd", engine=""),
    "a schema that the engine translates to": _ODD.format(
        metadata="", engine=", execution_options={'schema_translate_map': {None: odd}}"
    ),
    "a naming convention": _ODD.format(metadata=f"schema=odd, {_CONVENTION}", engine=""),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
async def test_tables_in_odd_places_have_no_findings_and_remedies_that_mend(
    application: Application, driver: str, database: Database, place: str
) -> None:
    module = application(database.url, place)
    await execute(database.url, f"CREATE SCHEMA {_ODD_SCHEMA}")
    await create(module)
    assert await check(module) == []

    outbox, inbox = f'{_ODD_SCHEMA}."Out""box %s"', f'{_ODD_SCHEMA}."Ünbox"'
    await execute(
        database.url,
        f'DROP INDEX {_ODD_SCHEMA}."Out""box %s_pending_idx"',
        f'CREATE INDEX "Out""box %s_pending_idx" ON {outbox} (position)',
        f'ALTER TABLE {outbox} DROP CONSTRAINT "Out""box %s_dead_check"',
        f"ALTER TABLE {outbox} DROP COLUMN dedup_key",
        f"ALTER TABLE {outbox} ALTER COLUMN topic TYPE varchar(50)",
        f"ALTER TABLE {outbox} ALTER COLUMN topic DROP NOT NULL",
        f"ALTER TABLE {outbox} ALTER COLUMN attempts SET DEFAULT 7",
        f"ALTER TABLE {inbox} ALTER COLUMN handled_at DROP DEFAULT",
        f'ALTER TABLE {_ODD_SCHEMA}."select" ALTER COLUMN scope TYPE text COLLATE "C"',
        f'ALTER TABLE {inbox} DROP CONSTRAINT "{"pk_Ünbox" if _CONVENTION in place else "Ünbox_pkey"}"',
    )
    found = await check(module)
    assert len(found) == 10
    assert {each["severity"] for each in found} == {"wrong"}
    for each in found:
        await execute(database.url, *each["remedy"].split("\n"))
    assert await check(module) == []


async def test_the_advice_on_autovacuum_is_to_be_pasted_in_odd_places_too(
    application: Application, database: Database
) -> None:
    module = application(database.url, PLACES["a schema that the engine translates to"])
    await execute(database.url, f"CREATE SCHEMA {_ODD_SCHEMA}")
    await create(module)
    ran = await oncely("check", f"{module}:rooms", "--json")
    remedies = [each["remedy"] for each in ran.json["findings"]]
    assert len(remedies) == 4
    await execute(database.url, *remedies)
    ran = await oncely("check", f"{module}:rooms", "--json")
    assert ran.json == {"ok": True, "findings": []}


_PLAIN = """
metadata = MetaData()
outbox, inbox = Outbox(metadata), Inbox(metadata)
engine = create_async_engine(url)
sessions = async_sessionmaker(engine)
rooms = [sessions, outbox, inbox]
"""


async def test_the_partitions_of_a_table_have_autovacuums_settings_and_not_the_table(
    application: Application, database: Database
) -> None:
    module = application(database.url, _PLAIN)
    await execute(
        database.url,
        """CREATE TABLE inbox (consumer text NOT NULL, event_id uuid NOT NULL,
            handled_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (consumer, event_id)
        ) PARTITION BY HASH (consumer)""",
        "CREATE TABLE inbox_0 PARTITION OF inbox FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
        "CREATE INDEX ON inbox (handled_at)",
        "CREATE TABLE inbox_1 PARTITION OF inbox FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
    )
    await create(module)
    ran = await oncely("check", f"{module}:rooms", "--json", "--table", "inbox")
    assert [each["about"] for each in ran.json["findings"]] == ["inbox_0", "inbox_1"]
    await execute(database.url, *(each["remedy"] for each in ran.json["findings"]))
    ran = await oncely("check", f"{module}:rooms", "--json", "--table", "inbox")
    assert ran.json == {"ok": True, "findings": []}


@pytest.fixture
async def clerk(database: Database) -> AsyncIterator[str]:
    """A URL of a role that has no rights."""
    name = f"clerk_{uuid.uuid4().hex}"
    await execute(database.url, f"CREATE ROLE {name} LOGIN")
    yield make_url(database.url).set(username=name).render_as_string(hide_password=False)
    await execute(database.url, f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def of_tables(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what is said of the role when others happen to be connected to the server."""
    return [each for each in found if not each["about"].startswith("role ")]


async def test_a_role_that_may_make_no_temporary_tables_is_told_what_gives_the_right(
    application: Application, database: Database, clerk: str
) -> None:
    await create(application(database.url, _PLAIN))
    name = make_url(database.url).database
    await execute(database.url, f"REVOKE TEMPORARY ON DATABASE {name} FROM PUBLIC")
    module = application(clerk, _PLAIN)
    found = of_tables(await check(module))
    assert [(each["severity"], each["about"]) for each in found] == [
        ("advice", "outbox"),
        ("advice", "outbox_claims"),
        ("advice", "inbox"),
    ]
    await execute(database.url, found[0]["remedy"])
    assert of_tables(await check(module)) == []


async def test_a_role_that_does_not_see_transactions_of_others_is_told_what_lets_it(
    application: Application, database: Database, clerk: str, engine: AsyncEngine
) -> None:
    await create(application(database.url, _PLAIN))
    module = application(clerk, _PLAIN)
    async with engine.connect() as connection:
        pid = await connection.scalar(text("SELECT pg_backend_pid() FROM txid_current()"))
        (finding,) = [
            each for each in await check(module, "--open-for", "0s") if each not in of_tables([each])
        ]
        assert finding["message"] == "does not see how long the transactions of other roles have been open"
        await execute(database.url, finding["remedy"])
        abouts = [each["about"] for each in await check(module, "--open-for", "0s")]
        assert f"process {pid}" in abouts


async def test_a_vacuum_holds_nothing_back(
    application: Application, database: Database, engine: AsyncEngine
) -> None:
    module = application(database.url, _PLAIN)
    await create(module)
    await execute(
        database.url, "INSERT INTO inbox SELECT g, gen_random_uuid() FROM generate_series(1, 200) AS g"
    )
    await execute(database.url, "DELETE FROM inbox")
    slow = engine.execution_options(isolation_level="AUTOCOMMIT")
    async with slow.connect() as connection:
        await connection.execute(text("SET vacuum_cost_delay = 100"))
        await connection.execute(text("SET vacuum_cost_limit = 1"))
        pid = await connection.scalar(text("SELECT pg_backend_pid()"))
        vacuum = asyncio.create_task(connection.execute(text("VACUUM inbox")))
        progress = text(f"SELECT count(*) FROM pg_stat_progress_vacuum WHERE pid = {pid}")  # not autovacuum's
        async with slow.connect() as other:
            while await other.scalar(progress) == 0:
                assert not vacuum.done()
            abouts = [each["about"] for each in await check(module, "--open-for", "0s")]
            assert not vacuum.done()
            await other.execute(text(f"SELECT pg_cancel_backend({pid})"))
        with pytest.raises(DBAPIError):
            await vacuum
    assert f"process {pid}" not in abouts


async def test_one_check_that_may_not_look_does_not_hide_the_others(
    application: Application, database: Database, clerk: str
) -> None:
    await create(application(database.url, _PLAIN))
    await execute(database.url, "DROP INDEX outbox_pending_idx")
    forgetful = "rooms = [*rooms, Retention(sessions, {inbox: timedelta(days=30)})]"
    found = of_tables(await check(application(clerk, _PLAIN + forgetful)))
    assert [each["message"].partition(": ")[0] for each in found] == [
        "index outbox_pending_idx is missing",
        "cannot be checked",
    ]
    assert found[1]["about"] == "outbox"


async def test_a_server_that_only_reads_is_looked_at_as_far_as_that_goes(
    application: Application, driver: str, database: Database
) -> None:
    module = application(database.url, _PLAIN)
    await create(module)
    name = make_url(database.url).database
    await execute(database.url, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    ran = await oncely("check", f"{module}:rooms", "--json")
    assert ran.exit_code == 0
    assert [(each["about"], each["message"].partition(":")[0]) for each in ran.json["findings"]] == [
        ("outbox", "could not be compared with the code"),
        ("outbox_claims", "could not be compared with the code"),
        ("inbox", "could not be compared with the code"),
        ("outbox", "autovacuum comes as late as for any table"),
        ("outbox_claims", "autovacuum comes as late as for any table"),
        ("inbox", "autovacuum comes as late as for any table"),
    ]


async def test_each_table_is_looked_at_in_the_database_in_which_it_is(
    application: Application, database: Database, other_database: str
) -> None:
    lines = f"""
metadata = MetaData()
outbox, inbox = Outbox(metadata), Inbox(metadata)
engine, other = create_async_engine(url), create_async_engine({other_database!r})
sessions = async_sessionmaker(binds={{outbox.table: engine, outbox.claims: engine, inbox.table: other}})
retention = Retention(sessions, {{outbox: timedelta(days=7), inbox: timedelta(days=7)}})
rooms = [retention]
"""
    module = application(database.url, lines)
    made = __import__(module)
    async with made.engine.begin() as connection:
        for table in (made.outbox.table, made.outbox.claims):
            await connection.run_sync(table.create)
    async with made.other.begin() as connection:
        await connection.run_sync(made.inbox.table.create)
    await made.engine.dispose()
    await made.other.dispose()
    assert await check(module) == []
    await execute(other_database, "DROP TABLE inbox")
    assert [(each["about"], each["message"]) for each in await check(module)] == [("inbox", "is not there")]


@pytest.fixture
async def other_database(database: Database) -> AsyncIterator[str]:
    name = f"other_{uuid.uuid4().hex}"
    await execute(database.url, f"CREATE DATABASE {name} TEMPLATE template0")
    yield make_url(database.url).set(database=name).render_as_string(hide_password=False)
    await execute(database.url, f"DROP DATABASE {name} WITH (FORCE)")


async def test_who_holds_the_horizon_is_said_once_however_many_engines_lead_there(
    application: Application, database: Database, engine: AsyncEngine
) -> None:
    lines = (
        _PLAIN + "rooms = [Relay(outbox, sessions, print), async_sessionmaker(create_async_engine(url))]\n"
    )
    lines += "rooms.append(Retention(rooms[1], {outbox: timedelta(days=7), inbox: timedelta(days=7)}))"
    module = application(database.url, lines)
    await create(module)
    async with engine.connect() as connection:
        pid = await connection.scalar(text("SELECT pg_backend_pid() FROM txid_current()"))
        found = await check(module, "--open-for", "0s")
    assert [each["remedy"] for each in found].count(f"SELECT pg_terminate_backend({pid});") == 1
    assert [each["about"] for each in found].count("outbox") == 1


async def test_an_engine_in_autocommit_is_looked_at_all_the_same(
    application: Application, database: Database
) -> None:
    module = application(database.url, _PLAIN.replace("(url)", "(url, isolation_level='AUTOCOMMIT')"))
    await create(module)
    assert await check(module) == []


async def test_what_stands_in_for_something_incomplete_is_enough(
    application: Application, database: Database
) -> None:
    module = application(database.url, _PLAIN)
    await create(module)
    await execute(
        database.url,
        "CREATE INDEX outbox_pending_idx_ccnew ON outbox (position) "
        "WHERE published_at IS NULL AND dead_at IS NULL AND due_at IS NULL",
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'outbox_pending_idx_ccnew'::regclass",
        "ALTER TABLE outbox ADD CONSTRAINT z CHECK (attempts >= 0) NOT VALID",
    )
    assert await check(module) == []
    await execute(database.url, "ALTER TABLE outbox DROP CONSTRAINT outbox_attempts_check")
    (finding,) = await check(module)
    assert finding["remedy"] == "ALTER TABLE outbox VALIDATE CONSTRAINT z;"


async def test_a_database_that_has_frozen_and_a_redis_that_is_away_are_findings(
    application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncely.cli.check._PATIENCE", timedelta(seconds=1))
    with EmbeddedPostgres() as server:
        module = application(server.url(), _PLAIN + _NO_REDIS)
        await create(module)
        assert server.pid is not None
        os.killpg(server.pid, signal.SIGSTOP)
        try:
            found = await check(module)
        finally:
            os.killpg(server.pid, signal.SIGCONT)
    assert [(each["about"], each["message"].partition(":")[0]) for each in found] == [
        ("outbox, outbox_claims, inbox", "cannot be checked"),
        ("orders:dead", "cannot be checked"),
    ]


_NO_REDIS = """
from redis.asyncio import Redis
from oncely.streams import StreamConsumer
consumer = StreamConsumer(Redis(unix_socket_path="/nowhere"), stream="orders", max_attempts=20, concurrency=4)
rooms = [*rooms, consumer, Retention(sessions, {inbox: timedelta(days=30)})]
"""


async def test_the_effects_of_a_sqlite_database(application: Application, tmp_path: Path) -> None:
    module = application(Database.in_file(tmp_path / "effects.db").url, _EFFECTS)
    (finding,) = await check(module)
    assert (finding["about"], finding["message"]) == ("effects", "is not there")
    await create(module)
    assert await check(module) == []
    with sqlite3.connect(tmp_path / "effects.db") as connection:
        connection.execute("ALTER TABLE effects DROP COLUMN provider_token")
    connection.close()
    (finding,) = await check(module)
    assert (finding["about"], finding["message"]) == ("effects", "has no column provider_token")


_EFFECTS = """
metadata = MetaData()
engine = create_async_engine(url)
effects = Effects(metadata, stale_after=timedelta(seconds=5), sessionmaker=async_sessionmaker(engine))
rooms = [effects]
"""


@pytest.mark.parametrize("process", ["relay", "consumer"])
async def test_nothing_is_wrong_with_the_shop(
    database: Database, redis_url: str, stream: str, monkeypatch: pytest.MonkeyPatch, process: str
) -> None:
    environment = {"DATABASE_URL": database.url, "SCHEMA": "shop", "REDIS_URL": redis_url, "STREAM": stream}
    for name, value in environment.items():
        monkeypatch.setenv(f"SHOP_{name}", value)
    await execute(database.url, "CREATE SCHEMA shop")
    engine = make_engine()
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    await engine.dispose()
    ran = await oncely("check", f"examples.shop.{process}:make_worker")
    assert (ran.exit_code, ran.stdout.splitlines()[-1].partition(",")[0]) == (0, "0 wrong")
