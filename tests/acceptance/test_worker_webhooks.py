"""A worker that sends webhooks, and is told to stop in the middle of an attempt."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.acceptance.workers import process
from tests.database import Database
from tests.waiting import until
from tests.webhooks import (
    Answer,
    Endpoint,
    Received,
    Sessions,
    authority_file,
    enqueue,
    make_webhooks,
    rows,
)

pytestmark = pytest.mark.in_schema


async def test_an_attempt_that_has_begun_is_finished_and_none_is_begun(
    database: Database, engine: AsyncEngine, sessions: Sessions, server: Endpoint, tmp_path: Path
) -> None:
    answers = asyncio.Event()

    async def answer(received: Received, writer: asyncio.StreamWriter) -> Answer:
        await answers.wait()
        return Answer()

    server.script = answer
    webhooks = await make_webhooks(engine)
    await enqueue(webhooks, sessions, server.url(), key="first")
    assert database.schema is not None
    command = ("-m", "tests.acceptance.webhook_worker", database.url, database.schema)
    # It polls no more, so that no claim is under way when the second comes.
    async with process(*command, str(authority_file(tmp_path)), "", "3600") as worker:
        await until(lambda: len(server.requests) == 1)
        worker.send(signal.SIGTERM)
        await worker.says("stopping")
        await enqueue(webhooks, sessions, server.url(), key="second")
        answers.set()
        assert await worker.ends() == 0, worker.output
    assert await rows(engine, "key, state, attempts, token") == [
        ("first", "delivered", 1, None),
        ("second", "pending", 0, None),
    ]
