"""Every statement reaches the caller's schema: by schema=, MetaData(schema=…), schema_translate_map.

The tables exist in two tenants' schemas and nowhere else. Each test does everything that keys,
outbox and inbox can do, in both, and reads the SQL that was sent.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import MetaData, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from oncely.errors import PublishFailed, Refused
from oncely.event import Event, NewEvent, uuid7
from oncely.idempotency import IdempotencyKeys, Outcome, fingerprint
from oncely.inbox import Inbox
from oncely.ledger import Failure
from oncely.outbox import Outbox
from oncely.testing import RecordingPublisher
from tests.database import Database
from tests.schemas import schemas_of_their_own

Sessions = async_sessionmaker[AsyncSession]

HASH = fingerprint("a request")


@dataclass
class Tenant:
    """One tenant's view of the application."""

    schema: str
    keys: IdempotencyKeys
    outbox: Outbox
    inbox: Inbox
    engine: AsyncEngine

    @property
    def sessions(self) -> Sessions:
        return async_sessionmaker(self.engine)

    async def answer(self, key: str, body: str) -> Outcome:
        async def work() -> tuple[int, str]:
            return 201, body

        async with self.sessions.begin() as session:
            return await self.keys.run(session, scope="s", key=key, fingerprint=HASH, work=work)

    async def emit(self, *numbers: int) -> None:
        async with self.sessions.begin() as session:
            await self.outbox.emit_many(session, [NewEvent("t", number) for number in numbers])

    async def relay(self) -> list[object]:
        return [event.payload for event in await self.outbox.relay_once(self.sessions, RecordingPublisher())]


def by_schema_of_the_tables(schema: str, engine: AsyncEngine) -> Tenant:
    metadata = MetaData(schema="nowhere")
    keys = IdempotencyKeys(metadata, table_name="Keys Of", schema=schema)
    outbox = Outbox(metadata, table_name="Outbox Of", schema=schema)
    return Tenant(schema, keys, outbox, Inbox(metadata, table_name="Inbox Of", schema=schema), engine)


def by_schema_of_the_metadata(schema: str, engine: AsyncEngine) -> Tenant:
    metadata = MetaData(schema=schema)
    keys = IdempotencyKeys(metadata, table_name="Keys Of")
    outbox = Outbox(metadata, table_name="Outbox Of")
    return Tenant(schema, keys, outbox, Inbox(metadata, table_name="Inbox Of"), engine)


# The same objects for both tenants: nothing that they remember may go from one to the other.
UNNAMED, NAMED = MetaData(), MetaData(schema="tenant")
TRANSLATED = {
    metadata: (
        IdempotencyKeys(metadata, table_name="Keys Of"),
        Outbox(metadata, table_name="Outbox Of", on_dead="park"),
        Inbox(metadata, table_name="Inbox Of"),
    )
    for metadata in (UNNAMED, NAMED)
}


def by_translating_no_schema(schema: str, engine: AsyncEngine) -> Tenant:
    there = engine.execution_options(schema_translate_map={None: schema})
    return Tenant(schema, *TRANSLATED[UNNAMED], there)


def by_translating_a_name(schema: str, engine: AsyncEngine) -> Tenant:
    there = engine.execution_options(schema_translate_map={"tenant": schema})
    return Tenant(schema, *TRANSLATED[NAMED], there)


WAYS = [
    by_schema_of_the_tables,
    by_translating_a_name,
    by_schema_of_the_metadata,
    by_translating_no_schema,
]

every_way = pytest.mark.parametrize("tenants", WAYS, ids=lambda way: way.__name__, indirect=True)


