"""How the outbox's statements are executed on 100,000 rows: along the indexes, with statistics or without."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import MetaData, create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, async_sessionmaker

from oncely import Outbox
from oncely.ledger import Ledger
from oncely.statement import Statement
from oncely.testing import RecordingPublisher
from tests.database import Database
from tests.outboxes import emit, fail

LIMIT = 500
TRIED = 40
DEAD = 100

# In line: 60,000 published, 36,000 ready, 4,000 deferred of which 1,000 are due, a few tried and dead ones.
FILL = """
INSERT INTO outbox (id, topic, key, payload, dedup_key, created_at, due_at, attempts, published_at, dead_at)
SELECT CAST(lpad(to_hex(CAST(1000 * extract(epoch FROM at) AS bigint)), 12, '0')
            || substr(md5(CAST(n AS text)), 1, 20) AS uuid),
       't', CASE WHEN n % 3 = 0 THEN 'k' || n % 1000 END, '{"n": 1}', CASE WHEN n % 2 = 0 THEN n END, at,
       CASE WHEN dead THEN NULL WHEN tried THEN now() - interval '1 s'
            WHEN n > 60000 AND n % 10 = 0 THEN now() + (n - 70000) * interval '1 s' END,
       CASE WHEN dead OR tried THEN 3 ELSE 0 END,
       CASE WHEN n <= 60000 AND NOT dead THEN at END,
       CASE WHEN dead THEN at END
FROM generate_series(1, 100000) AS n,
     LATERAL (SELECT now() - (100001 - n) * interval '1 s' AS at, n % 1000 = 7 AS dead,
                     n > 60000 AND n % 1000 = 13 AS tried) AS facts
"""

Node = dict[str, Any]


@pytest.fixture(scope="module", params=["without statistics", "analyzed"])
def filled(request: pytest.FixtureRequest) -> Iterator[Database]:
    """The tables with all of that in them; tests roll back what they do."""
    url = os.environ.get("ONCELY_TEST_DATABASE_URL") or request.getfixturevalue("postgres").url()
    with Database.in_schema(url, "psycopg") as database:
        metadata = MetaData()
        Outbox(metadata)
        options = f"-csearch_path={database.schema}"
        engine = create_engine(database.url, connect_args={"options": options}, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            metadata.create_all(connection)
            connection.execute(text("ALTER TABLE outbox SET (autovacuum_enabled = off)"))
            connection.execute(text(FILL))
            if request.param == "analyzed":
                connection.execute(text("VACUUM ANALYZE outbox"))
        engine.dispose()
        yield database


@pytest.fixture
async def connection(filled: Database) -> AsyncIterator[AsyncConnection]:
    engine = filled.engine()
    async with engine.connect() as connection:
        yield connection
    await engine.dispose()


@pytest.fixture
def outbox() -> Outbox:
    return Outbox(MetaData())


@pytest.fixture
def parking() -> Outbox:
    return Outbox(MetaData(), on_dead="park")


async def explained(
    connection: AsyncConnection, statement: Statement, parameters: Mapping[str, Any]
) -> list[Node]:
    """The nodes of the statement's plan, after it was executed."""
    asked = copy.copy(statement)
    asked.text = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement.text}"
    answer = (await connection.execute(asked, parameters)).scalar_one()
    [plan] = json.loads(answer) if isinstance(answer, str) else answer
    nodes: list[Node] = [plan["Plan"]]
    for node in nodes:
        nodes += node.get("Plans", ())
    return nodes


def of_the_outbox(nodes: list[Node]) -> list[Node]:
    return [node for node in nodes if node.get("Relation Name") == "outbox" and "Scan" in node["Node Type"]]


def read(nodes: list[Node]) -> int:
    """How many of the outbox's rows were looked at."""
    looked_at = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
    return sum(
        int(node["Actual Loops"] * sum(node.get(name, 0) for name in looked_at))
        for node in of_the_outbox(nodes)
    )


def along_the_indexes(nodes: list[Node], *, at_most: int) -> None:
    scans = of_the_outbox(nodes)
    assert scans
    assert [node["Node Type"] for node in scans if node["Node Type"] == "Seq Scan"] == []
    assert read(nodes) <= at_most
    sorted_rows = [
        node["Actual Rows"] for node in nodes if "Sort" in node["Node Type"] if node["Actual Loops"]
    ]
    assert max(sorted_rows, default=0) <= 2 * LIMIT + 1


def choosing(ledger: Ledger, *, tried_first: bool) -> dict[str, Any]:
    return {
        "token": uuid4(),
        "claimed_by": "x:1",
        "lease": timedelta(seconds=30),
        "limit": LIMIT,
        "tried_first": tried_first,
        "locked_ids": [],
        "locked_keys": [],
        "locked_low": None,
        **ledger._floor.parameters(),
    }


async def chosen(connection: AsyncConnection, ledger: Ledger, *, tried_first: bool) -> list[Node]:
    """The plan of a claim, under the settings of its transaction."""
    await connection.run_sync(ledger._claimer.become)
    return await explained(connection, ledger._chooser._choose, choosing(ledger, tried_first=tried_first))


