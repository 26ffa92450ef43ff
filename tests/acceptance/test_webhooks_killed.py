"""Workers that are killed: nothing is lost, and what is sent twice says so by its id."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import Inbox
from oncely.webhooks import StandardWebhooksVerifier, Webhooks
from tests.database import Database
from tests.forks import Forks
from tests.waiting import until
from tests.webhooks import (
    SECRET,
    Answer,
    Endpoint,
    Received,
    Sessions,
    authority_file,
    enqueue,
    execute,
    make_webhooks,
    row_of,
    rows,
)

pytestmark = pytest.mark.in_schema

STEPS = ("lease", "look", "record")
ROOT = Path(__file__).parents[2]
LEASE = timedelta(seconds=30)


@pytest.fixture
async def webhooks(engine: AsyncEngine, metadata: MetaData) -> Webhooks:
    Inbox(metadata)
    return await make_webhooks(engine, metadata=metadata)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("tests.acceptance.webhook_worker") as forks:
        yield forks


@asynccontextmanager
async def worker_process(database: Database, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that sends; killed at the end of the block if it still lives."""
    assert database.schema is not None
    arguments = ["-m", "tests.acceptance.webhook_worker", database.url, database.schema]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, str(authority_file(folder)), cwd=ROOT
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def end_leases(engine: AsyncEngine) -> None:
    """As if the leases of those that were killed had ended."""
    await execute(engine, "UPDATE webhooks SET due_at = statement_timestamp() WHERE token IS NOT NULL")


async def test_killed_between_the_request_and_the_result_it_is_sent_again_with_the_same_id(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine, database: Database,
    metadata: MetaData, tmp_path: Path,
) -> None:  # fmt: skip
    inbox, verifier = Inbox(metadata), StandardWebhooksVerifier(SECRET)
    killed = asyncio.Event()
    done: list[bool] = []

    async def receive(received: Received, writer: asyncio.StreamWriter) -> Answer:
        """A receiver that counts each webhook once, and kills the first sender before it answers."""
        verified = verifier.verify(received.headers, received.body)

        async def work() -> None:
            done.append(True)

        async with sessions.begin() as session:
            await inbox.run(session, verified.event_id, work, consumer="webhooks of shop")
        if not killed.is_set():
            process.kill()
            await process.wait()
            killed.set()
        return Answer(200)

    server.script = receive
    webhook_id = await enqueue(webhooks, sessions, server.url())
    async with worker_process(database, tmp_path) as process:
        await asyncio.wait_for(killed.wait(), 30)
    columns = "state, attempts, token IS NOT NULL, due_at > statement_timestamp()"
    assert await row_of(engine, columns) == ("pending", 1, True, True)  # leased by nobody that lives

    await end_leases(engine)
    async with worker_process(database, tmp_path):

        async def delivered() -> bool:
            return await row_of(engine) == ("delivered", 2, None)

        await until(delivered)
    assert [request.headers["webhook-id"] for request in server.requests] == [str(webhook_id)] * 2
    assert done == [True]


@pytest.mark.faults
@pytest.mark.parametrize(
    "point", [f"webhook.{step}.{side}" for step in STEPS for side in ("before", "after")]
)
async def test_a_worker_killed_at_any_step_loses_no_webhook_and_a_receiver_with_an_inbox_counts_it_once(
    point: str, webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine,
    database: Database, metadata: MetaData, tmp_path: Path, forks: Forks,
    recovered: Callable[[str, float], None],
) -> None:  # fmt: skip
    inbox, counted = Inbox(metadata), Counter[str]()

    async def receive(received: Received, writer: asyncio.StreamWriter) -> Answer:
        async def count() -> None:
            counted[received.headers["webhook-id"]] += 1

        async with sessions.begin() as session:
            await inbox.run(session, UUID(received.headers["webhook-id"]), count, consumer="shop")
        return Answer(200)

    server.script = receive
    ids = [str(await enqueue(webhooks, sessions, server.url(), key=str(number))) for number in range(3)]
    arguments = database.url, database.schema, str(authority_file(tmp_path))
    assert await forks.start(*arguments, point).ended() == -signal.SIGKILL
    await end_leases(engine)
    died = time.monotonic()
    worker = forks.start(*arguments)

    async def delivered() -> bool:
        return Counter(await rows(engine, "state")) == {("delivered",): 3}

    await until(delivered)
    recovered(f"SIGKILL at {point}, from the end of its leases", time.monotonic() - died)
    worker.kill()
    assert counted == dict.fromkeys(ids, 1)
    if not point.startswith("webhook.record"):
        assert len(server.requests) == len(ids)  # until then nothing was sent


async def test_of_three_workers_two_are_killed_and_everything_arrives(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine, database: Database,
    tmp_path: Path,
) -> None:  # fmt: skip
    ids = {
        str(await enqueue(webhooks, sessions, server.url(host=f"{number % 9}.example.com"), key=str(number)))
        for number in range(120)
    }

    async def script(received: Received, writer: asyncio.StreamWriter) -> Answer:
        await asyncio.sleep(0.02)  # an endpoint that takes its time
        return Answer(200)

    server.script = script

    def heard(count: int) -> bool:
        return len(server.requests) >= count

    async with (
        worker_process(database, tmp_path) as first,
        worker_process(database, tmp_path) as second,
        worker_process(database, tmp_path),
    ):
        for process, count in ((first, 20), (second, 50)):

            async def enough(count: int = count) -> bool:
                return heard(count)

            await until(enough)
            process.kill()
            await process.wait()

        # Those of the one that lives end too, as if it had stalled: it sends nothing that it has lost.
        await end_leases(engine)

        async def all_delivered() -> bool:
            return Counter(await rows(engine, "state")) == {("delivered",): 120}

        await until(all_delivered)
    assert {request.headers["webhook-id"] for request in server.requests} == ids
