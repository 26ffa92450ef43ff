"""Keys in the caller's own session: its objects, its transaction, its connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import MetaData, event, inspect, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, PendingRollbackError
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)
from sqlalchemy.orm import selectinload

from oncely import Event, Outbox, Outcome, Refused
from oncely.errors import NoTransaction
from tests.database import both_drivers
from tests.keys import Base, Customer, Order, Shop, sent

pytestmark = [pytest.mark.in_schema, both_drivers]

SOLD_OUT = Refused(409, "sold out")


@pytest.fixture
async def shop(engine: AsyncEngine) -> Shop:
    return await Shop.open(engine)


@pytest.fixture
async def session(shop: Shop) -> AsyncIterator[AsyncSession]:
    """With the defaults of SQLAlchemy: what is committed is expired."""
    async with shop.sessions() as session:
        yield session


async def run(shop: Shop, session: AsyncSession, work: Callable[[], Any], key: str = "order-1") -> Outcome:
    return await shop.keys.run(session, scope="Ada", key=key, fingerprint=b"", work=work)


async def ada(session: AsyncSession) -> Customer:
    """A customer with one order, both loaded."""
    session.add(Customer(name="Ada", orders=[Order(item="lamp")]))
    await session.commit()
    query = select(Customer).options(selectinload(Customer.orders)).execution_options(populate_existing=True)
    return (await session.scalars(query)).one()


# the caller's transaction


async def test_a_key_is_used_in_a_fresh_session(shop: Shop, session: AsyncSession) -> None:
    await shop.order(session)
    assert await shop.items() == []
    await session.commit()
    assert await shop.items() == ["book"]


async def test_a_key_is_used_after_a_select(shop: Shop, session: AsyncSession) -> None:
    await session.scalars(select(Order))
    await shop.order(session)
    assert await shop.items() == []
    await session.commit()
    assert await shop.items() == ["book"]


async def test_a_key_is_used_inside_begin(shop: Shop, session: AsyncSession) -> None:
    async with session.begin():
        await shop.order(session)
        assert session.in_transaction()
        assert not session.in_nested_transaction()
        assert await shop.items() == []
    assert await shop.items() == ["book"]


async def test_a_key_is_used_inside_begin_nested(shop: Shop, session: AsyncSession) -> None:
    async with session.begin():
        async with session.begin_nested() as outer:
            await shop.order(session)
            assert session.get_nested_transaction() is outer
        assert await shop.items() == []
    assert await shop.items() == ["book"]


async def test_work_may_use_savepoints(shop: Shop, session: AsyncSession) -> None:
    async def work() -> tuple[int, None]:
        async with session.begin_nested():
            session.add(Order(item="kept"))
        undone = await session.begin_nested()
        session.add(Order(item="undone"))
        await undone.rollback()
        await session.begin_nested()
        session.add(Order(item="left open"))
        return 204, None

    await run(shop, session, work)
    assert not session.in_nested_transaction()
    await session.commit()
    assert await shop.items() == ["kept", "left open"]


async def test_savepoints_that_refused_work_left_open_are_undone(shop: Shop, session: AsyncSession) -> None:
    async def work() -> tuple[int, None]:
        await session.begin_nested()
        session.add(Order(item="book"))
        await session.flush()
        raise SOLD_OUT

    assert (await run(shop, session, work)).status == 409
    assert not session.in_nested_transaction()
    await session.commit()
    assert (await shop.items(), await shop.stored()) == ([], ["order-1"])


async def test_what_the_work_adds_is_flushed_with_the_answer(shop: Shop, session: AsyncSession) -> None:
    async def work() -> tuple[int, None]:
        session.add(Order(item="book"))
        return 204, None

    await run(shop, session, work)
    assert not session.new
    await session.commit()
    assert await shop.items() == ["book"]


async def test_a_connection_is_a_caller_too(shop: Shop, engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        assert (await shop.order(connection)).replayed is False
        assert (await shop.order(connection)).replayed is True
        assert connection.in_transaction()
        assert not connection.in_nested_transaction()
        await connection.rollback()
    assert await shop.items() == []
    async with engine.begin() as connection:
        assert (await shop.order(connection, raising=SOLD_OUT)).status == 409
        with pytest.raises(ConnectionError):
            await shop.order(connection, "order-2", raising=ConnectionError())
    assert (await shop.items(), await shop.stored()) == ([], ["order-1"])


async def test_a_scoped_session_is_a_caller_too(shop: Shop) -> None:
    scoped = async_scoped_session(shop.sessions, scopefunc=asyncio.current_task)
    outcome = await shop.keys.run(
        scoped, scope="Ada", key="order-1", fingerprint=b"", work=shop.work(scoped())
    )
    await scoped.commit()
    await scoped.remove()
    assert (outcome.replayed, await shop.items()) == (False, ["book"])


async def test_a_session_on_a_connection_of_the_callers_is_a_caller_too(
    shop: Shop, engine: AsyncEngine
) -> None:
    async with engine.connect() as connection:
        transaction = await connection.begin()
        for mode in ("conditional_savepoint", "create_savepoint", "rollback_only"):
            async with AsyncSession(connection, join_transaction_mode=mode) as session:
                assert (await shop.order(session, mode)).replayed is False
                await session.commit()
        assert await shop.items() == []
        await transaction.commit()
    assert len(await shop.items()) == 3


async def test_a_session_with_engines_by_table_is_a_caller_too(
    shop: Shop, engines: Callable[..., AsyncEngine]
) -> None:
    orders, keys = engines(), engines()
    async with AsyncSession(binds={Order: orders, shop.keys.table: keys}) as session:

        async def work() -> tuple[int, None]:
            session.add(Order(item="book"))
            await session.flush()
            raise SOLD_OUT

        assert (await run(shop, session, work)).status == 409
        await session.commit()
    assert (await shop.items(), await shop.stored()) == ([], ["order-1"])


@pytest.mark.parametrize("driver", ["psycopg"], indirect=True)  # SQLAlchemy has none on asyncpg
async def test_a_two_phase_session_is_a_caller_too(shop: Shop) -> None:
    async with async_sessionmaker(shop.engine, twophase=True)() as session:
        await shop.order(session)
        await session.commit()
    assert (await shop.items(), await shop.stored()) == (["book"], ["order-1"])


@pytest.mark.parametrize("kind", ["session", "connection", "engine"])
async def test_autocommit_is_refused_before_any_sql(
    shop: Shop, engines: Callable[..., AsyncEngine], kind: str
) -> None:
    automatic = engines(isolation_level="AUTOCOMMIT")
    engine = automatic if kind == "engine" else shop.engine
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        caller = connection if kind == "connection" else AsyncSession(connection)
        with sent(engine) as statements, pytest.raises(NoTransaction, match="idempotency_keys"):
            await shop.order(caller)
        assert (statements, shop.worked) == ([], 0)
        await caller.close()


# Objects of the caller


async def test_pending_objects_are_flushed_first_so_their_errors_are_the_callers(
    shop: Shop, session: AsyncSession
) -> None:
    await ada(session)
    session.autoflush = False
    session.add(Customer(name="Ada"))
    with pytest.raises(IntegrityError):
        await shop.order(session)
    await session.rollback()
    assert (shop.worked, await shop.stored()) == (0, [])


async def test_pending_objects_survive_a_refusal(shop: Shop, session: AsyncSession) -> None:
    session.autoflush = False
    session.add(Order(item="before"))
    assert (await shop.order(session, raising=SOLD_OUT)).status == 409
    await session.commit()
    assert await shop.items() == ["before"]


@pytest.mark.parametrize("error", [SOLD_OUT, ConnectionError("away")], ids=["refused", "failed"])
async def test_objects_that_undone_work_has_changed_are_readable_and_as_before(
    shop: Shop, session: AsyncSession, error: Exception
) -> None:
    customer = await ada(session)
    lamp = customer.orders[0]
    untouched = Customer(name="Bob")
    session.add(untouched)
    await session.flush()

    async def work() -> tuple[int, None]:
        customer.name = "Eve"
        lamp.item = "candle"
        customer.orders.append(Order(item="book"))
        await session.flush()
        customer.name = "not flushed"
        raise error

    if error is SOLD_OUT:
        await run(shop, session, work)
    else:
        with pytest.raises(ConnectionError):
            await run(shop, session, work)
    assert (customer.name, lamp.item, untouched.name) == ("Ada", "lamp", "Bob")
    assert customer.orders == [lamp]
    assert lamp.customer is customer
    customer.name = "Ada Lovelace"
    await session.commit()
    assert await shop.items() == ["lamp"]


async def test_objects_that_undone_work_has_deleted_are_back(shop: Shop, session: AsyncSession) -> None:
    customer = await ada(session)
    lamp = customer.orders[0]

    async def work() -> tuple[int, None]:
        await session.delete(lamp)
        await session.flush()
        raise SOLD_OUT

    await run(shop, session, work)
    assert (lamp.item, lamp in session, customer.orders) == ("lamp", True, [lamp])
    await session.commit()
    assert await shop.items() == ["lamp"]


async def test_objects_that_undone_work_has_added_are_the_sessions_no_more(
    shop: Shop, session: AsyncSession
) -> None:
    book = Order(item="book")

    async def work() -> tuple[int, None]:
        session.add(book)
        await session.flush()
        raise SOLD_OUT

    await run(shop, session, work)
    assert (inspect(book).transient, book in session) == (True, False)
    await session.commit()
    assert await shop.items() == []


async def test_objects_that_undone_work_has_taken_out_of_the_session_stay_out(
    shop: Shop, session: AsyncSession
) -> None:
    customer = await ada(session)
    lamp = customer.orders[0]

    async def work() -> tuple[int, None]:
        session.expunge(lamp)
        customer.name = "Eve"
        await session.flush()
        raise SOLD_OUT

    assert (await run(shop, session, work)).status == 409
    assert (customer.name, lamp in session, lamp.item) == ("Ada", False, "lamp")


async def test_only_what_was_loaded_is_loaded_again(shop: Shop, session: AsyncSession) -> None:
    await ada(session)
    session.expunge_all()
    customer = (await session.scalars(select(Customer))).one()
    other = Customer(name="Bob")
    session.add(other)
    await session.commit()
    await session.refresh(customer, ["id", "name"])

    async def work() -> tuple[int, None]:
        customer.name = "Eve"
        other.name = "Rob"
        await session.flush()
        raise SOLD_OUT

    with sent(shop.engine) as statements:
        await run(shop, session, work)
    assert (customer.name, "orders" in inspect(customer).unloaded) == ("Ada", True)
    assert "name" in inspect(other).unloaded
    assert len([statement for statement in statements if "customers.name" in statement]) == 1


async def test_work_refuses_after_a_constraint_has_refused_it(shop: Shop, session: AsyncSession) -> None:
    customer = await ada(session)

    async def work() -> tuple[int, None]:
        customer.name = "Eve"
        session.add(Customer(name="Eve"))
        try:
            await session.flush()
        except IntegrityError as error:
            raise Refused(409, "name taken") from error
        return 201, None

    assert await run(shop, session, work) == Outcome(409, "name taken", replayed=False)
    assert customer.name == "Ada"
    await session.commit()
    assert (await run(shop, session, work)).replayed is True


async def test_work_that_goes_on_after_a_failed_flush_stores_nothing(
    shop: Shop, session: AsyncSession
) -> None:
    await ada(session)

    async def work() -> tuple[int, str]:
        session.add(Customer(name="Ada"))
        with pytest.raises(IntegrityError):
            await session.flush()
        return 201, "all is well"

    with pytest.raises(PendingRollbackError):
        await run(shop, session, work)
    await session.commit()
    assert await shop.stored() == []


async def test_an_error_of_the_last_flush_is_the_works_error(shop: Shop, session: AsyncSession) -> None:
    await ada(session)

    async def work() -> tuple[int, None]:
        session.add(Order(item="book"))
        session.add(Customer(name="Ada"))
        return 201, None

    with pytest.raises(IntegrityError):
        await run(shop, session, work)
    await session.commit()
    assert (await shop.stored(), await shop.items()) == ([], ["lamp"])


async def test_an_error_of_the_database_in_the_work_leaves_the_transaction_usable(
    shop: Shop, session: AsyncSession
) -> None:
    async def work() -> tuple[int, None]:
        await session.execute(text("SELECT 1 / 0"))
        return 201, None

    with pytest.raises(DBAPIError):
        await run(shop, session, work)
    assert (await shop.order(session)).replayed is False
    await session.commit()
    assert await shop.items() == ["book"]


async def test_an_object_whose_row_has_gone_meanwhile_does_not_disturb_a_refusal(
    shop: Shop, session: AsyncSession
) -> None:
    session.add(Order(item="lamp"))
    await session.commit()
    lamp = (await session.scalars(select(Order))).one()

    async def work() -> tuple[int, None]:
        savepoint = await session.begin_nested()
        lamp.item = "candle"
        await session.flush()
        await savepoint.rollback()
        async with shop.engine.begin() as other:
            await other.execute(text("DELETE FROM orders"))
        raise SOLD_OUT

    assert (await run(shop, session, work)).status == 409
    await session.commit()
    assert await shop.stored() == ["order-1"]


async def test_writes_on_a_connection_taken_before_are_undone_too(shop: Shop, session: AsyncSession) -> None:
    connection: AsyncConnection = await session.connection()
    work = shop.work(connection, raising=SOLD_OUT)
    assert (await run(shop, session, work)).status == 409
    await session.commit()
    assert await shop.items() == []


@pytest.mark.parametrize(("raising", "sent_events"), [(None, 1), (SOLD_OUT, 0), (ConnectionError("away"), 0)])
async def test_an_event_of_the_work_leaves_if_and_only_if_the_work_stands(
    shop: Shop, session: AsyncSession, raising: Exception | None, sent_events: int
) -> None:
    metadata = MetaData()
    outbox = Outbox(metadata)
    async with shop.engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    with suppress(ConnectionError):
        await shop.order(
            session, meanwhile=lambda: outbox.emit(session, "order.placed", {"item": "book"}), raising=raising
        )
    await session.commit()
    relayed: list[Event] = []

    async def publish(events: Sequence[Event]) -> None:
        relayed.extend(events)

    await outbox.relay_once(shop.sessions, publish)
    assert len(relayed) == sent_events


async def test_a_hook_of_the_session_that_fails_leaves_no_key(shop: Shop, session: AsyncSession) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no savepoints here")

    await session.execute(text("SELECT 1"))
    event.listen(session.sync_session, "after_begin", fail)
    with pytest.raises(RuntimeError, match="no savepoints here"):
        await shop.order(session)
    event.remove(session.sync_session, "after_begin", fail)
    await session.commit()
    assert (shop.worked, await shop.stored()) == (0, [])


# the engine's own serializers


def as_bytes(value: object) -> bytes:
    return json.dumps(value).encode()


def with_indent(value: object) -> str:
    return json.dumps(value, indent=2, default=str)


def upside_down(value: str | bytes) -> object:
    return {"not": "asked"}


@pytest.mark.parametrize("serializer", [as_bytes, with_indent])
async def test_serializers_of_the_engine_change_nothing(
    shop: Shop, engines: Callable[..., AsyncEngine], serializer: Callable[[object], object]
) -> None:
    refusal = Refused(409, '{"a": 1}', [("Link", "a"), ("Link", "b")])
    await shop.request("plain", raising=refusal)
    engine = engines(json_serializer=serializer, json_deserializer=upside_down)
    other = Shop(engine)
    await other.request("serialized", raising=refusal)
    table = Base.metadata.tables["idempotency_keys"]
    columns = [table.c.request_hash, table.c.response_code, table.c.response_body]
    query = select(*columns, text("response_headers::text"))
    async with shop.engine.connect() as connection:
        one, two = (await connection.execute(query)).all()
    assert one == two
    replays = [await other.request("plain"), await shop.request("serialized")]
    assert replays == [Outcome(409, '{"a": 1}', True, refusal.headers)] * 2
