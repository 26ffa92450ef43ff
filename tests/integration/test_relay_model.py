"""Nothing is lost, and each key stays in order, whatever befalls the relays and the writers.

ONCELY_TEST_SEED repeats a run's draws; the message of a failure names its seed.
"""

from __future__ import annotations

import os
import random

import pytest
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import Outbox
from oncely.choice import OnDead
from tests.relay_oracle import RelaySimulation

pytestmark = pytest.mark.in_schema


@pytest.mark.parametrize("on_dead", ["continue", "park"])
async def test_nothing_is_lost_and_each_key_stays_in_order(
    engine: AsyncEngine, metadata: MetaData, on_dead: OnDead
) -> None:
    Outbox(metadata)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    seed = int(os.environ.get("ONCELY_TEST_SEED") or random.randrange(1_000_000))
    simulation = RelaySimulation(engine, seed=seed, on_dead=on_dead, transactions=40)
    verdict = await simulation.run()
    assert verdict.wrong == {}, f"seed {seed}: {dict(verdict.counts)}"
    assert simulation.wrongly_dead == {}, f"seed {seed}: {dict(verdict.counts)}"
