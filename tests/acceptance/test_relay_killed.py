"""Relays that are killed lose nothing, keep each key in order, and send little twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import NewEvent, Outbox
from tests.database import Database
from tests.outboxes import rows
from tests.waiting import until

KILLS = 20
RELAYS = 3
KEYS = 10
TRANSACTIONS = 200
EVENTS = 5


@asynccontextmanager
async def starting(url: str, broker: Path) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """What starts a relay process and returns its id. All are gone at the end."""
    command = (sys.executable, "-m", "tests.acceptance.relay_process", url, str(broker))
    pipe = asyncio.subprocess.PIPE
    starter = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert starter.stdin is not None
    assert starter.stdout is not None
    answers = starter.stdout
    orders = starter.stdin

    async def start() -> int:
        orders.write(b"\n")
        await orders.drain()
        return int(await answers.readline())

    try:
        yield start
    finally:
        orders.close()
        await starter.wait()


async def test_relays_that_are_killed_twenty_times_lose_nothing_and_keep_each_key_in_order(
    database: Database, engine: AsyncEngine, metadata: MetaData, tmp_path: Path
) -> None:
    outbox, sessions = Outbox(metadata), async_sessionmaker(engine)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    broker = tmp_path / "broker"
    broker.touch()
    emitted: defaultdict[str, list[int]] = defaultdict(list)

    async def write() -> None:
        for number in range(TRANSACTIONS):
            key = f"k{number % KEYS}"
            batch = [number * EVENTS + line for line in range(EVENTS)]
            async with sessions.begin() as session:
                await outbox.emit_many(session, [NewEvent("t", each, key=key) for each in batch])
            emitted[key] += batch

    def received() -> int:
        return broker.read_bytes().count(b"\n")

    async def kill_some(relays: list[int]) -> None:
        for _ in range(KILLS):
            before = received()
            await until(lambda: received() >= before + 20)  # noqa: B023  awaited at once
            place = random.randrange(RELAYS)
            os.kill(relays[place], signal.SIGKILL)
            relays[place] = await start()

    async def drained() -> bool:
        return await rows(engine, "SELECT count(*) FROM outbox WHERE published_at IS NULL") == [(0,)]

    async with starting(database.url, broker) as start:
        relays = [await start() for _ in range(RELAYS)]
        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            group.create_task(kill_some(relays))
        assert received() < TRANSACTIONS * EVENTS  # they were killed amid their work, all twenty times
        await until(drained)
    lines = broker.read_text().split("\n")[:-1]
    first_appearances: defaultdict[str, list[int]] = defaultdict(list)
    for key, payload in (line.split() for line in dict.fromkeys(lines)):
        first_appearances[key].append(int(payload))
    assert first_appearances == emitted
    assert len(lines) - TRANSACTIONS * EVENTS < TRANSACTIONS * EVENTS / 4
