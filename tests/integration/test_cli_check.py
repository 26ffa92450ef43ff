"""`oncely check`: what is wrong with the tables, the server and the settings, and nothing that is not."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from oncely.event import uuid7
from oncely.testing import EmbeddedPostgres
from tests.command import Shop, oncely
from tests.outboxes import emit, execute, fail
from tests.waiting import until

pytestmark = pytest.mark.in_schema


async def findings(shop: Shop, *words: str, target: str = "rooms") -> list[tuple[str, str, str, str | None]]:
    """What the command finds, without the advice that every new table gets."""
    ran = await oncely("check", shop.target(target), "--json", *words)
    assert ran.stderr == ""
    found = [
        (each["severity"], each["about"].replace("oncely_test.", ""), each["message"], each["remedy"])
        for each in ran.json["findings"]
        if "autovacuum comes as late" not in each["message"]
    ]
    wrong = any(severity == "wrong" for severity, *_ in found)
    assert (ran.exit_code, ran.json["ok"]) == (int(wrong), not wrong)
    return found


async def test_tables_as_the_code_makes_them_have_no_findings(shop: Shop) -> None:
    assert await findings(shop) == []


async def test_it_leaves_nothing_behind(shop: Shop) -> None:
    before = await everything(shop.engine)
    await oncely("check", shop.target("rooms"))
    assert await everything(shop.engine) == before


async def everything(engine: AsyncEngine) -> list[Any]:
    async with engine.connect() as connection:
        return list(
            await connection.execute(
                text(
                    "SELECT relnamespace::regnamespace::text, relname, relkind FROM pg_class ORDER BY 1, 2, 3"
                )
            )
        )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            "ALTER TABLE outbox DROP COLUMN dedup_key",
            [
                ("outbox", "has no column dedup_key"),
                ("outbox", "index outbox_dedup_idx is missing: "),
            ],
        ),
        (
            "ALTER TABLE outbox ALTER COLUMN topic TYPE varchar(50)",
            [("outbox", "column topic: its type is character varying(50), the code has text")],
        ),
        (
            "ALTER TABLE outbox ALTER COLUMN key SET NOT NULL",
            [("outbox", "column key: NULL is refused, the code has allowed")],
        ),
        (
            "ALTER TABLE inbox ALTER COLUMN handled_at DROP DEFAULT",
            [("inbox", "column handled_at: its default is missing, the code has now()")],
        ),
        (
            "ALTER TABLE outbox ADD COLUMN tenant text; ALTER TABLE outbox ALTER COLUMN tenant SET NOT NULL",
            [
                (
                    "outbox",
                    "column tenant is not the code's, NOT NULL and without a default: no row can be written",
                )
            ],
        ),
        (
            "ALTER TABLE outbox DROP CONSTRAINT outbox_dead_check",
            [("outbox", "constraint outbox_dead_check is missing")],
        ),
        (
            """ALTER TABLE outbox DROP CONSTRAINT outbox_attempts_check;
            ALTER TABLE outbox ADD CONSTRAINT outbox_attempts_check CHECK (attempts >= 0) NOT VALID""",
            [("outbox", "constraint outbox_attempts_check was not validated: old rows may break it")],
        ),
        (
            "ALTER TABLE inbox DROP CONSTRAINT inbox_pkey",
            [("inbox", "constraint inbox_pkey is missing")],
        ),
        (
            """DROP INDEX outbox_pending_idx;
            CREATE INDEX outbox_pending_idx ON outbox (position) WHERE published_at IS NULL""",
            [
                (
                    "outbox",
                    'index outbox_pending_idx is btree ("position") WHERE (published_at IS NULL), the code ',
                )
            ],
        ),
        (
            """ALTER TABLE outbox DROP CONSTRAINT outbox_attempts_check;
            ALTER TABLE outbox ADD CONSTRAINT outbox_attempts_check CHECK (attempts >= 1)""",
            [
                (
                    "outbox",
                    "constraint outbox_attempts_check is CHECK ((attempts >= 1)), the code has ",
                )
            ],
        ),
        (
            "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'outbox_pending_idx'::regclass",
            [("outbox", "index outbox_pending_idx is not complete: CREATE INDEX CONCURRENTLY was broken")],
        ),
        ("DROP TABLE inbox", [("inbox", "is not there")]),
        (
            "ALTER TABLE outbox SET (autovacuum_enabled = false)",
            [("outbox", "autovacuum is off for this table")],
        ),
    ],
)
async def test_a_table_that_differs_is_wrong_and_comes_with_what_mends_it(
    shop: Shop, change: str, expected: list[tuple[str, str]]
) -> None:
    for statement in change.split(";"):
        await execute(shop.engine, statement)
    found = await findings(shop)
    assert [
        (about, message[: len(start)])
        for (_, about, message, _), (_, start) in zip(found, expected, strict=True)
    ] == expected
    assert {severity for severity, *_ in found} == {"wrong"}


@pytest.mark.parametrize(
    "change",
    [
        "DROP INDEX outbox_pending_idx",
        "ALTER TABLE outbox DROP CONSTRAINT outbox_dead_check",
        """ALTER TABLE outbox DROP CONSTRAINT outbox_attempts_check;
        ALTER TABLE outbox ADD CONSTRAINT outbox_attempts_check CHECK (attempts >= 1)""",
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'outbox_pending_idx'::regclass",
        "ALTER TABLE outbox DROP COLUMN dedup_key",
        "ALTER TABLE outbox ADD COLUMN tenant text; ALTER TABLE outbox ALTER COLUMN tenant SET NOT NULL",
        "ALTER TABLE outbox SET (autovacuum_enabled = false)",
        """DROP INDEX outbox_pending_idx;
        CREATE INDEX outbox_pending_idx ON outbox (position) WHERE published_at IS NULL""",
    ],
)
async def test_the_remedy_mends(shop: Shop, change: str) -> None:
    for statement in change.split(";"):
        await execute(shop.engine, statement)
    autocommit = shop.engine.execution_options(isolation_level="AUTOCOMMIT")
    for _, _, _, remedy in await findings(shop):
        assert remedy is not None
        for statement in remedy.rstrip(";").split(";\n"):
            async with autocommit.connect() as connection:
                await connection.execute(text(statement))
    assert await findings(shop) == []


async def test_what_the_user_added_or_renamed_is_the_users_own(shop: Shop) -> None:
    await execute(shop.engine, "ALTER TABLE outbox ADD COLUMN tenant text")
    await execute(shop.engine, "CREATE INDEX of_our_own ON outbox (topic)")
    await execute(shop.engine, "ALTER INDEX outbox_pending_idx RENAME TO ix_pending")
    await execute(shop.engine, "ALTER TABLE outbox RENAME CONSTRAINT outbox_dead_check TO ck_dead")
    assert await findings(shop) == []


@asynccontextmanager
async def open_transaction(engine: AsyncEngine, statement: str) -> AsyncIterator[AsyncConnection]:
    async with engine.connect() as connection:
        await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
        await connection.execute(text("SELECT set_config('application_name', 'month-end report', true)"))
        await connection.execute(text(statement))
        yield connection


async def test_a_transaction_that_stays_open_is_named_by_process_and_application(shop: Shop) -> None:
    await emit(shop.outbox, shop.sessions, 1)
    async with open_transaction(shop.engine, "SELECT 1") as connection:
        pid = await connection.scalar(text("SELECT pg_backend_pid()"))
        assert await findings(shop) == []  # for less than a minute
        held = [
            each
            for each in await findings(shop, "--open-for", "0s")
            if each[1] == f"process {pid} (month-end report)"
        ]
        ((severity, _, message, remedy),) = held
        others = [about for _, about, *_ in await findings(shop, "--open-for", "0s")]
    assert severity == "wrong"
    assert message.endswith("idle in transaction; it holds the horizon")
    assert remedy == f"SELECT pg_terminate_backend({pid});"
    assert "outbox" in others  # what the outbox carries along
    await shop.engine.dispose()
    assert pid not in [about for _, about, *_ in await findings(shop, "--open-for", "0s")]


async def test_a_transaction_that_has_written_is_known(shop: Shop) -> None:
    async with open_transaction(shop.engine, "CREATE TABLE something ()"):
        messages = [message for _, _, message, _ in await findings(shop, "--open-for", "0s")]
    assert any(
        message.endswith("it has written: relays read again what was published since") for message in messages
    )


@pytest.fixture(scope="module")
def lax_server() -> Iterator[EmbeddedPostgres]:
    """A server without autovacuum, and with all that replication needs."""
    with EmbeddedPostgres({"wal_level": "logical", "autovacuum": "off"}) as server:
        yield server


async def findings_on(server: EmbeddedPostgres, shop: Shop) -> dict[str, tuple[str, str | None]]:
    """What is wrong with a server: message and remedy."""
    place = ["--database-url", server.url(), "--open-for", "0s"]
    ran = await oncely("check", shop.target("rooms"), *place, "--json")
    assert ran.exit_code == 1
    return {each["about"]: (each["message"], each["remedy"]) for each in ran.json["findings"]}


async def test_a_prepared_transaction_and_an_unused_slot_are_named(
    shop: Shop, lax_server: EmbeddedPostgres
) -> None:
    with psycopg.connect(lax_server.dsn(), autocommit=True) as connection:
        connection.execute("SELECT pg_create_physical_replication_slot('forgotten', true)")
        connection.execute("BEGIN")
        connection.execute("CREATE TABLE something ()")
        connection.execute("PREPARE TRANSACTION 'it''s lost'")
    found = await findings_on(lax_server, shop)
    assert found["prepared transaction it's lost"][1] == "ROLLBACK PREPARED 'it''s lost';"
    assert found["replication slot forgotten"][1] == "SELECT pg_drop_replication_slot('forgotten');"
    with psycopg.connect(lax_server.dsn(), autocommit=True) as connection:
        connection.execute("ROLLBACK PREPARED 'it''s lost'")
        connection.execute("SELECT pg_drop_replication_slot('forgotten')")


async def test_a_server_without_autovacuum_is_wrong(shop: Shop, lax_server: EmbeddedPostgres) -> None:
    assert (await findings_on(lax_server, shop))["autovacuum"] == (
        "is off for the whole server: nothing removes dead rows",
        "ALTER SYSTEM SET autovacuum = on;\nSELECT pg_reload_conf();",
    )


@pytest.mark.parametrize(
    ("slot", "about", "message"),
    [
        (None, "process {pid} (a replica)", "serves a replica whose queries hold the horizon back by 7 "),
        ("of_replica", "replication slot of_replica", "holds the horizon back by 7 "),
    ],
)
async def test_a_replica_that_holds_rows_back_is_named(
    shop: Shop,
    lax_server: EmbeddedPostgres,
    monkeypatch: pytest.MonkeyPatch,
    slot: str | None,
    about: str,
    message: str,
) -> None:
    monkeypatch.setattr("oncely.check.horizon._FAR_BEHIND", 5)
    async with replica(lax_server, slot) as pid:
        with psycopg.connect(lax_server.dsn(), autocommit=True) as connection:
            for _ in range(7):
                connection.execute("SELECT txid_current()")
        found = await findings_on(lax_server, shop)
    assert found[about.format(pid=pid)] == (f"{message}transactions", None)


@asynccontextmanager
async def replica(server: EmbeddedPostgres, slot: str | None) -> AsyncIterator[int]:
    """As much of a standby as holds rows back: it streams, and says that it has a query of now.

    With a slot the server keeps that with the slot. Gives the process id that serves it.
    """
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        if slot is not None:
            connection.execute("SELECT pg_create_physical_replication_slot(%s, true)", [slot])
        row = connection.execute(
            "SELECT pg_current_wal_flush_lsn()::text, pg_snapshot_xmin(pg_current_snapshot())::text"
        ).fetchone()
        assert row is not None
        reader, writer = await asyncio.open_unix_connection(f"{server.folder}/.s.PGSQL.5432")
        words = ["user", "postgres", "replication", "true", "application_name", "a replica", ""]
        _send(writer, b"", struct.pack("!I", 3 << 16) + b"".join(word.encode() + b"\0" for word in words))
        await _reply(reader, b"Z")  # ready for a command
        of_slot = "" if slot is None else f"SLOT {slot} "
        _send(writer, b"Q", f"START_REPLICATION {of_slot}PHYSICAL {row[0]}\0".encode())
        await _reply(reader, b"W")  # it streams from here on
        _send(writer, b"d", b"h" + struct.pack("!QIIII", 0, int(row[1]), 0, 0, 0))
        pid = 0

        def is_seen() -> bool:
            nonlocal pid
            row = connection.execute(
                "SELECT pid FROM pg_stat_replication LEFT JOIN pg_replication_slots ON active_pid = pid"
                " WHERE application_name = 'a replica' AND coalesce(xmin, backend_xmin) IS NOT NULL"
            ).fetchone()
            pid = pid if row is None else row[0]
            return row is not None

        await until(is_seen)
        yield pid
        writer.close()
        await writer.wait_closed()
        if slot is not None:
            connection.execute("SELECT pg_terminate_backend(%s, 20000)", [pid])
            connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])


def _send(writer: asyncio.StreamWriter, kind: bytes, body: bytes) -> None:
    writer.write(kind + struct.pack("!I", len(body) + 4) + body)


async def _reply(reader: asyncio.StreamReader, kind: bytes) -> None:
    """Reads on to the first message of that kind."""
    async with asyncio.timeout(20):
        while True:
            came, length = struct.unpack("!cI", await reader.readexactly(5))
            body = await reader.readexactly(length - 4)
            assert came != b"E", body
            if came == kind:
                return


async def test_a_server_that_allows_no_tables_to_be_made_is_not_compared(
    shop: Shop, engine: AsyncEngine
) -> None:
    await execute(
        engine,
        """CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE 'only by the release team'; END $$""",
    )
    await execute(engine, "CREATE EVENT TRIGGER refuse ON ddl_command_start EXECUTE FUNCTION refuse()")
    try:
        found = await findings(shop)
    finally:
        await execute(engine, "DROP EVENT TRIGGER refuse")
    assert [(severity, message) for severity, _, message, _ in found] == [
        ("wrong", "cannot be checked: the database says: only by the release team (P0001)")
    ]


async def test_advice_on_autovacuum_is_to_be_pasted_and_then_gone(shop: Shop) -> None:
    ran = await oncely("check", shop.target("rooms"))
    assert ran.exit_code == 0
    assert "    ALTER TABLE outbox_claims SET (" in ran.stdout.replace("oncely_test.", "")
    assert ran.stdout.endswith("0 wrong, 5 to consider\n")
    for line in ran.stdout.splitlines():
        if line.startswith("    "):
            await execute(shop.engine, line.strip().rstrip(";"))
    ran = await oncely("check", shop.target("rooms"))
    assert (ran.exit_code, ran.stdout) == (0, "0 wrong, 0 to consider\n")


async def test_ids_that_are_compressed_for_nothing_as_in_a_table_that_alembic_made(shop: Shop) -> None:
    assert await findings(shop) == []
    await execute(shop.engine, "ALTER TABLE outbox_claims ALTER COLUMN event_ids SET STORAGE EXTENDED")
    ((severity, about, _, remedy),) = await findings(shop)
    assert (severity, about) == ("advice", "outbox_claims")
    assert remedy is not None
    await execute(shop.engine, remedy)
    assert await findings(shop) == []


async def test_a_database_that_is_away_is_wrong(shop: Shop) -> None:
    nowhere = "postgresql+asyncpg://nobody@127.0.0.1:1/nowhere"
    ran = await oncely("check", shop.target("rooms"), "--database-url", nowhere, "--json")
    assert ran.exit_code == 1
    (finding,) = ran.json["findings"]
    assert finding["message"].startswith("cannot be checked: the database cannot be reached: ")


async def test_dead_letters_that_the_inbox_may_have_forgotten(shop: Shop) -> None:
    await emit(shop.outbox, shop.sessions, "old", "new")
    await fail(shop.outbox, shop.sessions, "old", delay=None)
    await fail(shop.outbox, shop.sessions, "new", delay=None)
    now = round(datetime.now(UTC).timestamp() * 1_000)
    await add_dead_letter(shop, dead_at=now)
    assert await findings(shop, target="forgetful") == []
    await execute(
        shop.engine,
        "UPDATE outbox SET dead_at = dead_at - interval '40 days' WHERE payload = '\"old\"'",
    )
    await shop.redis.delete(f"{shop.stream}:dead")
    await add_dead_letter(shop, dead_at=1_700_000_000_000)
    found = await findings(shop, target="forgetful")
    assert [
        (severity, about, message.partition(" has been")[0]) for severity, about, message, _ in found
    ] == [
        ("advice", "outbox", "its oldest dead event"),
        ("advice", f"{shop.stream}:dead", "its oldest dead letter"),
    ]
    assert " has been there for 40d" in found[0][2]
    assert found[0][2].endswith(", and an inbox forgets after 30d: what is replayed may be handled twice")


async def add_dead_letter(shop: Shop, *, dead_at: int) -> None:
    await shop.redis.execute_command(  # type: ignore[no-untyped-call]
        *("XADD", f"{shop.stream}:dead", "*", "id", str(uuid7()), "topic", "t", "payload", "1"),
        *("error", "E: e", "attempts", 5, "group", "billing", "entry", "1-1", "dead_at", dead_at),
    )


async def test_dead_letters_of_an_outbox_that_is_not_there_are_not_looked_for(shop: Shop) -> None:
    await execute(shop.engine, "DROP TABLE outbox")
    assert [(about, message) for _, about, message, _ in await findings(shop, target="forgetful")] == [
        ("outbox", "is not there")
    ]
