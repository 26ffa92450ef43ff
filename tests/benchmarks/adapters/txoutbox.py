"""txoutbox: without `strict_ordering`, as its README says for events without keys, and deleting what is done.

The batch is the largest whose worst round stays inside the lease with the publish timeout that it advises.
"""

from __future__ import annotations

import json

import asyncpg
from txoutbox import OutboxMessage, Relay, RelayConfig
from txoutbox.adapters.postgres import PostgresStorage

from tests.benchmarks.adapters.adapter import CALLERS, INSERT_ORDER, ORDERS, PAYLOAD, Adapter, at_once, serve


class TxOutbox(Adapter):
    async def prepare(self) -> None:
        self.pool = await asyncpg.create_pool(self.dsn, min_size=CALLERS, max_size=CALLERS)
        self.storage = PostgresStorage(self.pool, strict_ordering=False, delete_on_ack=True)
        await self.storage.create_schema()
        await self.pool.execute(ORDERS)
        self.relay = Relay(self.storage, self.publish, config=RelayConfig(batch_size=1_000, concurrency=100))

    async def publish(self, message: OutboxMessage) -> None:
        message.json()
        self.handled += 1

    async def fill(self, count: int) -> None:
        await self.pool.execute("TRUNCATE outbox")
        await self.pool.execute(
            "INSERT INTO outbox (topic, payload) SELECT 'order.created', $1 FROM generate_series(1, $2::int)",
            json.dumps(PAYLOAD).encode(),
            count,
        )
        await self.pool.execute("VACUUM ANALYZE outbox")

    async def drain(self, count: int) -> None:
        while (await self.relay.run_once()).claimed:
            pass

    async def pending(self) -> int:
        return int(await self.pool.fetchval("SELECT count(*) FROM outbox"))

    async def emit(self, count: int) -> None:
        async def transaction() -> None:
            async with self.pool.acquire() as connection, connection.transaction():
                await connection.execute(INSERT_ORDER)
                await self.storage.insert(connection, "order.created", PAYLOAD)

        await at_once(transaction, count)


if __name__ == "__main__":
    serve(TxOutbox)
