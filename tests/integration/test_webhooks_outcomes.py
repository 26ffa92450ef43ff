"""What becomes of a webhook by what its endpoint says, and when it is tried again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import standardwebhooks
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely.backoff import Backoff
from oncely.webhooks import (
    StandardWebhooksVerifier,
    WebhookAttempt,
    WebhookRun,
    Webhooks,
)
from tests.database import both_drivers
from tests.waiting import until
from tests.webhooks import (
    SECRET,
    Answer,
    Endpoint,
    Sessions,
    endpoint,
    enqueue,
    execute,
    pass_time,
    row_of,
    rows,
    sender,
    worker,
)

pytestmark = pytest.mark.in_schema

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
LEASE = timedelta(seconds=30)
BACKOFF = Backoff(first=timedelta(minutes=1), maximum=HOUR, factor=2, jitter=0)


REJECTED = (301, 302, 303, 307, 308, 400, 401, 403, 404, 409, 410, 413, 422)


async def delay_of(engine: AsyncEngine) -> timedelta:
    """How long until the only webhook's next attempt."""
    [seconds] = await row_of(engine, "extract(epoch FROM due_at - clock_timestamp())")
    return timedelta(seconds=float(seconds))


def about(delay: timedelta, expected: timedelta) -> bool:
    return expected - timedelta(seconds=15) < delay <= expected


