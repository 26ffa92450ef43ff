"""oncely: `Relay.run_once` until nothing is left, on an engine of its own with a small pool."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from oncely import Event, NewEvent, Outbox, Relay
from tests.benchmarks.adapters.adapter import CALLERS, INSERT_ORDER, ORDERS, PAYLOAD, Adapter, at_once, serve

BATCH = 2_000


class Oncely(Adapter):
    async def prepare(self) -> None:
        url = self.dsn.replace("postgresql://", "postgresql+asyncpg://")
        self.application = create_async_engine(url, pool_size=CALLERS)
        self.relaying = create_async_engine(url, pool_size=1)
        self.outbox = Outbox(MetaData())
        async with self.application.begin() as connection:
            await connection.run_sync(self.outbox.table.metadata.create_all)
            await connection.exec_driver_sql(ORDERS)
        self.relay = Relay(self.outbox, async_sessionmaker(self.relaying), self.publish, batch=BATCH)

    async def publish(self, events: Sequence[Event]) -> None:
        self.handled += len(events)

    async def fill(self, count: int) -> None:
        async with self.application.begin() as connection:
            await connection.exec_driver_sql("TRUNCATE outbox, outbox_claims")
            await self.outbox.emit_many(
                connection, [NewEvent("order.created", PAYLOAD) for _ in range(count)]
            )
        async with self.application.connect() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            await driver.execute("VACUUM ANALYZE outbox, outbox_claims")

    async def drain(self, count: int) -> None:
        while (await self.relay.run_once()).published:
            pass

    async def pending(self) -> int:
        async with self.application.connect() as connection:
            count = await connection.scalar(text("SELECT count(*) FROM outbox WHERE published_at IS NULL"))
            assert count is not None
            return int(count)

    async def emit(self, count: int) -> None:
        sessions = async_sessionmaker(self.application)

        async def transaction() -> None:
            async with sessions.begin() as session:
                await session.execute(text(INSERT_ORDER))
                await self.outbox.emit(session, "order.created", PAYLOAD)

        await at_once(transaction, count)


if __name__ == "__main__":
    serve(Oncely)
