"""The bare limit: what anybody would write on asyncpg. Lock, read, decode, mark, commit, on one connection.

No retries, no order, no events of its own: and its locks are held for as long as the publisher takes.
"""

from __future__ import annotations

import json

import asyncpg

from tests.benchmarks.adapters.adapter import CALLERS, INSERT_ORDER, ORDERS, PAYLOAD, Adapter, at_once, serve

BATCH = 1_000
TABLE = (
    "CREATE TABLE outbox (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, topic text NOT NULL,"
    " payload jsonb NOT NULL, published_at timestamptz)"
)
INDEX = "CREATE INDEX ON outbox (id) WHERE published_at IS NULL"


class Bare(Adapter):
    async def prepare(self) -> None:
        self.pool = await asyncpg.create_pool(self.dsn, min_size=CALLERS, max_size=CALLERS)
        for statement in (ORDERS, TABLE, INDEX):
            await self.pool.execute(statement)
        self.connection = await asyncpg.connect(self.dsn)

    async def publish(self, events: list[tuple[int, str, object]]) -> None:
        self.handled += len(events)

    async def fill(self, count: int) -> None:
        await self.pool.execute("TRUNCATE outbox")
        await self.pool.execute(
            "INSERT INTO outbox (topic, payload) SELECT 'order.created', $1 FROM generate_series(1, $2::int)",
            json.dumps(PAYLOAD),
            count,
        )
        await self.pool.execute("VACUUM ANALYZE outbox")

    async def drain(self, count: int) -> None:
        while True:
            async with self.connection.transaction():
                rows = await self.connection.fetch(
                    "SELECT id, topic, payload FROM outbox WHERE published_at IS NULL"
                    " ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED",
                    BATCH,
                )
                if not rows:
                    return
                await self.publish([(row["id"], row["topic"], json.loads(row["payload"])) for row in rows])
                await self.connection.execute(
                    "UPDATE outbox SET published_at = now() WHERE id = ANY($1)", [row["id"] for row in rows]
                )

    async def pending(self) -> int:
        return int(await self.pool.fetchval("SELECT count(*) FROM outbox WHERE published_at IS NULL"))

    async def emit(self, count: int) -> None:
        async def transaction() -> None:
            async with self.pool.acquire() as connection, connection.transaction():
                await connection.execute(INSERT_ORDER)
                await connection.execute(
                    "INSERT INTO outbox (topic, payload) VALUES ('order.created', $1)", json.dumps(PAYLOAD)
                )

        await at_once(transaction, count)


if __name__ == "__main__":
    serve(Bare)
