"""What a guarded route costs: the same POST with and without the route class, ten callers at once.

In process, so that the route is measured and not a socket. The endpoint adds one order and flushes to
get its id; without the route class a dependency opens the session, and the endpoint commits it.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI
from httpx import ASGITransport, AsyncClient
from pydantic import BaseModel
from sqlalchemy import BigInteger, Identity, MetaData
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from oncely.fastapi import IdempotentSession, idempotent_route
from oncely.idempotency import IdempotencyKeys
from tests.benchmarks.ratio import Ratio, Servers, at_once, compare

CALLERS = 10
REQUESTS = 30
ROUNDS = 15


class Base(DeclarativeBase):
    metadata = MetaData()


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    customer: Mapped[str]
    amount: Mapped[int]


class NewOrder(BaseModel):
    customer: str
    amount: int


class Placed(BaseModel):
    id: int


KEYS = IdempotencyKeys(Base.metadata)


async def measure(servers: Servers) -> list[Ratio]:
    engine = create_async_engine(servers.postgres.url("asyncpg"), pool_size=CALLERS)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    numbers = itertools.count()
    transport = ASGITransport(app=application(async_sessionmaker(engine)))
    async with AsyncClient(transport=transport, base_url="http://shop") as client:

        async def post(path: str, key: str) -> None:
            body = {"customer": "Ada", "amount": 12}
            response = await client.post(path, json=body, headers={"Idempotency-Key": key})
            assert response.status_code == 201, response.text

        async def without() -> None:
            await post("/plain", f"order-no-{next(numbers)}")

        async def first() -> None:
            await post("/guarded", f"order-no-{next(numbers)}")

        async def replay() -> None:
            await post("/guarded", "order-no-again")

        await replay()
        try:
            return [
                await compare(
                    "FastAPI: first request / plain route",
                    ours=lambda: at_once(first, CALLERS, REQUESTS),
                    bare=lambda: at_once(without, CALLERS, REQUESTS),
                    limit=0.40,
                    rounds=ROUNDS,
                ),
                await compare(
                    "FastAPI: replay / plain route",
                    ours=lambda: at_once(replay, CALLERS, REQUESTS),
                    bare=lambda: at_once(without, CALLERS, REQUESTS),
                    limit=0.90,
                    rounds=ROUNDS,
                ),
            ]
        finally:
            async with engine.begin() as connection:
                await connection.run_sync(Base.metadata.drop_all)
            await engine.dispose()


def application(sessions: async_sessionmaker[AsyncSession]) -> FastAPI:
    """POST /plain and POST /guarded do the same work."""

    async def open_session() -> AsyncIterator[AsyncSession]:
        async with sessions() as session:
            yield session

    def by_customer(_request: object) -> str:
        return "customer 7"

    app = FastAPI()
    guarded = APIRouter(route_class=idempotent_route(KEYS, sessions, scope=by_customer))

    async def plain(order: NewOrder, session: AsyncSession) -> Placed:
        placed = await _place(order, session)
        await session.commit()
        return placed

    plain.__annotations__["session"] = Annotated[AsyncSession, Depends(open_session)]
    app.post("/plain", status_code=201, response_model=Placed)(plain)

    @guarded.post("/guarded", status_code=201)
    async def create_order(order: NewOrder, session: IdempotentSession) -> Placed:
        return await _place(order, session)

    app.include_router(guarded)
    return app


async def _place(order: NewOrder, session: AsyncSession) -> Placed:
    placed = Order(customer=order.customer, amount=order.amount)
    session.add(placed)
    await session.flush()
    return Placed(id=placed.id)