async def claimed(connection: AsyncConnection, *, expired: bool = False) -> tuple[UUID, list[UUID]]:
    """A batch in flight: its token and events."""
    made = text(
        "INSERT INTO outbox_claims (token, claimed_by, expires_at, event_ids, keys)"
        " SELECT gen_random_uuid(), 'x:1', now() + CAST(:left AS interval), ARRAY("
        "SELECT id FROM outbox WHERE published_at IS NULL AND dead_at IS NULL AND due_at IS NULL"
        " ORDER BY position LIMIT 500), '{}' RETURNING token, event_ids"
    )
    left = timedelta(hours=-1 if expired else 1)
    token, event_ids = (await connection.execute(made, {"left": left})).one()
    return token, event_ids


@pytest.mark.parametrize("on_dead", ["continue", "park"])
async def test_a_claim_of_fresh_events_reads_a_few_times_its_batch(
    connection: AsyncConnection, outbox: Outbox, parking: Outbox, on_dead: str
) -> None:
    ledger = (parking if on_dead == "park" else outbox).ledger
    nodes = await chosen(connection, ledger, tried_first=False)
    along_the_indexes(nodes, at_most=3 * LIMIT + TRIED + (DEAD if on_dead == "park" else 0) + LIMIT)
    assert {node["Node Type"] for node in of_the_outbox(nodes)} <= {
        "Index Scan",
        "Index Only Scan",
        "Tid Scan",
    }
    assert {node["Index Name"] for node in of_the_outbox(nodes) if "Index Name" in node} <= {
        "outbox_pending_idx",
        "outbox_deferred_idx",
        "outbox_tried_idx",
        "outbox_dead_idx",
        "outbox_pkey",
    }


async def test_a_claim_of_a_tried_event_reads_the_tried_ones_only(
    connection: AsyncConnection, outbox: Outbox
) -> None:
    nodes = await chosen(connection, outbox.ledger, tried_first=True)
    along_the_indexes(nodes, at_most=TRIED + 8 + 1)


async def test_a_claim_beside_others_reads_past_what_they_have_and_hold(
    connection: AsyncConnection, outbox: Outbox
) -> None:
    """What is in flight is first in line: it is read past by the choice, and once more for the floor."""
    for _ in range(4):
        await connection.run_sync(outbox.ledger._claimer.become)
        parameters = choosing(outbox.ledger, tried_first=False)
        await connection.execute(outbox.ledger._chooser._choose, parameters)
    assert await connection.scalar(text("SELECT sum(cardinality(event_ids)) FROM outbox_claims")) == 4 * LIMIT
    nodes = await chosen(connection, outbox.ledger, tried_first=False)
    along_the_indexes(nodes, at_most=2 * 4 * LIMIT + 4 * LIMIT)


async def test_the_events_of_a_large_claim_are_read_by_their_ids(
    connection: AsyncConnection, outbox: Outbox
) -> None:
    token, event_ids = await claimed(connection)
    await connection.run_sync(outbox.ledger._claimer.become)
    nodes = await explained(connection, outbox.ledger._chooser._read, {"token": token})
    assert {node["Index Name"] for node in of_the_outbox(nodes)} == {"outbox_pkey"}
    along_the_indexes(nodes, at_most=len(event_ids))


async def test_a_claim_finds_the_other_claims_by_number(connection: AsyncConnection, outbox: Outbox) -> None:
    nodes = await chosen(connection, outbox.ledger, tried_first=False)
    scans = [
        node for node in nodes if node.get("Relation Name") == "outbox_claims" and "Scan" in node["Node Type"]
    ]
    assert {node["Index Name"] for node in scans} == {"outbox_claims_pkey"}


@pytest.mark.parametrize("partly", [False, True])
async def test_settling_reads_its_batch(connection: AsyncConnection, outbox: Outbox, partly: bool) -> None:
    token, event_ids = await claimed(connection)
    parameters: dict[str, Any] = {"token": token}
    statement = outbox.ledger._settle
    if partly:
        statement = outbox.ledger._settle_partly
        parameters |= {
            "published": event_ids[:300],
            "failed": event_ids[300:310],
            "errors": ["no"] * 10,
            "delays": [timedelta(seconds=1)] * 10,
        }
    along_the_indexes(await explained(connection, statement, parameters), at_most=3 * LIMIT)


async def test_reaping_reads_what_is_reaped(connection: AsyncConnection, outbox: Outbox) -> None:
    await connection.run_sync(outbox.ledger._claimer.become)
    await claimed(connection, expired=True)
    nodes = await explained(connection, outbox.ledger._reaper._reap, {"limit": 20})
    along_the_indexes(nodes, at_most=3 * LIMIT)


async def test_pruning_reads_what_was_emitted_before_the_cutoff(
    connection: AsyncConnection, outbox: Outbox
) -> None:
    parameters = {"after": UUID(int=0), "limit": LIMIT, "cutoff": None, "age": timedelta(seconds=99_000)}
    nodes = await explained(connection, outbox._pruning._prune, parameters)
    # What was emitted in the hour after the cutoff may be read too, and a thousand before it is deleted.
    along_the_indexes(nodes, at_most=3_600 + 1_000 + 2 * LIMIT)
    parameters["age"] = timedelta(days=7)
    along_the_indexes(await explained(connection, outbox._pruning._prune, parameters), at_most=0)


