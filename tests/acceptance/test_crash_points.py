"""SIGKILL at every step of the line: nothing is lost, handled twice or out of order, and it goes on soon."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely.testing import STEPS
from tests.acceptance.line import Line
from tests.database import Database
from tests.forks import Forks
from tests.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.in_schema]

POINTS = [
    f"{step}.{side}" for step in STEPS if not step.startswith("webhook.") for side in ("before", "after")
]

AFTER = {
    "relay.reap": "relay.publish.after",
    "consumer.take_over": "consumer.handler.before",
    "consumer.begin": "consumer.handler.before",
}
"""Steps that are made only when a process has died before, and where that one did."""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("tests.acceptance.line_process") as forks:
        yield forks


@pytest.mark.parametrize("point", POINTS)
async def test_a_process_killed_at_any_step_of_the_line_loses_nothing_and_handles_each_event_once_in_order(
    point: str,
    database: Database,
    engine: AsyncEngine,
    redis: Redis,
    redis_url: str,
    stream: str,
    forks: Forks,
    recovered: Callable[[str, float], None],
) -> None:
    line = Line(engine, redis, stream)
    await line.begin()
    where = database.url, database.schema, redis_url, stream
    step = point.rpartition(".")[0]
    settings = 0.2 if step == "relay.renew" else 0.0, step == "consumer.release"
    for each in (*([AFTER[step]] if step in AFTER else []), point):
        # That the process dies by itself is the proof that the step still has this name.
        assert await forks.start(*where, each, *settings).ended() == -signal.SIGKILL
    died = time.monotonic()
    process = forks.start(*where)
    await until(line.is_done)
    recovered(f"SIGKILL at {point}", time.monotonic() - died)
    process.kill()
    await line.check()
