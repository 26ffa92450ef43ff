"""One attempt, and what may come between: slow credentials, a database that goes, another worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely.backoff import Backoff
from oncely.errors import TablesMissing
from oncely.webhooks import Webhooks, WebhookSender
from oncely.webhooks.delivery import Courier
from oncely.webhooks.leases import Lease
from tests.database import Database
from tests.webhooks import Answer, Endpoint, Received, Sessions, enqueue, execute, row_of, sender
from tests.wire import Wire

pytestmark = pytest.mark.in_schema

SOON = Backoff(first=timedelta(milliseconds=10), maximum=timedelta(milliseconds=20))
LATE = Backoff(first=timedelta(minutes=1), maximum=timedelta(minutes=1))
SECONDS = timedelta(seconds=1)


@pytest.fixture
async def wired(wire: Wire, database: Database) -> AsyncIterator[Sessions]:
    """Sessions on the test's database by a wire that can be cut."""
    engine = Database(wire.url, database.schema).engine()
    yield async_sessionmaker(engine)
    await engine.dispose()


def courier(
    webhooks: Webhooks,
    sessions: Sessions,
    server: Endpoint,
    *,
    outage: Backoff = SOON,
    before: Callable[[], Awaitable[object]] | None = None,
) -> Courier:
    """`before` is awaited before there are credentials."""

    async def sender_for(scope: str | None) -> WebhookSender:
        if before is not None:
            await before()
        return sender(server)

    return Courier(
        webhooks,
        sessions,
        sender_for,
        duration=30 * SECONDS,
        retry=SOON,
        outage=outage,
        database_timeout=5 * SECONDS,
        grace=5 * SECONDS,
    )


async def leased(webhooks: Webhooks, sessions: Sessions, server: Endpoint) -> Lease:
    await enqueue(webhooks, sessions, server.url())
    claimed = await webhooks.leases.claim(
        sessions, limit=1, share=1, busy={}, duration=30 * SECONDS, after=""
    )
    [lease] = claimed.leases
    return lease


async def test_credentials_that_leave_no_time_for_an_attempt_are_tried_again_later(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    lease = replace(await leased(webhooks, sessions, server), ends_at=time.monotonic() + 10)
    attempt = await courier(webhooks, sessions, server).deliver(lease)  # whose sender may take 15 s
    assert (attempt.outcome, attempt.error, server.requests) == ("retry", "TimeoutError", [])
    assert await row_of(engine) == ("pending", 1, "TimeoutError")


async def test_a_table_that_is_dropped_before_the_request_is_an_error_and_nothing_is_sent(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    lease = await leased(webhooks, sessions, server)
    with pytest.raises(TablesMissing):
        await courier(
            webhooks, sessions, server, before=lambda: execute(engine, "DROP TABLE webhooks")
        ).deliver(lease)
    assert server.requests == []


async def test_a_database_that_goes_before_the_request_burns_no_attempt(
    webhooks: Webhooks, server: Endpoint, engine: AsyncEngine, wire: Wire, wired: Sessions
) -> None:
    lease = await leased(webhooks, wired, server)

    async def cut() -> None:
        wire.cut()

    attempt = await courier(webhooks, wired, server, before=cut).deliver(lease)
    assert (attempt.outcome, server.requests) == ("released", [])
    assert await row_of(engine, "state, attempts, token") == ("pending", 0, None)


async def test_an_end_that_no_database_takes_before_the_lease_is_over_is_lost(
    webhooks: Webhooks, server: Endpoint, engine: AsyncEngine, wire: Wire, wired: Sessions,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    lease = await leased(webhooks, wired, server)

    async def script(received: Received, writer: asyncio.StreamWriter) -> Answer:
        wire.cut()
        return Answer(200)

    server.script = script
    attempt = await courier(webhooks, wired, server, outage=LATE).deliver(lease)
    assert attempt.outcome == "lost"
    assert f"webhook {lease.id}: no database to record its end: " in caplog.text
    assert await row_of(engine, "state, attempts, token") == ("pending", 1, lease.token)


@pytest.mark.parametrize(
    ("status", "due", "outcome"),
    [(200, "", "delivered"), (500, "", "retry"), (500, "retry_until", "expired")],
)
async def test_an_end_whose_answer_was_lost_is_found_out(
    webhooks: Webhooks, server: Endpoint, engine: AsyncEngine, wire: Wire, wired: Sessions,
    status: int, due: str, outcome: str,
) -> None:  # fmt: skip
    lease = await leased(webhooks, wired, server)

    async def script(received: Received, writer: asyncio.StreamWriter) -> Answer:
        if due:
            await execute(engine, f"UPDATE webhooks SET due_at = {due}")  # as of its last attempt
        wire.lose_next_reply()
        return Answer(status)

    server.script = script
    assert (await courier(webhooks, wired, server).deliver(lease)).outcome == outcome
    state = {"retry": "pending"}.get(outcome, outcome)
    assert await row_of(engine, "state, attempts, token") == (state, 1, None)


async def test_an_end_that_comes_late_because_the_database_was_away_is_lost_to_who_has_it_now(
    webhooks: Webhooks, server: Endpoint, engine: AsyncEngine, wire: Wire, wired: Sessions
) -> None:
    lease = await leased(webhooks, wired, server)

    async def script(received: Received, writer: asyncio.StreamWriter) -> Answer:
        await execute(engine, "UPDATE webhooks SET token = gen_random_uuid(), attempts = attempts + 1")
        wire.cut()
        return Answer(200)

    server.script = script
    assert (await courier(webhooks, wired, server).deliver(lease)).outcome == "lost"
    assert await row_of(engine, "state, attempts") == ("pending", 2)
