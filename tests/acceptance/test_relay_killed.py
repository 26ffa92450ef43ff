"""Relays that are killed lose nothing, keep each key in order, and send little twice."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from pathlib import Path

from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import NewEvent, Outbox
from tests.database import Database
from tests.forks import Forks, Process
from tests.outboxes import rows
from tests.waiting import until

KILLS = 20
RELAYS = 3
KEYS = 10
TRANSACTIONS = 200
EVENTS = 5


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

    async def kill_some(relays: list[Process]) -> None:
        for _ in range(KILLS):
            before = received()
            await until(lambda: received() >= before + 20)  # noqa: B023  awaited at once
            place = random.randrange(RELAYS)
            relays[place].kill()
            relays[place] = forks.start(database.url, str(broker))

    async def drained() -> bool:
        return await rows(engine, "SELECT count(*) FROM outbox WHERE published_at IS NULL") == [(0,)]

    with Forks("tests.acceptance.relay_process") as forks:
        relays = [forks.start(database.url, str(broker)) for _ in range(RELAYS)]
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
