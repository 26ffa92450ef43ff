"""Whatever goes wrong around the ledger, nothing is lost and each key keeps its order.

The simulation and its oracle are in `tests.ledger_oracle`. A run that fails names its seed.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import NewEvent, Outbox
from oncely.choice import OnDead
from tests.acceptance.relay_process import LEASE
from tests.database import Database
from tests.forks import Forks, Process
from tests.ledger_oracle import Simulation, Verdict
from tests.outboxes import rows
from tests.schemas import schemas_of_their_own
from tests.waiting import until

SEEDS = (3, 17)
TRANSACTIONS = 40
MISHAPS = ("crashes", "stalls", "zombies", "failures", "late commits", "cancelled", "cancels rolled back")

RELAYS = 4
KEYS = 8


@asynccontextmanager
async def tables(database: Database, schema: str) -> AsyncIterator[AsyncEngine]:
    """An engine on empty tables in that schema."""
    settings = {"search_path": f'"{schema}"'}
    engine = Database(database.url).engine(pool_size=20, connect_args={"server_settings": settings})
    metadata = MetaData()
    Outbox(metadata)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    yield engine
    await engine.dispose()


@pytest.mark.parametrize("on_dead", ["continue", "park"])
async def test_runs_with_every_mishap_lose_nothing_and_keep_each_key_in_order(
    database: Database, on_dead: OnDead
) -> None:
    seeds = [*SEEDS, random.randrange(10**9)]

    async def run(seed: int, schema: str) -> Verdict:
        async with tables(database, schema) as engine:
            return await Simulation(engine, seed, on_dead=on_dead, transactions=TRANSACTIONS).run()

    with schemas_of_their_own(database, *(f"seed {seed}" for seed in seeds)) as schemas:
        verdicts = await asyncio.gather(*map(run, seeds, schemas))
    assert {seed: v.wrong for seed, v in zip(seeds, verdicts, strict=True)} == {seed: {} for seed in seeds}
    together = sum((verdict.counts for verdict in verdicts), Counter())
    assert [mishap for mishap in MISHAPS if not together[mishap]] == []
    assert together["events"] > 3 * TRANSACTIONS


async def test_relay_processes_that_are_frozen_past_their_lease_and_killed_keep_each_key_in_order(
    database: Database, engine: AsyncEngine, metadata: MetaData, tmp_path: Path
) -> None:
    """One that thaws goes on with a batch that is another's by now, until it notices."""
    outbox, sessions = Outbox(metadata), async_sessionmaker(engine)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    broker = tmp_path / "broker"
    broker.touch()
    emitted: dict[str, list[int]] = {f"k{key}": [] for key in range(KEYS)}

    async def write() -> None:
        for number in range(300):
            key = f"k{number % KEYS}"
            async with sessions.begin() as session:
                await outbox.emit_many(session, [NewEvent("t", 2 * number + n, key=key) for n in range(2)])
            emitted[key] += [2 * number, 2 * number + 1]

    def received() -> int:
        return broker.read_bytes().count(b"\n")

    async def received_more(count: int) -> None:
        before = received()

        async def enough() -> bool:
            return received() >= min(before + count, 600)

        await until(enough)

    async def harass(relays: list[Process], forks: Forks) -> None:
        for turn in range(6):
            await received_more(15)
            place = random.randrange(RELAYS)
            if turn % 2:
                relays[place].kill()
                relays[place] = forks.start(database.url, str(broker))
                continue
            relays[place].kill(signal.SIGSTOP)
            await asyncio.sleep(LEASE.total_seconds() * 1.2)
            relays[place].kill(signal.SIGCONT)

    async def all_left() -> bool:
        return await rows(engine, "SELECT count(*) FROM outbox WHERE published_at IS NULL") == [(0,)]

    with Forks("tests.acceptance.relay_process") as forks:
        relays = [forks.start(database.url, str(broker)) for _ in range(RELAYS)]
        await asyncio.gather(write(), harass(relays, forks))
        await until(all_left)
    first: dict[str, list[int]] = {key: [] for key in emitted}
    for line in broker.read_text().splitlines():
        key, payload = line.split()
        if int(payload) not in first[key]:
            first[key].append(int(payload))
    assert first == emitted
