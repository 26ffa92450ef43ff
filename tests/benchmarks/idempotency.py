"""What a key costs a request: the same transaction with and without it, ten callers at once.

The transaction is what a small route does: open an AsyncSession, add one order, flush to get its id, commit.
"""

from __future__ import annotations

import itertools

from sqlalchemy import BigInteger, Identity, MetaData
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from oncely.idempotency import IdempotencyKeys, fingerprint
from tests.benchmarks.ratio import Ratio, Servers, at_once, compare

CALLERS = 10
REQUESTS = 40
ROUNDS = 15  # short ones, so that what else the machine does meets both alike


class Base(DeclarativeBase):
    metadata = MetaData()


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    customer: Mapped[str]
    amount: Mapped[int]


KEYS = IdempotencyKeys(Base.metadata)


async def measure(servers: Servers) -> list[Ratio]:
    engine = create_async_engine(servers.postgres.url("asyncpg"), pool_size=CALLERS)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    sessions = async_sessionmaker(engine)
    numbers = itertools.count()

    async def order(session: AsyncSession) -> str:
        placed = Order(customer="Ada", amount=12)
        session.add(placed)
        await session.flush()
        return f'{{"id": {placed.id}, "customer": "Ada", "amount": 12}}'

    async def without() -> None:
        async with sessions() as session:
            await order(session)
            await session.commit()

    async def with_key(key: str) -> None:
        async with sessions() as session:

            async def work() -> tuple[int, str]:
                return 201, await order(session)

            await KEYS.run(
                session, scope="customer 7", key=key, fingerprint=fingerprint("POST", "/orders"), work=work
            )
            await session.commit()

    async def first() -> None:
        await with_key(f"order {next(numbers)}")

    async def replay() -> None:
        await with_key("order 0")

    try:
        return [
            await compare(
                "idempotency key: first request / no key",
                ours=lambda: at_once(first, CALLERS, REQUESTS),
                bare=lambda: at_once(without, CALLERS, REQUESTS),
                limit=0.40,
                rounds=ROUNDS,
            ),
            await compare(
                "idempotency key: replay / no key",
                ours=lambda: at_once(replay, CALLERS, REQUESTS),
                bare=lambda: at_once(without, CALLERS, REQUESTS),
                limit=1.0,
                rounds=ROUNDS,
            ),
        ]
    finally:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.drop_all)
        await engine.dispose()
