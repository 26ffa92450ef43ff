"""POST /orders: an order is placed once, however often its request arrives.

The key of a request, the order, the taken seat, the event and the answer are written in one
transaction. A request that comes again gets the answer of the first, also when that was a refusal.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, Response
from pydantic import BaseModel
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from examples.shop.models import Order, Seat, keys, outbox
from examples.shop.places import make_engine
from oncely import KeyInFlight, KeyReused, Refused, fingerprint, is_valid_key

__all__ = ["create_app"]

router = APIRouter()


class NewOrder(BaseModel):
    """What a customer sends."""

    seat: str


async def require_key(idempotency_key: Annotated[str, Header()]) -> str:
    """The request's Idempotency-Key."""
    if not is_valid_key(idempotency_key):
        raise HTTPException(400, "Idempotency-Key: 8 to 255 printable ASCII characters without spaces")
    return idempotency_key


def sessions_of(request: Request) -> async_sessionmaker[AsyncSession]:
    sessions: async_sessionmaker[AsyncSession] = request.app.state.sessions
    return sessions


Key = Annotated[str, Depends(require_key)]
Customer = Annotated[str, Header(alias="X-Customer")]  # in your shop: who is logged in
Sessions = Annotated[async_sessionmaker[AsyncSession], Depends(sessions_of)]


@router.post("/orders", status_code=201)
async def create_order(order: NewOrder, key: Key, customer: Customer, sessions: Sessions) -> Response:
    """Places an order, or gives the answer that this key has had before."""
    try:
        async with sessions.begin() as session:
            outcome = await keys.run(
                session,
                scope=customer,
                key=key,
                fingerprint=fingerprint("POST /orders", order.model_dump_json()),
                work=lambda: place_order(session, customer, order.seat),
                wait=timedelta(seconds=5),
            )
    except KeyReused as error:
        raise HTTPException(422, "this Idempotency-Key was used for another request") from error
    except KeyInFlight as error:
        seconds = str(error.retry_after.total_seconds())
        raise HTTPException(409, "the first request is not answered yet", {"Retry-After": seconds}) from error
    replayed = {"Idempotency-Replayed": "true"} if outcome.replayed else None
    return Response(outcome.body, outcome.status, replayed, "application/json")


async def place_order(session: AsyncSession, customer: str, seat: str) -> tuple[int, str]:
    """The work that a key stands for. A refusal undoes what was written here, and is an answer too."""
    take = update(Seat).where(Seat.name == seat, Seat.taken_by.is_(None)).values(taken_by=customer)
    if await session.scalar(take.returning(Seat.name)) is None:
        raise Refused(409, json.dumps({"error": f"seat {seat} is taken"}))
    order = Order(customer=customer, seat=seat)
    session.add(order)
    await session.flush()
    await outbox.emit(session, "order.placed", {"order": order.id, "seat": seat}, key=customer)
    return 201, json.dumps({"order": str(order.id), "seat": seat})


def create_app() -> FastAPI:
    """The application, for `uvicorn --factory`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine = make_engine()
        app.state.sessions = async_sessionmaker(engine)
        yield
        await engine.dispose()

    app = FastAPI(title="Seats", lifespan=lifespan)
    app.include_router(router)
    return app
