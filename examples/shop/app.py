"""POST /orders: an order is placed once, however often its request arrives.

The key of a request, the order, the taken seat, the event and the answer are written in one
transaction. A request that comes again gets the answer of the first, also when that was a refusal.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, FastAPI, Header, HTTPException, Request
from pydantic import BaseModel
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from examples.shop.models import Order, Seat, keys, outbox
from examples.shop.places import make_engine
from oncely.fastapi import IdempotentSession, idempotent_route

__all__ = ["create_app"]

sessions: async_sessionmaker[AsyncSession] = async_sessionmaker()


def customer_of(request: Request) -> str:
    """Whose key it is: in your shop, who is logged in."""
    return request.headers["X-Customer"]


once = idempotent_route(keys, sessions, scope=customer_of, wait=timedelta(seconds=5), refusals=[409])
router = APIRouter(route_class=once)


class NewOrder(BaseModel):
    """What a customer sends."""

    seat: str


class Placed(BaseModel):
    """What a customer is told."""

    order: str
    seat: str


@router.post("/orders", status_code=201)
async def create_order(
    new: NewOrder, customer: Annotated[str, Header(alias="X-Customer")], session: IdempotentSession
) -> Placed:
    """Takes the seat and places the order. A refusal undoes what was written here, and is an answer too."""
    take = update(Seat).where(Seat.name == new.seat, Seat.taken_by.is_(None)).values(taken_by=customer)
    if await session.scalar(take.returning(Seat.name)) is None:
        raise HTTPException(409, f"seat {new.seat} is taken")
    order = Order(customer=customer, seat=new.seat)
    session.add(order)
    await session.flush()
    await outbox.emit(session, "order.placed", {"order": order.id, "seat": new.seat}, key=customer)
    return Placed(order=str(order.id), seat=new.seat)


def create_app() -> FastAPI:
    """The application, for `uvicorn --factory`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine = make_engine()
        sessions.configure(bind=engine)
        yield
        await engine.dispose()

    app = FastAPI(title="Seats", lifespan=lifespan)
    app.include_router(router)
    return app
