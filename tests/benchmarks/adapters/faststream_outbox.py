"""faststream-outbox: one worker that deletes in batches, which its page on performance finds the fastest,
with large fetches and the autovacuum settings that it advises.
"""

from __future__ import annotations

import asyncio

from faststream_outbox import OutboxBroker, make_outbox_table, outbox_autovacuum_ddl
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from tests.benchmarks.adapters.adapter import CALLERS, INSERT_ORDER, ORDERS, PAYLOAD, Adapter, at_once, serve

BATCH = 1_000
QUEUE = "orders"


class FastStreamOutbox(Adapter):
    async def prepare(self) -> None:
        url = self.dsn.replace("postgresql://", "postgresql+asyncpg://")
        self.engine = create_async_engine(url, pool_size=CALLERS, max_overflow=10)
        self.metadata = MetaData()
        self.table = make_outbox_table(self.metadata)
        async with self.engine.begin() as connection:
            await connection.run_sync(self.metadata.create_all)
            await connection.exec_driver_sql(outbox_autovacuum_ddl("outbox"))
            await connection.exec_driver_sql(ORDERS)
        self.broker = self.new_broker()

    def new_broker(self) -> OutboxBroker:
        broker = OutboxBroker(self.engine, outbox_table=self.table, logger=None)

        async def handle(body: dict[str, object]) -> None:
            self.handled += 1

        broker.subscriber(
            QUEUE,
            fetch_batch_size=BATCH,
            terminal_flush_batch_size=BATCH,
            min_fetch_interval=0.01,
            max_fetch_interval=1.0,
        )(handle)
        return broker

    async def fill(self, count: int) -> None:
        async with self.engine.begin() as connection:
            await connection.exec_driver_sql("TRUNCATE outbox")
            await self.broker.publish_batch(*[PAYLOAD] * count, queue=QUEUE, session=connection)
        async with self.engine.connect() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            await driver.execute("VACUUM ANALYZE outbox")

    async def drain(self, count: int) -> None:
        await self.broker.start()
        await self.until_settled(count)

    async def rest(self) -> None:
        await self.broker.stop()
        self.broker = self.new_broker()
        await asyncio.sleep(0)

    async def pending(self) -> int:
        async with self.engine.connect() as connection:
            return int(await connection.scalar(text("SELECT count(*) FROM outbox")) or 0)

    async def emit(self, count: int) -> None:
        sessions = async_sessionmaker(self.engine, expire_on_commit=False)

        async def transaction() -> None:
            async with sessions.begin() as session:
                await session.execute(text(INSERT_ORDER))
                await self.broker.publish(PAYLOAD, queue=QUEUE, session=session)

        await at_once(transaction, count)


if __name__ == "__main__":
    serve(FastStreamOutbox)
