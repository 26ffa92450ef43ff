"""A shop on the web: a table of orders, applications whose routes are guarded, clients in process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from fastapi import APIRouter, FastAPI, Request
from httpx import ASGITransport, AsyncClient, Response
from sqlalchemy import BigInteger, Identity, UniqueConstraint, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from oncely import IdempotencyKeys
from oncely.fastapi import idempotent_route

__all__ = ["KEY", "KEYS", "Order", "Web", "client_of", "customer", "message"]

KEY = "key-0001"

Application: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""


class Base(DeclarativeBase):
    pass


class Order(Base):
    """`name` is checked when the transaction commits."""

    __tablename__ = "orders"
    __table_args__ = (UniqueConstraint("name", deferrable=True, initially="DEFERRED", name="one_of_a_name"),)
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    item: Mapped[str]
    name: Mapped[str | None]


KEYS = IdempotencyKeys(Base.metadata)


def customer(request: Request) -> str:
    """Who asks: in a test, whoever they say they are."""
    return request.headers.get("x-customer", "Ada")


def message(response: Response) -> tuple[int, bytes, dict[str, str]]:
    """What a client sees of a response, without the mark of a replay."""
    headers = {name: value for name, value in response.headers.items() if name != "idempotency-replayed"}
    return response.status_code, response.content, headers


class Web:
    """The shop's database, and what is made on it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.sessions: async_sessionmaker[AsyncSession] = async_sessionmaker(engine)

    @classmethod
    async def open(cls, engine: AsyncEngine) -> Web:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        return cls(engine)

    def router(self, scope: Callable[[Request], Any] = customer, **options: Any) -> APIRouter:
        """A router of guarded routes; options are those of `idempotent_route`."""
        return APIRouter(route_class=idempotent_route(KEYS, self.sessions, scope=scope, **options))

    async def items(self) -> list[str]:
        """What was ordered and committed."""
        async with self.sessions() as session:
            return list(await session.scalars(select(Order.item).order_by(Order.id)))

    async def stored(self) -> list[tuple[str, int | None]]:
        """The keys that are committed, with the status of their answers."""
        table = KEYS.table
        async with self.sessions() as session:
            rows = await session.execute(select(table.c.key, table.c.response_code).order_by(table.c.key))
            return [(key, status) for key, status in rows]

    async def idle_in_transaction(self) -> int:
        """How many connections have a transaction that they do not end."""
        busy = text("SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'")
        async with self.engine.connect() as connection:
            return int(await connection.scalar(busy) or 0)


@asynccontextmanager
async def client_of(app: Application | APIRouter, *, key: str | None = KEY) -> AsyncIterator[AsyncClient]:
    """A client in the process of its application, that sends a key; errors are its 500s."""
    if isinstance(app, APIRouter):
        application = FastAPI()
        application.include_router(app)
        app = application
    transport = ASGITransport(app=app, raise_app_exceptions=False)
    headers = {} if key is None else {"Idempotency-Key": key}
    async with AsyncClient(transport=transport, base_url="http://shop", headers=headers) as client:
        yield client