@pytest.fixture(params=WAYS[:2], ids=lambda way: way.__name__)
async def tenants(
    request: pytest.FixtureRequest, database: Database, engine: AsyncEngine
) -> AsyncIterator[list[Tenant]]:
    """Two tenants; the SQL that was sent is checked at the end."""
    way: Callable[[str, AsyncEngine], Tenant] = request.param
    with schemas_of_their_own(database, "Tenant One", "tenant_two") as made:
        both = [way(schema, engine) for schema in made]
        for tenant in both:
            async with tenant.engine.begin() as connection:
                await connection.run_sync(tenant.keys.table.metadata.create_all)
        sent: list[str] = []

        def keep(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            sent.append(statement)

        event.listen(engine.sync_engine, "before_cursor_execute", keep)
        try:
            yield both
        finally:
            event.remove(engine.sync_engine, "before_cursor_execute", keep)
        assert sent != []
        assert [statement for statement in sent if strays(statement, made)] == []


def strays(statement: str, schemas: Sequence[str]) -> bool:
    """Whether the statement names a table without one of these schemas before it."""
    there = "|".join(re.escape(f'"{schema}"') for schema in schemas)
    bare = re.sub(rf'(?:{there})\."(?:Keys|Outbox|Inbox) Of', "", statement)
    return any(f'"{kind} Of' in bare for kind in ("Keys", "Outbox", "Inbox"))


@every_way
async def test_a_key_belongs_to_its_tenant(tenants: list[Tenant]) -> None:
    one, two = tenants
    assert await one.answer("k", "of one") == Outcome(201, "of one", False)
    assert await two.answer("k", "of two") == Outcome(201, "of two", False)
    assert await one.answer("k", "again") == Outcome(201, "of one", True)
    assert await two.answer("k", "again") == Outcome(201, "of two", True)


async def test_keys_are_read_forgotten_and_pruned_where_they_are(tenants: list[Tenant]) -> None:
    one, two = tenants
    for tenant in tenants:
        await tenant.answer("k", "answer")
        await tenant.answer("l", "answer")
    async with one.sessions.begin() as session:
        assert await one.keys.get(session, scope="s", key="k") == Outcome(201, "answer", True)
        assert await one.keys.forget(session, scope="s", key="k") == 1
        assert await one.keys.prune(session, older_than=timedelta(0)) == 1
        assert await one.keys.get(session, scope="s", key="l") is None
    async with two.sessions.begin() as session:
        assert await two.keys.get(session, scope="s", key="k") == Outcome(201, "answer", True)
        assert await two.keys.forget(session, scope="s") == 2


async def test_a_refusal_and_an_expired_key_stay_in_their_schema(tenants: list[Tenant]) -> None:
    async def refuse() -> tuple[int, str]:
        raise Refused(409, "sold out")

    async def accept() -> tuple[int, str]:
        return 201, "sold"

    for tenant, works in zip(tenants, ((refuse, accept), (accept, refuse)), strict=True):
        outcomes = []
        for work in works:
            async with tenant.sessions.begin() as session:
                outcome = await tenant.keys.run(
                    session, scope="s", key="k", fingerprint=HASH, work=work, ttl=timedelta(microseconds=1)
                )
            outcomes.append((outcome.status, outcome.replayed))
        assert sorted(outcomes) == [(201, False), (409, False)]


@every_way
async def test_an_event_leaves_through_its_tenants_relay_only(tenants: list[Tenant]) -> None:
    one, two = tenants
    for _ in range(3):
        await one.emit(1, 2)
        async with two.sessions.begin() as session:
            await two.outbox.emit(session, "t", 3, key="k")
            assert await two.outbox.lag_seconds(session) >= 0.0
        assert await two.relay() == [3]
        assert await two.relay() == []
        assert await one.relay() == [1, 2]
        assert await one.relay() == []
    for tenant, count in ((one, 6), (two, 3)):
        async with tenant.sessions.begin() as session:
            assert await tenant.outbox.lag_seconds(session) == 0.0
            assert await tenant.outbox.prune(session, older_than=timedelta(0)) == count


async def test_a_dedup_key_and_a_cancel_belong_to_their_tenant(tenants: list[Tenant]) -> None:
    first = []
    for tenant in tenants:
        async with tenant.sessions.begin() as session:
            first.append(await tenant.outbox.emit(session, "t", 1, dedup_key="d"))
            assert await tenant.outbox.emit(session, "t", 1, dedup_key="d") == first[-1]
    one, two = tenants
    assert first[0] != first[1]
    async with two.sessions.begin() as session:
        assert await two.outbox.cancel(session, first[0]) is False
        assert await two.outbox.cancel(session, first[1]) is True
    assert await one.relay() == [1]
    assert await two.relay() == []


async def test_what_fails_is_settled_and_tried_again_where_it_is(tenants: list[Tenant], driver: str) -> None:
    async def away(_: Sequence[Event]) -> None:
        raise ConnectionError

    async def partly(events: Sequence[Event]) -> None:
        raise PublishFailed({events[0].id: ValueError("no")})

    for tenant in tenants:
        await tenant.emit(1, 2)
    for tenant in tenants:
        with pytest.raises(ConnectionError):
            await tenant.outbox.relay_once(tenant.sessions, away)
        with pytest.raises(PublishFailed):
            await tenant.outbox.relay_once(tenant.sessions, partly)
        assert await tenant.relay() == [1]
        assert await tenant.relay() == []


async def test_an_expired_claim_is_reaped_in_its_schema(tenants: list[Tenant]) -> None:
    for tenant in tenants:
        await tenant.emit(1)
        ledger = tenant.outbox.ledger
        claim = await ledger.claim(tenant.sessions, limit=1, lease=timedelta(microseconds=1))
        assert claim is not None
    for tenant in tenants:
        assert await tenant.relay() == [1]


async def test_dead_letters_are_their_tenants(tenants: list[Tenant]) -> None:
    for tenant in tenants:
        await tenant.emit(1, 2)
        ledger = tenant.outbox.ledger
        claim = await ledger.claim(tenant.sessions, limit=9, lease=timedelta(seconds=9))
        assert claim is not None
        assert await ledger.renew(tenant.sessions, claim, lease=timedelta(seconds=9)) is not None
        dead = [Failure(event.id, "ValueError: no", None) for event in claim.events]
        assert await ledger.settle(tenant.sessions, claim, failures=dead)
    one, two = tenants
    async with one.sessions.begin() as session:
        listed = await one.outbox.dead(session)
        assert [letter.payload_json for letter in listed] == ["1", "2"]
        assert await one.outbox.replay(session, ids=[listed[0].id]) == 1
        assert await one.outbox.discard(session) == 1
        assert await one.outbox.dead(session) == []
    async with two.sessions.begin() as session:
        assert len(await two.outbox.dead(session)) == 2
    assert await one.relay() == [1]
    assert await two.relay() == []


async def test_an_inbox_belongs_to_its_tenant(tenants: list[Tenant]) -> None:
    event_id = uuid7()

    async def work() -> None: ...

    for tenant in tenants:
        for first in (True, False):
            async with tenant.sessions.begin() as session:
                assert await tenant.inbox.run(session, event_id, work, consumer="c") is first
    async with tenants[0].sessions.begin() as session:
        assert await tenants[0].inbox.prune(session, older_than=timedelta(0)) == 1
    async with tenants[1].sessions.begin() as session:
        assert await tenants[1].inbox.run(session, event_id, work, consumer="c") is False


async def test_a_table_may_have_any_name(engine: AsyncEngine, database: Database, driver: str) -> None:
    for name in ("Mixed Case", "100% sure", "o'clock", '"{a: b}"', "a.b", "ünïcöde"):
        with schemas_of_their_own(database, name) as made:
            metadata = MetaData(schema=made[0])
            tenant = Tenant(
                made[0],
                IdempotencyKeys(metadata, table_name=f"{name} keys"),
                Outbox(metadata, table_name=f"{name} outbox"),
                Inbox(metadata, table_name=f"{name} inbox"),
                engine,
            )
            async with engine.begin() as connection:
                await connection.run_sync(metadata.create_all)
            assert await tenant.answer("k", "first") == Outcome(201, "first", False)
            assert await tenant.answer("k", "again") == Outcome(201, "first", True)
            await tenant.emit(1, 2)
            assert await tenant.relay() == [1, 2]
            async with tenant.sessions.begin() as session:
                assert await tenant.outbox.lag_seconds(session) == 0.0
                assert await tenant.outbox.prune(session, older_than=timedelta(0)) == 2
                assert await tenant.keys.prune(session, older_than=timedelta(0)) == 1
                assert await tenant.inbox.prune(session, older_than=timedelta(0)) == 0


async def test_a_dot_in_a_name_is_not_taken_for_a_schema(engine: AsyncEngine, database: Database) -> None:
    with schemas_of_their_own(database, "a") as made:
        dotted, apart = MetaData(), MetaData(schema=made[0])
        for metadata, name in ((dotted, f"{made[0]}.b"), (apart, "b")):
            outbox = Outbox(metadata, table_name=name)
            async with engine.begin() as connection:
                await connection.run_sync(metadata.create_all)
            async with async_sessionmaker(engine).begin() as session:
                await outbox.emit(session, "t", name)
            events = await outbox.relay_once(async_sessionmaker(engine), RecordingPublisher())
            assert [event.payload for event in events] == [name]


async def test_a_translation_may_be_the_sessions_own(engine: AsyncEngine, database: Database) -> None:
    """Not the engine's: one pool for all tenants, who is meant is said with each transaction."""
    keys, outbox, _ = TRANSLATED[NAMED]
    with schemas_of_their_own(database, "one", "two") as made:
        for schema in made:
            async with engine.execution_options(
                schema_translate_map={"tenant": schema}
            ).begin() as connection:
                await connection.run_sync(NAMED.create_all)
        for schema in made:
            async with AsyncSession(engine) as session, session.begin():
                await session.connection(execution_options={"schema_translate_map": {"tenant": schema}})
                await outbox.emit(session, "t", schema)

                async def work(schema: str = schema) -> tuple[int, str]:
                    return 201, schema

                await keys.run(session, scope="", key="k", fingerprint=HASH, work=work)
        async with engine.begin() as connection:
            for schema in made:
                there = text(
                    f'SELECT response_body, payload FROM "{schema}"."Keys Of", "{schema}"."Outbox Of"'
                )
                assert (await connection.execute(there)).all() == [(schema, schema)]
