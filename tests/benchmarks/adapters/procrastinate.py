"""procrastinate: a worker of concurrency 10 that deletes what it has done; a job is fetched a statement."""

from __future__ import annotations

import procrastinate
from psycopg_pool import AsyncConnectionPool

from tests.benchmarks.adapters.adapter import CALLERS, INSERT_ORDER, ORDERS, PAYLOAD, Adapter, at_once, serve

CONCURRENCY = 10


class Procrastinate(Adapter):
    async def prepare(self) -> None:
        connector = procrastinate.PsycopgConnector(
            conninfo=self.dsn, min_size=CONCURRENCY, max_size=CONCURRENCY
        )
        self.app = procrastinate.App(connector=connector)

        async def handle(order: dict[str, object]) -> None:
            self.handled += 1

        self.task = self.app.task(name="order.created")(handle)
        await self.app.open_async()
        await self.app.schema_manager.apply_schema_async()
        self.pool = AsyncConnectionPool(self.dsn, min_size=CALLERS, max_size=CALLERS, open=False)
        await self.pool.open()
        await self.execute(ORDERS)

    async def fill(self, count: int) -> None:
        await self.execute("TRUNCATE procrastinate_jobs, procrastinate_events CASCADE")
        if count:
            await self.task.batch_defer_async(*[{"order": PAYLOAD}] * count)
        await self.execute("VACUUM ANALYZE procrastinate_jobs, procrastinate_events")

    async def drain(self, count: int) -> None:
        await self.app.run_worker_async(
            concurrency=CONCURRENCY, wait=False, delete_jobs="successful", install_signal_handlers=False
        )

    async def pending(self) -> int:
        async with self.pool.connection() as connection:
            row = await (await connection.execute("SELECT count(*) FROM procrastinate_jobs")).fetchone()
            assert row is not None
            return int(row[0])

    async def emit(self, count: int) -> None:
        async def transaction() -> None:
            async with self.pool.connection() as connection:
                await connection.execute(INSERT_ORDER)
                deferrer = self.task.configure(connection=connection)
                await deferrer.defer_async(order=PAYLOAD)

        await at_once(transaction, count)

    async def execute(self, sql: str) -> None:
        async with self.pool.connection() as connection:
            await connection.set_autocommit(True)
            await connection.execute(sql)
            await connection.set_autocommit(False)


if __name__ == "__main__":
    serve(Procrastinate)
