"""event-forge: its polling path, a batch after the other, with as many connections as it publishes at once.

It has no public way to run one poll, and its loop sleeps before each: the poll is called without the sleep.
Its repository for SQLAlchemy lacks a method that its own interface asks for, and which polling does not call.
"""

from __future__ import annotations

from event_forge import CreateOutboxMessageDto, OutboxConfig, OutboxService
from event_forge.repositories.sqlalchemy import Base, SQLAlchemyOutboxRepository
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from tests.benchmarks.adapters.adapter import CALLERS, INSERT_ORDER, ORDERS, PAYLOAD, Adapter, at_once, serve

BATCH = 100


class Nowhere:
    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    async def publish(self, message: object) -> bool:
        self.adapter.handled += 1
        return True


class Repository(SQLAlchemyOutboxRepository):  # type: ignore[misc] # untyped from here
    async def find_and_lock_by_id(self, message_id: str, locker_id: str) -> None:
        raise NotImplementedError


class EventForge(Adapter):
    async def prepare(self) -> None:
        url = self.dsn.replace("postgresql://", "postgresql+asyncpg://")
        self.engine = create_async_engine(url, pool_size=CALLERS, max_overflow=0)
        self.sessions = async_sessionmaker(self.engine, expire_on_commit=False)
        async with self.engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
            await connection.exec_driver_sql(ORDERS)
        self.table = next(name for name in Base.metadata.tables if "outbox" in name)
        self.service = OutboxService(
            repository=Repository(self.sessions),
            publisher=Nowhere(self),
            config=OutboxConfig(batch_size=BATCH, immediate_processing=False),
        )

    async def fill(self, count: int) -> None:
        async with self.sessions.begin() as session:
            await session.execute(text(f"TRUNCATE {self.table}"))
            for _ in range(count):
                await self.emit_into(session)
        async with self.engine.connect() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            await driver.execute(f"VACUUM ANALYZE {self.table}")

    async def emit_into(self, session: object) -> None:
        message = CreateOutboxMessageDto(
            aggregate_type="order", aggregate_id="4711", event_type="order.created", payload=PAYLOAD
        )
        await self.service.create_message(message, session)

    async def drain(self, count: int) -> None:
        handled = -1
        while self.handled > handled:
            handled = self.handled
            await self.service._poll_and_process()

    async def pending(self) -> int:
        async with self.engine.connect() as connection:
            return int(
                await connection.scalar(
                    text(f"SELECT count(*) FROM {self.table} WHERE status <> 'published'")
                )
                or 0
            )

    async def emit(self, count: int) -> None:
        async def transaction() -> None:
            async with self.sessions.begin() as session:
                await session.execute(text(INSERT_ORDER))
                await self.emit_into(session)

        await at_once(transaction, count)


if __name__ == "__main__":
    serve(EventForge)
