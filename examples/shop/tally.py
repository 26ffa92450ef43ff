"""What there is in the end, and what there has to be."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, FromClause, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from examples.shop.client import Client, Customer
from examples.shop.models import Base, Order, Seat, inbox, keys, outbox

__all__ = ["Tally", "count"]


@dataclass(frozen=True, kw_only=True)
class Tally:
    """The numbers of a run. What they have to be follows from `customers` and `seats`."""

    customers: int
    seats: int

    # What the customers did and were told.
    requests: int
    cut: int
    put_off: int
    answers: int
    replayed: int
    accepted: int
    refused: int
    contradicted: int
    """Customers who were told two different things, or twice that theirs was the first request."""

    # What the database has.
    keys: int
    orders: int
    astray: int
    """Customers who do not have exactly the orders that they were told of."""

    # What became of the orders.
    events: int
    published: int
    handled: int
    failures: int
    duplicates: int
    misprinted: int
    """Orders that have no ticket, or more than one."""

    def mistakes(self) -> list[str]:
        """Each number that is not what it has to be, in words."""
        sold = min(self.seats, self.customers)
        facts = (
            (
                "requests that were cut, put off or answered",
                self.cut + self.put_off + self.answers,
                self.requests,
            ),
            ("customers who were told that they have an order", self.accepted, sold),
            ("customers who were refused", self.refused, self.customers - sold),
            ("customers who were told two different things", self.contradicted, 0),
            ("keys", self.keys, self.customers),
            ("orders", self.orders, sold),
            ("customers without the orders that they were told of", self.astray, 0),
            ("events", self.events, sold),
            ("events published", self.published, sold),
            ("messages handled", self.handled, sold),
            ("orders without exactly one ticket", self.misprinted, 0),
        )
        return [f"{what}: {found}, not {right}" for what, found, right in facts if found != right]


async def count(session: AsyncSession, client: Client, customers: Sequence[Customer]) -> Tally:
    """What the customers were told, and what the database has."""
    orders = (await session.scalars(select(Order))).all()
    orders_of: defaultdict[str, set[str]] = defaultdict(set)
    for order in orders:
        orders_of[order.customer].add(str(order.id))
    answers = [answer for customer in customers for answer in customer.answers]
    accepted = [customer for customer in customers if told_of_orders(customer)]
    refused = [customer for customer in customers if {answer.status for answer in customer.answers} == {409}]
    handled = await rows_in(session, inbox.table)
    return Tally(
        customers=len(customers),
        seats=await rows_in(session, Seat),
        requests=client.requests,
        cut=client.cut,
        put_off=client.put_off,
        answers=len(answers),
        replayed=sum(answer.replayed for answer in answers),
        accepted=len(accepted),
        refused=len(refused),
        contradicted=sum(is_contradicted(customer) for customer in customers),
        keys=await rows_in(session, keys.table),
        orders=len(orders),
        astray=sum(told_of_orders(customer) != orders_of[customer.name] for customer in customers),
        events=await rows_in(session, outbox.table),
        published=await rows_in(session, outbox.table, outbox.table.c.published_at.is_not(None)),
        handled=handled,
        failures=sum(order.failures for order in orders),
        duplicates=sum(order.deliveries for order in orders) - handled,
        misprinted=sum(order.tickets != 1 for order in orders),
    )


def told_of_orders(customer: Customer) -> set[str]:
    """The ids of the orders that the customer was told of."""
    return {json.loads(answer.body)["order"] for answer in customer.answers if answer.status == 201}


def is_contradicted(customer: Customer) -> bool:
    """Whether the answers differ, or more than one says that it is the first."""
    different = {(answer.status, answer.body) for answer in customer.answers}
    return len(different) != 1 or sum(not answer.replayed for answer in customer.answers) > 1


async def rows_in(session: AsyncSession, table: FromClause | type[Base], *where: ColumnElement[bool]) -> int:
    return (await session.scalars(select(func.count()).select_from(table).where(*where))).one()
