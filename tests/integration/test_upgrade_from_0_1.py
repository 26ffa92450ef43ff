"""Tables of version 0.1.0 are upgraded by Alembic's autogenerate, and today's code goes on with their rows.

What those tables were: today's columns without those that serve what 0.1.0 did not do. It had no
bytes as an answer and no time to live (`response_bytes`, `expires_at`), no place in line, keys,
headers, deduplication, delays or dead letters (`position`, `key`, `headers`, `dedup_key`, `due_at`,
`dead_at`) and no claims. Whether it counted failed tries is left open: both forms are upgraded here.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import (
    JSON,
    Column,
    DateTime,
    Engine,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    Uuid,
    create_engine,
    func,
    make_url,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from oncely.errors import KeyReused
from oncely.idempotency import IdempotencyKeys, Outcome, fingerprint
from oncely.outbox import Outbox
from oncely.testing import RecordingPublisher
from tests.database import Database
from tests.migrations import CHECKS_TOO, Project

TIME = DateTime(timezone=True)

IDS = [uuid.UUID(int=(1_700_000_000_000 + number << 80) + (7 << 76) + (2 << 62)) for number in range(8)]
"""Ids of version 7, a millisecond apart."""

OLD_ROWS_IN_ORDER = """
    # Old events keep their order, and their tries are counted anew.
    op.execute("UPDATE outbox SET attempts = 0 WHERE published_at IS NULL")
    op.execute("CLUSTER outbox USING outbox_pkey")
"""


def keys_of_0_1(metadata: MetaData, json_type: type[JSON] = JSONB) -> Table:
    return Table(
        "idempotency_keys",
        metadata,
        Column("scope", Text, primary_key=True),
        Column("key", Text, primary_key=True),
        Column("request_hash", LargeBinary, nullable=False),
        Column("response_code", Integer),
        Column("response_headers", json_type),
        Column("response_body", Text),
        Column("created_at", TIME, nullable=False, server_default=func.now()),
        Index("idempotency_keys_created_at_idx", "created_at"),
    )


def outbox_of_0_1(metadata: MetaData, json_type: type[JSON] = JSONB) -> Table:
    return Table(
        "outbox",
        metadata,
        Column("id", Uuid, primary_key=True),
        Column("topic", Text, nullable=False),
        Column("payload", json_type, nullable=False),
        Column("created_at", TIME, nullable=False, server_default=func.now()),
        Column("published_at", TIME),
        Index("outbox_pending_idx", "id", postgresql_where=text("published_at IS NULL")),
    )


def counting_outbox_of_0_1(metadata: MetaData) -> Table:
    outbox = outbox_of_0_1(metadata)
    outbox.append_column(Column("attempts", Integer, nullable=False, server_default=text("0")))
    outbox.append_column(Column("last_error", Text))
    return outbox


@dataclass
class Shop:
    """A database as 0.1.0 left it, and the MetaData of today that is to take it over."""

    project: Project
    engine: Engine
    metadata: MetaData = field(default_factory=MetaData)

    def begin_with(self, table: Table, rows: list[dict[str, object]]) -> None:
        """The tables of `table`'s MetaData, made by a first revision, with rows in one of them."""
        self.project.revision(table.metadata)
        self.project.upgrade()
        with self.engine.begin() as connection:
            connection.execute(table.insert(), rows)

    def upgrade(self, first: str = "", **options: Any) -> None:
        """Runs what autogenerate writes; `first` is put before it, by hand."""
        file = self.project.revision(self.metadata, **options)
        head = "def upgrade() -> None:"
        assert head in file.read_text()
        file.write_text(file.read_text().replace(head, head + first))
        self.project.upgrade()
        assert self.project.difference(self.metadata, **options) == []


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> Iterator[Shop]:
    engine = create_engine(make_url(database.dsn()).set(drivername="postgresql+psycopg"))
    yield Shop(Project(tmp_path / "migrations", engine), engine)
    engine.dispose()


Sessions = async_sessionmaker[AsyncSession]

ANSWERS = [
    ("created", 201, {"Location": "/orders/1"}, '{"id": 1}'),
    ("empty", 204, None, None),
    ("blank", 200, None, ""),
    ("refused", 409, {}, "sold out"),
]
"""Answers that 0.1.0 stored: key, code, headers, body."""


def emitted(table: Table, *numbers: int) -> list[dict[str, object]]:
    """Rows of the old outbox; their payloads count them."""
    return [{"id": IDS[number], "topic": "order.placed", "payload": {"n": number}} for number in numbers]


async def leave(outbox: Outbox, sessions: Sessions) -> list[object]:
    """The payloads of all events that leave, in that order."""
    publisher = RecordingPublisher()
    while await outbox.relay_once(sessions, publisher, batch=3):
        pass
    return [event.payload["n"] for event in publisher.events]