@both_drivers
async def test_an_endpoint_gets_it_signed_and_says_yes(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    body = json.dumps({"größe": 1.10, "b": {"a": [1, None]}}, ensure_ascii=False).encode()
    headers = {"Content-Type": "application/json"}
    webhook_id = await enqueue(webhooks, sessions, server.url("/in?a=%2F"), body, headers=headers)
    assert await worker(webhooks, sessions, server).run_once() == WebhookRun(delivered=1)
    [received] = server.requests
    assert (received.target, received.body) == ("/in?a=%2F", body)
    assert received.headers["content-type"] == "application/json"
    assert standardwebhooks.Webhook(SECRET).verify(body, received.headers) == json.loads(body)
    assert StandardWebhooksVerifier(SECRET).verify(received.headers, body).event_id == webhook_id
    assert await row_of(engine, "state, attempts, last_error, token") == ("delivered", 1, None, None)
    [finished] = await row_of(engine, "finished_at <= statement_timestamp()")
    assert finished
    assert await worker(webhooks, sessions, server).run_once() == WebhookRun()
    assert len(server.requests) == 1


async def test_nothing_to_do_is_no_attempt(webhooks: Webhooks, sessions: Sessions, server: Endpoint) -> None:
    run = await worker(webhooks, sessions, server).run_once()
    assert (run, run.attempts, server.connections) == (WebhookRun(), 0, 0)


async def test_every_kind_of_answer_has_its_end(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    expected: dict[int, tuple[str, str | None]] = {
        200: ("delivered", None),
        201: ("delivered", None),
        299: ("delivered", None),
        **dict.fromkeys(
            (301, 302, 303, 307, 308, 400, 401, 403, 404, 409, 410, 413, 422), ("rejected", None)
        ),
        **dict.fromkeys((408, 425, 429, 500, 502, 503, 504, 599), ("pending", None)),
    }

    async def script(received: Any, writer: asyncio.StreamWriter) -> Answer:
        return Answer(int(received.target[1:]), [("location", server.url("/elsewhere"))])

    server.script = script
    for status in expected:
        await enqueue(webhooks, sessions, server.url(f"/{status}"), key=str(status))
    one = worker(webhooks, sessions, server, per_endpoint=31)
    run = await one.run_once()
    assert run == WebhookRun(delivered=3, rejected=13, retried=8)
    assert run.attempts == 24
    found = {int(key): (state, error) for key, state, error in await rows(engine, "key, state, last_error")}
    assert found == {
        status: (state, None if state == "delivered" else f"HTTP {status}")
        for status, (state, _) in expected.items()
    }
    assert len(server.requests) == 24


async def test_what_fails_is_tried_again_later_and_later(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    server.answer = Answer(500)
    await enqueue(webhooks, sessions, server.url())
    one = worker(webhooks, sessions, server, retry=BACKOFF)
    for attempt, minutes in enumerate((1, 2, 4, 8, 16, 32, 60, 60), start=1):
        assert await one.run_once() == WebhookRun(retried=1)
        assert await row_of(engine) == ("pending", attempt, "HTTP 500")
        assert about(await delay_of(engine), timedelta(minutes=minutes))
        assert await one.run_once() == WebhookRun()
        await pass_time(engine, timedelta(minutes=minutes))
    server.answer = Answer(200)
    assert await one.run_once() == WebhookRun(delivered=1)
    assert await row_of(engine) == ("delivered", 9, None)
    assert len({request.headers["webhook-id"] for request in server.requests}) == 1


async def test_each_attempt_is_signed_anew_with_a_fresh_time(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    server.answer = Answer(503)
    await enqueue(webhooks, sessions, server.url())
    one = worker(webhooks, sessions, server)
    await one.run_once()
    [began] = await row_of(engine, "floor(extract(epoch FROM clock_timestamp()))")

    async def is_later() -> bool:
        [now] = await row_of(engine, "floor(extract(epoch FROM clock_timestamp()))")
        return bool(now > began)

    await until(is_later)
    await pass_time(engine, timedelta(minutes=10))
    await one.run_once()
    first, second = server.requests
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert int(first.headers["webhook-timestamp"]) < int(second.headers["webhook-timestamp"])
    assert first.headers["webhook-signature"] != second.headers["webhook-signature"]
    for received in (first, second):
        assert standardwebhooks.Webhook(SECRET).verify(received.body, received.headers) == {"ok": True}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("7200", 2 * HOUR),
        ("Wed, 21 Oct 2026 09:28:00 GMT", 2 * HOUR),
        ("1", timedelta(minutes=1)),  # not sooner than the backoff: it may be said every time
        ("nonsense", timedelta(minutes=1)),
        ("604800", 3 * DAY - LEASE),  # in time for a last attempt
    ],
)
@pytest.mark.parametrize("status", [429, 503])
async def test_an_endpoint_that_asks_to_wait_is_waited_for_inside_the_horizon(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine, status: int, value: str,
    expected: timedelta,
) -> None:  # fmt: skip
    server.answer = Answer(status, [("retry-after", value), ("date", "Wed, 21 Oct 2026 07:28:00 GMT")])
    await enqueue(webhooks, sessions, server.url())
    assert await worker(webhooks, sessions, server, retry=BACKOFF).run_once() == WebhookRun(retried=1)
    assert about(await delay_of(engine), expected)


@both_drivers
async def test_the_last_attempt_is_made_in_time_and_then_it_expires(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    server.answer = Answer(500)
    await enqueue(webhooks, sessions, server.url())
    one = worker(webhooks, sessions, server, retry=BACKOFF)
    await execute(engine, "UPDATE webhooks SET attempts = 20")
    await pass_time(engine, 3 * DAY - timedelta(minutes=40))
    assert await one.run_once() == WebhookRun(retried=1)
    # An hour would be too long: it comes when a lease is left.
    assert about(await delay_of(engine), timedelta(minutes=40) - LEASE)
    await pass_time(engine, timedelta(minutes=40) - LEASE)
    run = await one.run_once()
    assert (run, run.attempts) == (WebhookRun(expired=1), 1)
    assert await row_of(engine, "state, last_error, token") == ("expired", "HTTP 500", None)
    assert len(server.requests) == 2


async def test_an_attempt_that_ends_in_the_last_moment_is_not_repeated_for_ever(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    server.answer = Answer(500)
    await enqueue(webhooks, sessions, server.url())
    one = worker(webhooks, sessions, server, retry=BACKOFF)

    async def script(received: Any, writer: asyncio.StreamWriter) -> Answer:
        # While the first attempt is made, the time of the last one passes by.
        if len(server.requests) == 1:
            await pass_time(engine, timedelta(seconds=28))
        return Answer(500)

    server.script = script
    await pass_time(engine, 3 * DAY - timedelta(seconds=50))
    assert await one.run_once() == WebhookRun(retried=1)
    assert await one.run_once() == WebhookRun(expired=1)  # at once
    assert await one.run_once() == WebhookRun()
    assert len(server.requests) == 2


async def test_what_is_overdue_expires_unsent(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    await enqueue(webhooks, sessions, server.url())
    await pass_time(engine, 3 * DAY)
    run = await worker(webhooks, sessions, server).run_once()
    assert (run, run.attempts) == (WebhookRun(overdue=1), 0)
    assert await row_of(engine) == ("expired", 0, None)
    assert server.connections == 0


async def test_what_is_overdue_does_not_expire_under_a_live_lease(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    await enqueue(webhooks, sessions, server.url())
    one, other = worker(webhooks, sessions, server), worker(webhooks, sessions, server)

    async def script(received: Any, writer: asyncio.StreamWriter) -> Answer:
        await execute(engine, "UPDATE webhooks SET retry_until = statement_timestamp()")
        assert await other.run_once() == WebhookRun()
        async with sessions.begin() as session:
            assert await webhooks.prune(session) == 0
        return Answer(200)

    server.script = script
    assert await one.run_once() == WebhookRun(delivered=1)
    assert (await row_of(engine))[0] == "delivered"


async def test_when_the_time_is_over_before_the_request_it_is_not_sent(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    async def lookup(host: str, port: int) -> Sequence[str]:
        await execute(engine, "UPDATE webhooks SET retry_until = statement_timestamp()")
        return ["127.0.0.1"]

    await enqueue(webhooks, sessions, server.url())
    one = worker(webhooks, sessions, server, sender=sender(server, lookup=lookup))
    assert await one.run_once() == WebhookRun(released=1)
    assert await one.run_once() == WebhookRun(overdue=1)
    assert await row_of(engine) == ("expired", 0, None)
    assert server.requests == []


async def test_a_network_that_fails_is_tried_again_and_its_error_is_a_class(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    async with endpoint() as closed:
        await enqueue(webhooks, sessions, closed.url(), key="refused")
    await enqueue(webhooks, sessions, server.url(), key="answer")

    async def lookup(host: str, port: int) -> Sequence[str]:
        raise OSError("https://hooks.example.com/SECRET")

    async with endpoint(names=("other.example.com",)) as stranger:
        await enqueue(webhooks, sessions, stranger.url(), key="certificate")

        async def nothing(received: Any, writer: asyncio.StreamWriter) -> None:
            writer.transport.abort()

        server.script = nothing
        assert (await worker(webhooks, sessions, server).run_once()).retried == 3
    found = dict(await rows(engine, "key, last_error"))
    assert found.pop("answer") in ("RemoteProtocolError", "ConnectionResetError")
    assert found == {"certificate": "SSLCertVerificationError", "refused": "ConnectionRefusedError"}
    await execute(engine, "DELETE FROM webhooks")
    await enqueue(webhooks, sessions, server.url())
    one = worker(webhooks, sessions, server, sender=sender(server, lookup=lookup))
    assert await one.run_once() == WebhookRun(retried=1)
    assert await row_of(engine) == ("pending", 1, "OSError")


async def test_an_address_inside_is_quarantined(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    await enqueue(webhooks, sessions, server.url())
    one = worker(webhooks, sessions, server, sender=sender(server, allow_private=False))
    assert await one.run_once() == WebhookRun(quarantined=1)
    assert await row_of(engine, "state, last_error, finished_at") == ("quarantined", "AddressRefused", None)
    assert server.connections == 0


async def test_a_name_that_turned_inside_is_quarantined_at_the_next_attempt(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    answers = iter([[], ["169.254.169.254"]])

    async def lookup(host: str, port: int) -> Sequence[str]:
        return next(answers)

    await enqueue(webhooks, sessions, server.url())
    one = worker(webhooks, sessions, server, sender=sender(server, lookup=lookup, allow_private=False))
    assert await one.run_once() == WebhookRun(retried=1)
    await pass_time(engine, HOUR)
    assert await one.run_once() == WebhookRun(quarantined=1)


async def test_every_attempt_is_reported(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    heard: list[WebhookAttempt] = []

    async def on_attempt(attempt: WebhookAttempt) -> None:
        await asyncio.sleep(0)
        heard.append(attempt)
        if attempt.outcome == "delivered":
            raise RuntimeError("it cannot change what was recorded")

    server.answer = Answer(503)
    webhook_id = await enqueue(webhooks, sessions, server.url(), account="acme")
    one = worker(webhooks, sessions, server, on_attempt=on_attempt)
    await one.run_once()
    await pass_time(engine, HOUR)
    server.answer = Answer(200)
    assert await one.run_once() == WebhookRun(delivered=1)
    assert [(each.attempt, each.outcome, each.error) for each in heard] == [
        (1, "retry", "HTTP 503"),
        (2, "delivered", None),
    ]
    first = heard[0]
    assert (first.id, first.origin) == (webhook_id, server.url("", host="hooks.example.com"))
    assert (first.caller, first.account, first.type, first.key) == ("shop", "acme", "order.paid", "k")
    assert 0 < first.seconds < 20
    assert "on_attempt failed" in caplog.text
    assert (await row_of(engine))[0] == "delivered"
