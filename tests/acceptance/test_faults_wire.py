"""The wire is cut before and after each acknowledgement of the line: its request or its answer is lost."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from oncely.streams import publisher, scripts
from oncely.testing import EmbeddedValkey, Steps
from tests.acceptance.line import Line
from tests.database import Database
from tests.waiting import until
from tests.wire import Wire

pytestmark = [pytest.mark.faults, pytest.mark.in_schema]

EXECUTE = rb"E\x00\x00\x00\x09\x00\x00\x00\x00\x00S\x00\x00\x00\x04"
"""How PostgreSQL's protocol asks for a statement to be executed, and to be told that it was."""

BY_POSTGRES = {"relay.commit": rb"COMMIT", "relay.settle": EXECUTE, "inbox.commit": rb"COMMIT"}
BY_REDIS = {
    "relay.publish": re.escape(publisher._PUBLISH.digest.encode()),
    "consumer.read": rb"XREADGROUP",
    "consumer.acknowledge": rb"XACK",
    "consumer.bury": re.escape(scripts.BURY.digest.encode()),
}
"""What the step's request looks like on the wire."""

Recovered = Callable[[str, float], None]


@pytest.fixture
async def to_postgres(database: Database) -> AsyncIterator[Wire]:
    async with Wire.to_postgres(database.url) as wire:
        yield wire


@pytest.fixture
async def to_redis(valkey: EmbeddedValkey) -> AsyncIterator[Wire]:
    async with Wire.to_socket(valkey.socket_path) as wire:
        yield wire


def once(step: str, cut: Callable[[], object]) -> Steps:
    """Steps that cut when `step` is asked for, the second time: by then every connection is in use."""
    seen = 0

    def on_step(name: str) -> None:
        nonlocal seen
        if name == f"{step}.before":
            seen += 1
            if seen == min(2, _COUNTS.get(step, 2)):
                cut()

    return Steps(on_step)


_COUNTS = {"consumer.bury": 1}


@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.parametrize("step", BY_POSTGRES)
async def test_a_wire_to_postgresql_that_is_cut_around_an_acknowledgement_loses_and_doubles_nothing(
    driver: str,
    step: str,
    lost: str,
    beside: Line,
    database: Database,
    to_postgres: Wire,
    recovered: Recovered,
) -> None:
    engine = replace(database, url=to_postgres.url).engine()
    await _cut_and_recover(
        Line(engine, beside.redis, beside.stream),
        beside,
        to_postgres,
        step,
        lost,
        BY_POSTGRES[step],
        recovered,
    )
    await engine.dispose()


@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.parametrize("step", BY_REDIS)
async def test_a_wire_to_redis_that_is_cut_around_an_acknowledgement_loses_and_doubles_nothing(
    step: str, lost: str, beside: Line, to_redis: Wire, recovered: Recovered
) -> None:
    async with Redis.from_url(to_redis.url) as redis:
        line = Line(beside.engine, redis, beside.stream)
        await _cut_and_recover(line, beside, to_redis, step, lost, BY_REDIS[step], recovered)


async def _cut_and_recover(
    line: Line, beside: Line, wire: Wire, step: str, lost: str, request: bytes, recovered: Recovered
) -> None:
    cut_at: list[float] = []

    def cut() -> None:
        cut_at.append(time.monotonic())
        if lost == "request":
            wire.cut()
        else:
            wire.lose_reply_to(request)

    steps = once(step, cut)
    steps.watch(line.engine, line.redis)
    async with line.running(steps):
        await until(beside.is_done)
        recovered(f"the {lost} of {step} is lost, the wire cut", time.monotonic() - cut_at[0])
    assert len(cut_at) == 1
    await beside.check()