@pytest.mark.parametrize(("json_type", "options"), [(JSONB, {}), (JSON, CHECKS_TOO)])
async def test_old_keys_replay_their_answers(
    json_type: type[JSON], options: dict[str, Any], shop: Shop, sessions: Sessions
) -> None:
    rows: list[dict[str, object]] = [
        {
            "scope": "alice",
            "key": key,
            "request_hash": fingerprint(key),
            "response_code": code,
            "response_headers": headers,
            "response_body": body,
        }
        for key, code, headers, body in ANSWERS
    ]
    shop.begin_with(keys_of_0_1(MetaData(), json_type), rows)
    keys = IdempotencyKeys(shop.metadata)
    shop.upgrade(**options)

    async def work() -> tuple[int, str]:
        raise AssertionError("the work of an answered key ran again")

    for key, code, headers, body in ANSWERS:
        async with sessions.begin() as session:
            outcome = await keys.run(session, scope="alice", key=key, fingerprint=fingerprint(key), work=work)
        assert outcome == Outcome(code, body, True, tuple((headers or {}).items()))


async def test_old_keys_refuse_another_request_and_are_pruned_by_their_age(
    shop: Shop, sessions: Sessions
) -> None:
    row: dict[str, object] = {"scope": "", "key": "k", "request_hash": fingerprint("a"), "response_code": 200}
    shop.begin_with(keys_of_0_1(MetaData()), [row])
    keys = IdempotencyKeys(shop.metadata)
    shop.upgrade()

    async def work() -> tuple[int, None]:
        return 201, None

    async with sessions.begin() as session:
        with pytest.raises(KeyReused):
            await keys.run(session, scope="", key="k", fingerprint=fingerprint("b"), work=work)
        assert await keys.prune(session, older_than=timedelta(hours=1)) == 0
        assert await keys.prune(session, older_than=timedelta(0)) == 1
        outcome = await keys.run(session, scope="", key="k", fingerprint=fingerprint("b"), work=work)
    assert outcome == Outcome(201, None, False)


@pytest.mark.parametrize(("json_type", "options"), [(JSONB, {}), (JSON, CHECKS_TOO)])
async def test_old_events_leave_before_new_ones_and_only_those_that_had_not(
    json_type: type[JSON], options: dict[str, Any], shop: Shop, sessions: Sessions
) -> None:
    table = outbox_of_0_1(MetaData(), json_type)
    shop.begin_with(table, emitted(table, *range(7)))
    with shop.engine.begin() as connection:
        for number in (0, 3):
            connection.execute(
                table.update().where(table.c.id == IDS[number]).values(published_at=func.now())
            )
    outbox = Outbox(shop.metadata)
    shop.upgrade(**options)
    async with sessions.begin() as session:
        await outbox.emit(session, "order.placed", {"n": 7}, key="k")
    assert await leave(outbox, sessions) == [1, 2, 4, 5, 6, 7]
    async with sessions.begin() as session:
        assert await outbox.lag_seconds(session) == 0.0
        assert await outbox.prune(session, older_than=timedelta(0)) == 8


async def test_old_events_that_had_failed_leave_too(shop: Shop, sessions: Sessions) -> None:
    """Autogenerate alone numbers rows as they lie on disk: one that was changed goes behind the others."""
    table = counting_outbox_of_0_1(MetaData())
    shop.begin_with(table, emitted(table, *range(5)))
    with shop.engine.begin() as connection:
        failed = table.update().where(table.c.id == IDS[1])
        connection.execute(failed.values(attempts=3, last_error="no broker"))
    outbox = Outbox(shop.metadata)
    shop.upgrade()
    async with sessions.begin() as session:
        assert await outbox.lag_seconds(session) > 0.0
    assert await leave(outbox, sessions) == [0, 2, 3, 4, 1]


@pytest.mark.parametrize("options", [{}, CHECKS_TOO], ids=["", "checks_too"])
async def test_two_lines_by_hand_keep_old_events_in_the_order_of_their_ids(
    options: dict[str, Any], shop: Shop, sessions: Sessions
) -> None:
    table = counting_outbox_of_0_1(MetaData())
    shop.begin_with(table, emitted(table, 4, 0, 6, 1, 5, 2, 3))
    with shop.engine.begin() as connection:
        failed = table.update().where(table.c.id == IDS[1])
        connection.execute(failed.values(attempts=3, last_error="no broker"))
        connection.execute(table.delete().where(table.c.id == IDS[5]))
    outbox = Outbox(shop.metadata)
    shop.upgrade(OLD_ROWS_IN_ORDER, **options)
    async with sessions.begin() as session:
        await outbox.emit(session, "order.placed", {"n": 7})
    assert await leave(outbox, sessions) == [0, 1, 2, 3, 4, 6, 7]


async def test_an_upgraded_database_can_go_back(shop: Shop, sessions: Sessions) -> None:
    table = counting_outbox_of_0_1(MetaData())
    shop.begin_with(table, emitted(table, 0, 1))
    outbox = Outbox(shop.metadata)
    shop.upgrade(OLD_ROWS_IN_ORDER)
    assert await leave(outbox, sessions) == [0, 1]
    shop.project.downgrade("-1")
    with shop.engine.begin() as connection:
        rows = connection.execute(select(table.c.id, table.c.published_at).order_by(table.c.id)).all()
    assert [(row.id, row.published_at is not None) for row in rows] == [(IDS[0], True), (IDS[1], True)]
