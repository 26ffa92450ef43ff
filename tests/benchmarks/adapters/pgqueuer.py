"""pgqueuer: its drain mode on a connection of its own, uvloop, and the autovacuum settings that it advises.

Durability stays at its default: the faster levels give up jobs or logs in a crash.
"""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.domain.types import QueueExecutionMode
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from tests.benchmarks.adapters.adapter import CALLERS, INSERT_ORDER, ORDERS, PAYLOAD, Adapter, at_once, serve

BATCH = 1_000


class Pgqueuer(Adapter):
    async def prepare(self) -> None:
        self.connection = await asyncpg.connect(self.dsn)
        self.queries = Queries(AsyncpgDriver(self.connection))
        await self.queries.install()
        await self.queries.optimize_autovacuum()
        await self.connection.execute(ORDERS)
        self.producers = await asyncpg.create_pool(self.dsn, min_size=CALLERS, max_size=CALLERS)

    async def handle(self, job: Job) -> None:
        json.loads(job.payload or b"")
        self.handled += 1

    async def fill(self, count: int) -> None:
        await self.connection.execute("TRUNCATE pgqueuer, pgqueuer_log")
        if count:
            names, payloads = ["order.created"] * count, [json.dumps(PAYLOAD).encode()] * count
            await self.queries.enqueue(names, payloads, [0] * count)
        await self.connection.execute("VACUUM ANALYZE pgqueuer, pgqueuer_log")
        # A manager runs once; it takes its connection along.
        self.worker = PgQueuer(AsyncpgDriver(await asyncpg.connect(self.dsn)))
        self.worker.entrypoint("order.created")(self.handle)

    async def drain(self, count: int) -> None:
        await self.worker.run(batch_size=BATCH, mode=QueueExecutionMode.drain)

    async def pending(self) -> int:
        return int(await self.connection.fetchval("SELECT count(*) FROM pgqueuer"))

    async def emit(self, count: int) -> None:
        async def transaction() -> None:
            async with self.producers.acquire() as connection, connection.transaction():
                await connection.execute(INSERT_ORDER)
                driver: Any = AsyncpgDriver(connection)
                await Queries(driver).enqueue("order.created", json.dumps(PAYLOAD).encode())

        await at_once(transaction, count)


if __name__ == "__main__":
    serve(Pgqueuer, uvloop.run)
