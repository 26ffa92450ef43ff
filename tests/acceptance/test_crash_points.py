"""SIGKILL at every step of the line: nothing is lost, handled twice or out of order, and it goes on soon."""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
from redis.asyncio import Redis
from sqlalchemy import MetaData, Table, select
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import Inbox, NewEvent, Outbox
from oncely.streams import StreamConsumer
from oncely.testing import STEPS
from tests.acceptance.line_process import handled_table
from tests.database import Database
from tests.forks import Forks
from tests.outboxes import rows
from tests.waiting import until

pytestmark = pytest.mark.faults

POINTS = [
    f"{step}.{side}" for step in STEPS if not step.startswith("webhook.") for side in ("before", "after")
]

AFTER = {
    "relay.reap": "relay.publish.after",
    "consumer.take_over": "consumer.handler.before",
    "consumer.begin": "consumer.handler.before",
}
"""Steps that are made only when a process has died before, and where that one did."""

KEYS = ("a", "b", "c")
EACH = 4


@pytest.fixture
def driver() -> str:
    return "asyncpg"


@pytest.fixture
def database(schema: Database) -> Database:
    return schema


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("tests.acceptance.line_process") as forks:
        yield forks


@pytest.mark.parametrize("point", POINTS)
async def test_a_process_killed_at_any_step_of_the_line_loses_nothing_and_handles_each_event_once_in_order(
    point: str,
    database: Database,
    engine: AsyncEngine,
    metadata: MetaData,
    redis: Redis,
    redis_url: str,
    stream: str,
    forks: Forks,
    recovered: Callable[[str, float], None],
) -> None:
    outbox, handled = Outbox(metadata), handled_table(metadata)
    Inbox(metadata)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    numbers = [NewEvent("t", number, key=key) for number in range(EACH) for key in KEYS]
    async with async_sessionmaker(engine).begin() as session:
        await outbox.emit_many(session, [NewEvent("t", "bad"), *numbers])

    step = point.rpartition(".")[0]
    settings = 0.2 if step == "relay.renew" else 0.0, step == "consumer.release"
    for each in (*([AFTER[step]] if step in AFTER else []), point):
        process = forks.start(database.url, database.schema, redis_url, stream, each, *settings)
        assert await process.ended() == -signal.SIGKILL
    died = time.monotonic()

    consumer = StreamConsumer(redis, stream=stream)

    async def all_is_done() -> bool:
        open_events = "SELECT 1 FROM outbox WHERE published_at IS NULL UNION ALL SELECT 1 FROM outbox_claims"
        if await rows(engine, open_events):
            return False
        lag = (await consumer.lag()).get("workers")
        return lag is not None and (lag.unread, lag.pending) == (0, 0)

    process = forks.start(database.url, database.schema, redis_url, stream)
    await until(all_is_done)
    recovered(f"SIGKILL at {point}", time.monotonic() - died)
    process.kill()
    assert await in_order(engine, handled) == {key: [str(number) for number in range(EACH)] for key in KEYS}
    letters = await consumer.dead_letters.list()  # one for each time that it came
    assert {letter.event.payload for letter in letters if letter.event is not None} == {"bad"}


async def in_order(engine: AsyncEngine, handled: Table) -> dict[str, list[str]]:
    """The payloads of each key as they were handled."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    async with engine.connect() as connection:
        for key, payload in await connection.execute(
            select(handled.c.key, handled.c.payload).order_by(handled.c.place)
        ):
            found[key].append(payload)
    return found
