"""A small shop whose orders are guarded by idempotency keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from sqlalchemy import BigInteger, Connection, ForeignKey, Identity, event, func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from oncely.answer import Answer, Body
from oncely.errors import Refused
from oncely.idempotency import IdempotencyKeys, Outcome
from oncely.transaction import Caller

__all__ = ["Customer", "Order", "Shop", "sent"]


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customers"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    orders: Mapped[list[Order]] = relationship(back_populates="customer", order_by="Order.id")


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    item: Mapped[str]
    customer_id: Mapped[int | None] = mapped_column(ForeignKey("customers.id"))
    customer: Mapped[Customer | None] = relationship(back_populates="orders")


KEYS = IdempotencyKeys(Base.metadata)


@dataclass
class Shop:
    """`worked` counts how often the work of a key was started."""

    engine: AsyncEngine
    keys: IdempotencyKeys = KEYS
    worked: int = 0
    sessions: async_sessionmaker[AsyncSession] = field(init=False)

    def __post_init__(self) -> None:
        self.sessions = async_sessionmaker(self.engine)

    @classmethod
    async def open(cls, engine: AsyncEngine) -> Shop:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all, checkfirst=False)
        return cls(engine)

    def work(
        self,
        session: AsyncSession | AsyncConnection,
        answer: Answer | tuple[int, Body] = (201, "made"),
        *,
        item: str = "book",
        meanwhile: Callable[[], Awaitable[object]] | None = None,
        raising: BaseException | None = None,
    ) -> Callable[[], Awaitable[Answer | tuple[int, Body]]]:
        """Work that orders an item, awaits what goes on meanwhile, and raises or answers."""

        async def work() -> Answer | tuple[int, Body]:
            self.worked += 1
            await session.execute(text("INSERT INTO orders (item) VALUES (:item)"), {"item": item})
            if meanwhile is not None:
                await meanwhile()
            if raising is not None:
                raise raising
            return answer

        return work

    async def order(
        self,
        session: AsyncSession | AsyncConnection,
        key: str = "order-1",
        answer: Answer | tuple[int, Body] = (201, "made"),
        *,
        scope: str = "Ada",
        fingerprint: bytes = b"one book",
        wait: timedelta | None = None,
        ttl: timedelta | None = None,
        item: str = "book",
        meanwhile: Callable[[], Awaitable[object]] | None = None,
        raising: BaseException | None = None,
    ) -> Outcome:
        """An order under a key, in the caller's transaction."""
        work = self.work(session, answer, item=item, meanwhile=meanwhile, raising=raising)
        return await self.keys.run(
            session, scope=scope, key=key, fingerprint=fingerprint, work=work, wait=wait, ttl=ttl
        )

    async def request(
        self,
        key: str = "order-1",
        answer: Answer | tuple[int, Body] = (201, "made"),
        *,
        scope: str = "Ada",
        fingerprint: bytes = b"one book",
        wait: timedelta | None = None,
        ttl: timedelta | None = None,
        meanwhile: Callable[[], Awaitable[object]] | None = None,
        raising: BaseException | None = None,
    ) -> Outcome:
        """The same in a session of its own, which commits."""
        async with self.sessions() as session, session.begin():
            return await self.order(
                session,
                key,
                answer,
                scope=scope,
                fingerprint=fingerprint,
                wait=wait,
                ttl=ttl,
                meanwhile=meanwhile,
                raising=raising,
            )

    async def claim(self, session: Caller, key: str = "order-1") -> object:
        return await self.keys.claim(session, scope="Ada", key=key, fingerprint=b"one book")

    async def items(self) -> list[str]:
        """What was ordered and committed."""
        async with self.sessions() as session:
            return list(await session.scalars(select(Order.item).order_by(Order.id)))

    async def stored(self) -> list[str]:
        """The keys that are committed."""
        key = self.keys.table.c.key
        async with self.sessions() as session:
            return list(await session.scalars(select(key).order_by(key)))

    async def expire(self, key: str = "order-1") -> None:
        table = self.keys.table
        async with self.engine.begin() as connection:
            past = func.now() - timedelta(seconds=1)
            await connection.execute(table.update().where(table.c.key == key).values(expires_at=past))


REFUSAL = Refused(409, "sold out")


@contextmanager
def sent(engine: AsyncEngine) -> Iterator[list[str]]:
    """The statements that the engine's connections send in this block, BEGIN and COMMIT apart."""
    statements: list[str] = []

    def note(
        connection: Connection,
        cursor: object,
        statement: str,
        parameters: object,
        context: object,
        many: bool,
    ) -> None:
        statements.append(statement.strip())

    event.listen(engine.sync_engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(engine.sync_engine, "before_cursor_execute", note)
