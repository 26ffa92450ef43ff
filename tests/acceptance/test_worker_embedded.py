"""A worker inside a web application: it begins and ends with it."""

from __future__ import annotations

import signal
from pathlib import Path

from httpx import AsyncClient, AsyncHTTPTransport
from redis.asyncio import Redis
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import Outbox
from tests.acceptance.worker_process import GROUP
from tests.acceptance.workers import process
from tests.database import Database
from tests.outboxes import Sessions, emit, rows


async def test_a_worker_in_a_lifespan_begins_with_the_application_and_drains_when_it_ends(
    database: Database,
    redis_url: str,
    redis: Redis,
    stream: str,
    engine: AsyncEngine,
    sessions: Sessions,
    metadata: MetaData,
    tmp_path: Path,
) -> None:
    outbox, socket = Outbox(metadata), tmp_path / "http"
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await emit(outbox, sessions, "wait", topic="handle")
    command = ("-m", "uvicorn", "--factory", "tests.acceptance.worker_app:create_app", "--uds", str(socket))
    places = {"DATABASE_URL": database.url, "REDIS_URL": redis_url, "STREAM": stream}
    async with (
        process(*command, **places) as server,
        AsyncClient(transport=AsyncHTTPTransport(uds=str(socket)), base_url="http://shop") as client,
    ):
        await server.says("begun handle wait")
        await server.says("Uvicorn running")
        health = (await client.get("/health")).json()
        assert [(each["name"], each["healthy"]) for each in health] == [
            ("Relay outbox", True),
            (f"StreamConsumer {stream}/{GROUP}", True),
            ("Retention outbox", True),
        ]
        server.send(signal.SIGTERM)
        await server.says("stopping")
        server.go()
        await server.ends()
    assert "ended handle wait" in server.lines
    assert any("Application shutdown complete" in line for line in server.lines)
    assert "Traceback" not in server.output
    assert await rows(engine, "SELECT count(*) FROM outbox_claims") == [(0,)]
    assert await redis.xpending_range(stream, GROUP, "-", "+", 10) == []
    assert await redis.xinfo_consumers(stream, GROUP) == []
