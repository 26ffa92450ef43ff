"""The demo counts what is in the database, and what it counts proves its customers right or wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import delete, func, insert, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.sql.dml import UpdateBase

from examples.shop.client import Answer, Client, Customer
from examples.shop.models import Base, Order, Seat, inbox, keys, outbox
from examples.shop.tally import count
from oncely.event import Event, uuid7

Sessions = async_sessionmaker[AsyncSession]


@pytest.fixture
async def customers(engine: AsyncEngine, sessions: Sessions) -> list[Customer]:
    """Two customers who want one seat, and a database in which all went well."""
    alice, bob = (Customer(name, "seat 1", copies=1) for name in ("alice", "bob"))
    order = Order(id=uuid4(), customer="alice", seat="seat 1", tickets=1, deliveries=3, failures=2)
    alice.answers.append(Answer(201, f'{{"order": "{order.id}"}}', replayed=False))
    bob.answers.append(Answer(409, "{}", replayed=True))
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)

    async def nothing() -> None: ...

    async with sessions.begin() as session:
        session.add_all([Seat(name="seat 1", taken_by="alice"), order])
        for customer in (alice, bob):
            row = {"scope": customer.name, "key": customer.key, "request_hash": b"", "response_code": 1}
            await session.execute(insert(keys.table).values(row))
        await outbox.emit(session, "order.placed", {})
        await session.execute(update(outbox.table).values(published_at=func.now()))
        await inbox.run(session, Event(uuid7(), "order.placed", {}), nothing, consumer="tickets")
    return [alice, bob]


def client() -> Client:
    """One that sent three requests and lost one connection."""
    client = Client(Path("nowhere"))
    client.requests, client.cut = 3, 1
    return client


async def test_what_went_well_has_no_mistakes(sessions: Sessions, customers: list[Customer]) -> None:
    async with sessions() as session:
        tally = await count(session, client(), customers)
    assert tally.mistakes() == []
    assert (tally.replayed, tally.failures, tally.duplicates) == (1, 2, 2)


def second_order() -> UpdateBase:
    return insert(Order).values(customer="alice", seat="seat 1", tickets=1)


def uninvited_order() -> UpdateBase:
    return update(Order).values(customer="bob")


TAMPERINGS: dict[str, tuple[Callable[[], UpdateBase], list[str]]] = {
    "a second order": (
        second_order,
        ["orders: 2, not 1", "customers without the orders that they were told of: 1, not 0"],
    ),
    "an order of the other": (
        uninvited_order,
        ["customers without the orders that they were told of: 2, not 0"],
    ),
    "no order": (
        lambda: delete(Order),
        ["orders: 0, not 1", "customers without the orders that they were told of: 1, not 0"],
    ),
    "a second ticket": (
        lambda: update(Order).values(tickets=2),
        ["orders without exactly one ticket: 1, not 0"],
    ),
    "a lost event": (
        lambda: delete(outbox.table),
        ["events: 0, not 1", "events published: 0, not 1"],
    ),
    "an event that stayed": (
        lambda: update(outbox.table).values(published_at=None),
        ["events published: 0, not 1"],
    ),
    "a message that was not handled": (lambda: delete(inbox.table), ["messages handled: 0, not 1"]),
    "a key too few": (lambda: delete(keys.table).where(keys.table.c.scope == "bob"), ["keys: 1, not 2"]),
}


@pytest.mark.parametrize(("tamper", "mistakes"), TAMPERINGS.values(), ids=TAMPERINGS)
async def test_tampering_is_found(
    tamper: Callable[[], UpdateBase], mistakes: list[str], sessions: Sessions, customers: list[Customer]
) -> None:
    async with sessions.begin() as session:
        await session.execute(tamper())
    async with sessions() as session:
        tally = await count(session, client(), customers)
    assert tally.mistakes() == mistakes