async def test_a_cancel_reads_one_row(connection: AsyncConnection, outbox: Outbox) -> None:
    _, [event_id, *_] = await claimed(connection)
    await connection.execute(text("TRUNCATE outbox_claims"))
    for statement in (outbox._cancellation._lock, outbox._cancellation._delete):
        along_the_indexes(await explained(connection, statement, {"id": event_id}), at_most=1)


async def test_a_dedup_key_is_found_by_its_index(connection: AsyncConnection, outbox: Outbox) -> None:
    parameters = {"topic": ["t"] * 3, "dedup_key": ["2", "4", "no"], "key": [None] * 3, "payload": ["1"] * 3}
    nodes = await explained(connection, outbox._emission._find_first, parameters)
    along_the_indexes(nodes, at_most=3)  # two; before PostgreSQL 18 the rows of a loop are rounded
    assert {node["Index Name"] for node in of_the_outbox(nodes)} == {"outbox_dedup_idx"}


@pytest.mark.parametrize("on_dead", ["continue", "park"])
async def test_the_lag_reads_the_first_in_line_the_tried_and_the_dead(
    connection: AsyncConnection, outbox: Outbox, parking: Outbox, on_dead: str
) -> None:
    statistics = (parking if on_dead == "park" else outbox)._statistics
    nodes = await explained(connection, statistics._lag, {})
    along_the_indexes(nodes, at_most=TRIED + 2 + (3 * DEAD if on_dead == "park" else 0))


async def test_statistics_count_no_further_than_asked(connection: AsyncConnection, outbox: Outbox) -> None:
    nodes = await explained(connection, outbox._statistics._look, {"at_most": 50})
    along_the_indexes(nodes, at_most=5 * 50 + 2 * TRIED + 2)


async def test_dead_letters_are_found_by_their_index(connection: AsyncConnection, outbox: Outbox) -> None:
    which: dict[str, Any] = dict.fromkeys(("ids", "topic", "error", "since", "until")) | {"limit": 10}
    letters = outbox._dead_letters
    for statement in (letters._list, letters._replay, letters._discard):
        along_the_indexes(await explained(connection, statement, which), at_most=DEAD + 20)
    some = (await connection.scalars(text("SELECT id FROM outbox WHERE dead_at IS NOT NULL LIMIT 3"))).all()
    for statement in (letters._replay, letters._discard):
        nodes = await explained(connection, statement, which | {"ids": list(some)})
        along_the_indexes(nodes, at_most=DEAD + 3)


# --- what a relay remembers


@pytest.fixture
async def own(request: pytest.FixtureRequest) -> AsyncIterator[AsyncEngine]:
    """An engine on empty tables of the test's own."""
    url = os.environ.get("ONCELY_TEST_DATABASE_URL") or request.getfixturevalue("postgres").url()
    with Database.in_schema(url, "asyncpg") as database:
        metadata = MetaData()
        Outbox(metadata)
        engine = database.engine()
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        yield engine
        await engine.dispose()


async def test_a_backlog_behind_a_held_key_is_not_read_again_and_again(
    outbox: Outbox, own: AsyncEngine
) -> None:
    sessions = async_sessionmaker(own)
    await emit(outbox, sessions, "first", key="held")
    await fail(outbox, sessions, "first", delay=timedelta(hours=1))
    await emit(outbox, sessions, *range(5_000), key="held")
    for number in range(4):
        await emit(outbox, sessions, *range(number, number + 5))
        await outbox.relay_once(sessions, RecordingPublisher())
    await emit(outbox, sessions, *range(10))
    async with own.connect() as connection:
        nodes = await chosen(connection, outbox.ledger, tried_first=False)
        await connection.rollback()
        forgetful = await chosen(connection, Outbox(MetaData()).ledger, tried_first=False)
    assert read(nodes) < 100
    assert read(forgetful) > 5_000


async def test_published_rows_that_a_long_reader_keeps_are_not_read_again_and_again(
    outbox: Outbox, own: AsyncEngine
) -> None:
    sessions = async_sessionmaker(own)

    async def pages(ledger: Ledger) -> int:
        async with own.connect() as connection:
            nodes = await chosen(connection, ledger, tried_first=False)
        return int(nodes[0]["Shared Hit Blocks"] + nodes[0]["Shared Read Blocks"])

    async with own.connect() as reader:
        await reader.execution_options(isolation_level="REPEATABLE READ")
        await reader.execute(text("SELECT count(*) FROM outbox"))
        for _ in range(4):
            await emit(outbox, sessions, *range(2_000))
            while await outbox.relay_once(sessions, RecordingPublisher(), batch=1_000):
                pass
        await emit(outbox, sessions, *range(10))
        assert await pages(outbox.ledger) * 3 < await pages(Outbox(MetaData()).ledger)
