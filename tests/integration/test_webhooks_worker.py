"""Who sends a webhook: leases that fence, shares that hold, a stop that gives back."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely.backoff import Backoff
from oncely.errors import TablesMissing
from oncely.webhooks import (
    Message,
    SigningScopeUnknown,
    StandardWebhooks,
    StandardWebhooksVerifier,
    WebhookAttempt,
    WebhookRun,
    Webhooks,
    WebhookSender,
    WebhookWorker,
)
from oncely.webhooks.leases import Lease
from oncely.webhooks.sealing import Content
from oncely.webhooks.sending import Attempt, Reply
from tests.database import Database, both_drivers
from tests.waiting import until
from tests.webhooks import (
    SECRET,
    Answer,
    Endpoint,
    Received,
    Sessions,
    enqueue,
    execute,
    pass_time,
    row_of,
    rows,
    sender,
    worker,
)
from tests.wire import Wire

pytestmark = pytest.mark.in_schema

LEASE = timedelta(seconds=30)
MINUTE = timedelta(minutes=1)
SOON = Backoff(first=timedelta(milliseconds=10), maximum=timedelta(milliseconds=20))


async def claim(
    webhooks: Webhooks,
    sessions: Sessions,
    *,
    limit: int = 100,
    share: int = 100,
    after: str = "",
    **busy: int,
) -> list[Lease]:
    """A claim as a worker makes it; `busy` counts by the first part of a host name."""
    counts = {f"https://{name}.example.com": count for name, count in busy.items()}
    claimed = await webhooks.leases.claim(
        sessions, limit=limit, share=share, busy=counts, duration=LEASE, after=after
    )
    return claimed.leases


def hosts(leases: Sequence[Lease]) -> list[str]:
    return sorted(lease.routing.origin.removeprefix("https://").split(".")[0] for lease in leases)


@both_drivers
async def test_a_lease_is_one_workers_until_it_ends(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    await enqueue(webhooks, sessions, "https://a.example.com/")
    [first] = await claim(webhooks, sessions)
    assert await claim(webhooks, sessions) == []
    assert await webhooks.leases.look(sessions, first) == "ours"
    await pass_time(engine, LEASE)
    assert await webhooks.leases.look(sessions, first) == "lost"
    [second] = await claim(webhooks, sessions)
    assert (second.id, first.attempt, second.attempt) == (first.id, 1, 2)
    assert second.token != first.token


@both_drivers
async def test_whoever_has_lost_its_lease_changes_nothing(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    await enqueue(webhooks, sessions, "https://a.example.com/")
    [first] = await claim(webhooks, sessions)
    await pass_time(engine, LEASE)
    [second] = await claim(webhooks, sessions)
    before = await row_of(engine, "webhooks.*")
    leases = webhooks.leases
    assert not await leases.finish(sessions, first, "delivered")
    assert not await leases.finish(sessions, first, "quarantined", "SealBroken")
    assert await leases.retry(sessions, first, "HTTP 500", MINUTE, duration=LEASE) is None
    assert not await leases.release(sessions, first)
    assert await row_of(engine, "webhooks.*") == before
    assert await leases.finish(sessions, second, "delivered")
    assert not await leases.finish(sessions, second, "delivered")
    assert (await row_of(engine))[0] == "delivered"


async def test_as_long_as_nobody_took_it_a_late_result_counts(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    await enqueue(webhooks, sessions, "https://a.example.com/")
    [lease] = await claim(webhooks, sessions)
    await pass_time(engine, LEASE + MINUTE)
    assert await webhooks.leases.finish(sessions, lease, "delivered")


async def test_a_lease_is_not_born_old_in_a_slow_session(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    await enqueue(webhooks, sessions, "https://a.example.com/")
    before = time.monotonic()
    [lease] = await claim(webhooks, sessions)
    assert before + 30 <= lease.ends_at <= time.monotonic() + 30
    [seconds] = await row_of(engine, "extract(epoch FROM due_at - clock_timestamp())")
    assert 20 < seconds <= 30
    [apart] = await row_of(engine, f"extract(epoch FROM '{lease.now().isoformat()}' - clock_timestamp())")
    assert -5 < apart < 5


async def test_what_is_released_burns_no_attempt(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    await enqueue(webhooks, sessions, "https://a.example.com/")
    [lease] = await claim(webhooks, sessions)
    assert await webhooks.leases.release(sessions, lease)
    assert await row_of(engine, "state, attempts, token") == ("pending", 0, None)
    [again] = await claim(webhooks, sessions)
    assert again.attempt == 1


async def test_many_claims_at_once_never_share_a_webhook(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    async with sessions.begin() as session:
        for number in range(100):
            url = f"https://{number % 7}.example.com/"
            await webhooks.enqueue(session, url, b"", key=str(number), caller="shop", type="t")
    taken: list[Lease] = []
    while len(taken) < 100:
        claims = [claim(webhooks, sessions, limit=9, share=3) for _ in range(6)]
        for leases in await asyncio.gather(*claims):
            assert len(leases) <= 9
            assert max(Counter(hosts(leases)).values(), default=0) <= 3
            taken += leases
    assert len({lease.id for lease in taken}) == len(taken) == 100


async def test_each_origin_gets_its_share_and_origins_come_in_turn(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    for host, number in (("a", 20), ("b", 1), ("c", 2), ("d", 3)):
        for key in range(number):
            await enqueue(webhooks, sessions, f"https://{host}.example.com/", key=str(key))

    async def look(**how: Any) -> str:
        leases = await claim(webhooks, sessions, **how)
        for lease in leases:
            await webhooks.leases.release(sessions, lease)
        return "".join(hosts(leases))

    assert await look(share=2) == "aabccdd"
    assert await look(share=2, limit=3) == "aab"
    assert await look(share=2, limit=3, after="https://a.example.com") == "bcc"
    assert await look(share=2, limit=3, after="https://c.example.com") == "add"
    assert await look(share=2, limit=5, after="https://c.example.com") == "aabdd"
    assert await look(share=2, after="https://z.example.com") == "aabccdd"
    assert await look(share=3, a=2, c=3, d=1) == "abdd"
    assert await look(share=3, a=7) == "bccddd"


async def test_in_each_origin_the_longest_due_goes_first(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    for key in ("new", "old", "later"):
        await enqueue(webhooks, sessions, "https://a.example.com/", key=key)
    await execute(engine, "UPDATE webhooks SET due_at = due_at - interval '1 hour' WHERE key = 'old'")
    await execute(engine, "UPDATE webhooks SET due_at = due_at + interval '1 hour' WHERE key = 'later'")
    assert [lease.routing.key for lease in await claim(webhooks, sessions, share=1)] == ["old"]
    assert [lease.routing.key for lease in await claim(webhooks, sessions, share=9)] == ["new"]


async def test_a_webhook_that_somebody_has_locked_is_passed_over(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    for key in ("locked", "free"):
        await enqueue(webhooks, sessions, "https://a.example.com/", key=key)
    async with engine.connect() as connection:
        await connection.exec_driver_sql("SELECT 1 FROM webhooks WHERE key = 'locked' FOR UPDATE")
        [lease] = await claim(webhooks, sessions, share=1)
    assert lease.routing.key == "free"


async def test_a_lease_that_ends_before_the_request_sends_nothing(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    async def lookup(host: str, port: int) -> Sequence[str]:
        await pass_time(engine, LEASE)  # while the name is looked up
        return ["127.0.0.1"]

    await enqueue(webhooks, sessions, server.url())
    one = worker(webhooks, sessions, server, sender=sender(server, lookup=lookup))
    assert await one.run_once() == WebhookRun(lost=1)
    assert server.requests == []
    assert await worker(webhooks, sessions, server).run_once() == WebhookRun(delivered=1)


@both_drivers
async def test_two_workers_send_every_webhook_once(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    for _ in range(5):
        async with sessions.begin() as session:
            await webhooks.enqueue(session, server.url(), b"{}", key="one", caller="shop", type="t")
        pair = [worker(webhooks, sessions, server) for _ in range(2)]
        ends = await asyncio.gather(*(each.run_once() for each in pair))
        assert sorted(end.delivered for end in ends) == [0, 1]
        await execute(engine, "DELETE FROM webhooks")
    assert len(server.requests) == 5


async def test_a_worker_that_was_taken_for_dead_does_not_overwrite_what_came_after(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    """The first one's request takes longer than its lease; the second delivers; the first says 500."""
    taken = asyncio.Event()

    async def script(received: Received, writer: asyncio.StreamWriter) -> Answer:
        if len(server.requests) > 1:
            return Answer(200)
        await pass_time(engine, LEASE)
        taken.set()
        await delivered.wait()
        return Answer(500)

    delivered = asyncio.Event()
    server.script = script
    await enqueue(webhooks, sessions, server.url())
    slow = asyncio.ensure_future(worker(webhooks, sessions, server).run_once())
    await taken.wait()
    assert await worker(webhooks, sessions, server).run_once() == WebhookRun(delivered=1)
    delivered.set()
    assert await slow == WebhookRun(lost=1)
    assert await row_of(engine) == ("delivered", 2, None)


async def running(one: WebhookWorker) -> tuple[asyncio.Event, asyncio.Task[None]]:
    stop = asyncio.Event()
    return stop, asyncio.ensure_future(one.run(stop))


async def test_one_endpoint_that_drips_holds_nobody_back(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    held = 0
    most = 0

    async def script(received: Received, writer: asyncio.StreamWriter) -> Answer | None:
        nonlocal held, most
        if received.host != "drip.example.com":
            return Answer(200)
        held += 1
        most = max(most, held)
        try:
            while True:  # one byte at a time, for ever
                writer.write(b"H")
                await writer.drain()
                await asyncio.sleep(0.05)
        finally:
            held -= 1

    server.script = script
    for number in range(20):
        await enqueue(webhooks, sessions, server.url(host="drip.example.com"), key=str(number))
    for number in range(50):
        await enqueue(webhooks, sessions, server.url(host=f"healthy-{number}.example.com"))
    one = worker(webhooks, sessions, server, concurrency=8, per_endpoint=4, grace=timedelta(milliseconds=100))
    began = time.monotonic()
    stop, task = await running(one)

    async def healthy_are_done() -> bool:
        states = Counter(await rows(engine, "state"))
        return states[("delivered",)] == 50

    await until(healthy_are_done)
    took = time.monotonic() - began
    assert took < 10, took  # the drip's own deadline is 15 s, and it has twenty
    assert most == 4
    stop.set()
    await task
    assert Counter(await rows(engine, "state, token")) == {("delivered", None): 50, ("pending", None): 20}
    cut = {row for row in await rows(engine, "state, attempts, last_error") if row[0] == "pending"}
    assert cut == {("pending", 1, "Interrupted"), ("pending", 0, None)}


async def test_a_worker_that_runs_sends_what_comes_and_stops_when_told(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    one = worker(webhooks, sessions, server, poll_interval=timedelta(milliseconds=20))
    stop, task = await running(one)
    for number in range(5):
        await enqueue(webhooks, sessions, server.url(), key=str(number))

        async def sent(count: int = number + 1) -> bool:
            return len(server.requests) == count

        await until(sent)
    stop.set()
    await task
    assert await rows(engine, "state") == [("delivered",)] * 5


async def test_what_is_in_flight_at_a_stop_may_finish(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    arrived, stop = asyncio.Event(), asyncio.Event()

    async def script(received: Received, writer: asyncio.StreamWriter) -> Answer:
        arrived.set()
        await stop.wait()
        return Answer(200)

    server.script = script
    await enqueue(webhooks, sessions, server.url())
    task = asyncio.ensure_future(worker(webhooks, sessions, server).run(stop))
    await arrived.wait()
    stop.set()
    await task
    assert await row_of(engine) == ("delivered", 1, None)


@pytest.mark.parametrize("how", ["run", "run_once"])
async def test_cancelled_before_the_request_it_gives_back_and_burns_nothing(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine, how: str
) -> None:
    asked = asyncio.Event()

    async def lookup(host: str, port: int) -> Sequence[str]:
        asked.set()
        await asyncio.Event().wait()
        return []

    await enqueue(webhooks, sessions, server.url())
    one = worker(webhooks, sessions, server, sender=sender(server, lookup=lookup))
    task: asyncio.Future[Any] = asyncio.ensure_future(one.run() if how == "run" else one.run_once())
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await row_of(engine, "state, attempts, last_error, token") == ("pending", 0, None, None)


async def test_cancelled_after_the_request_it_counts_and_waits(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    arrived = asyncio.Event()

    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await asyncio.Event().wait()

    server.script = script
    await enqueue(webhooks, sessions, server.url())
    task = asyncio.ensure_future(worker(webhooks, sessions, server).run_once())
    await arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    columns = "state, attempts, last_error, token, due_at > statement_timestamp()"
    assert await row_of(engine, columns) == ("pending", 1, "Interrupted", None, True)


class Telling(WebhookSender):
    """Sets `heard` when the endpoint's answer was heard."""

    heard: asyncio.Event

    async def send(self, webhook_id: UUID, content: Content, attempt: Attempt) -> Reply:
        told = attempt.answered

        def answered(reply: Reply) -> None:
            told(reply)
            self.heard.set()

        attempt.answered = answered  # type: ignore[method-assign]  # listened to on its way
        return await super().send(webhook_id, content, attempt)


async def test_cancelled_after_the_answer_the_answer_counts(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
        await writer.drain()
        await asyncio.Event().wait()

    server.script = script
    await enqueue(webhooks, sessions, server.url())
    telling = Telling(StandardWebhooks(SECRET), transport=server.transport())
    telling.heard = asyncio.Event()
    task = asyncio.ensure_future(worker(webhooks, sessions, server, sender=telling).run_once())
    await telling.heard.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await row_of(engine) == ("delivered", 1, None)


@asynccontextmanager
async def through_a_wire(database: Database) -> AsyncIterator[tuple[Wire, Sessions]]:
    """Sessions on the test's database by a wire that can be cut."""
    async with Wire.to_postgres(database.url) as wire:
        engine = Database(wire.url, database.schema).engine()
        yield wire, async_sessionmaker(engine)
        await engine.dispose()


@both_drivers
async def test_cancelled_anywhere_it_keeps_no_lease_and_counts_every_request(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    chance = random.Random(7)

    async def script(received: Received, writer: asyncio.StreamWriter) -> Answer:
        await asyncio.sleep(chance.random() * 0.02)
        return Answer(chance.choice((204, 500)))

    server.script = script
    for key in range(12):
        url = server.url(f"/{key}", host=f"h{key % 3}.example.com")
        await enqueue(webhooks, sessions, url, key=str(key))
    one = worker(webhooks, sessions, server, retry=SOON, concurrency=6, per_endpoint=2)
    for number in range(8):
        work: Awaitable[object] = one.run() if number % 2 else one.run_once()
        task = asyncio.ensure_future(work)
        await asyncio.wait({task}, timeout=chance.random() * 0.1)
        task.cancel()
        await asyncio.wait({task})
        assert set(await rows(engine, "token")) == {(None,)}
        sent = Counter(received.target.removeprefix("/") for received in server.requests)
        assert [key for key, attempts in await rows(engine, "key, attempts") if sent[key] > attempts] == []

    async def delivered() -> bool:
        await one.run_once()
        return set(await rows(engine, "state")) == {("delivered",)}

    await until(delivered)


@both_drivers
async def test_an_end_whose_answer_was_lost_is_known_all_the_same(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine, database: Database
) -> None:
    async with through_a_wire(database) as (wire, wired):

        async def script(received: Received, writer: asyncio.StreamWriter) -> Answer:
            wire.lose_next_reply()
            return Answer(200)

        server.script = script
        await enqueue(webhooks, sessions, server.url())
        assert await worker(webhooks, wired, server, outage=SOON).run_once() == WebhookRun(delivered=1)
        assert await row_of(engine) == ("delivered", 1, None)


@both_drivers
@pytest.mark.parametrize("trouble", ["cut", "silence"])
async def test_a_database_that_goes_away_is_waited_for(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine, database: Database,
    trouble: str,
) -> None:  # fmt: skip
    """It goes while a request is on its way: the end is recorded when it is back, and the worker goes on."""
    async with through_a_wire(database) as (wire, wired):

        async def script(received: Received, writer: asyncio.StreamWriter) -> Answer:
            if len(server.requests) == 1:
                getattr(wire, trouble)()
                wire.restore()
            return Answer(200)

        server.script = script
        await enqueue(webhooks, sessions, server.url(), key="first")
        patience = timedelta(milliseconds=300)
        one = worker(
            webhooks,
            wired,
            server,
            outage=SOON,
            database_timeout=patience,
            poll_interval=timedelta(seconds=0.05),
        )
        stop, task = await running(one)

        async def delivered(count: int) -> bool:
            return await rows(engine) == [("delivered", 1, None)] * count

        await until(lambda: delivered(1))
        await enqueue(webhooks, sessions, server.url(), key="second")
        await until(lambda: delivered(2))
        stop.set()
        await task
        assert len(server.requests) == 2


async def test_a_worker_says_that_it_waits_for_the_database_and_when_it_last_looked(
    webhooks: Webhooks, server: Endpoint, database: Database
) -> None:
    async with through_a_wire(database) as (wire, wired):
        patience = timedelta(milliseconds=300)
        one = worker(webhooks, wired, server, outage=SOON, database_timeout=patience, poll_interval=patience)
        wire.silence()
        stop, task = await running(one)
        await until(lambda: (one.waits_for, one.last_success) == ("database", None))
        wire.restore()
        await until(lambda: one.waits_for is None and one.last_success is not None)
        stop.set()
        await task


async def test_a_missing_table_ends_the_worker(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    await execute(engine, "DROP TABLE webhooks")
    with pytest.raises(TablesMissing):
        await worker(webhooks, sessions, server).run()
    with pytest.raises(TablesMissing):
        await worker(webhooks, sessions, server).run_once()


async def test_a_worker_that_an_error_ended_can_run_again(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    """What its other attempts raised meanwhile belongs to the run that ended."""
    arrived = asyncio.Event()

    async def script(received: Received, writer: asyncio.StreamWriter) -> Answer:
        if len(server.requests) == 3:
            await execute(engine, "ALTER TABLE webhooks RENAME TO elsewhere")
            arrived.set()
        await arrived.wait()
        return Answer(200)

    server.script = script
    for key in range(3):
        await enqueue(webhooks, sessions, server.url(), key=str(key))
    one = worker(webhooks, sessions, server)
    with pytest.raises(TablesMissing):
        await one.run()
    await execute(engine, "ALTER TABLE elsewhere RENAME TO webhooks")
    stop, task = await running(one)
    await execute(engine, "UPDATE webhooks SET token = NULL, due_at = now()")

    async def delivered() -> bool:
        return await rows(engine, "state") == [("delivered",)] * 3

    await until(delivered)
    stop.set()
    await task


@pytest.mark.parametrize("culprit", ["resolver", "signer", "lookup"])
async def test_what_cancels_its_own_task_has_failed_and_nothing_else(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine, culprit: str
) -> None:
    """A timeout that leaked, for one: it is tried again later, not at once and for ever."""

    class Signer(StandardWebhooks):
        def sign(self, message: Message) -> list[tuple[str, str]]:
            if culprit == "signer":
                raise asyncio.CancelledError
            return super().sign(message)

    async def lookup(host: str, port: int) -> Sequence[str]:
        if culprit == "lookup":
            raise asyncio.CancelledError
        return ["127.0.0.1"]

    async def resolver(scope: str) -> WebhookSender:
        if culprit == "resolver":
            raise asyncio.CancelledError
        return WebhookSender(Signer(SECRET), transport=server.transport(lookup=lookup))

    await enqueue(webhooks, sessions, server.url(), signing_scope="acme")
    run = await worker(webhooks, sessions, server, resolver=resolver).run_once()
    assert run == WebhookRun(retried=1)
    assert await row_of(engine) == ("pending", 1, "CancelledError")


async def test_on_attempt_that_cancels_its_own_task_ends_nothing(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    async def on_attempt(attempt: WebhookAttempt) -> None:
        raise asyncio.CancelledError

    await enqueue(webhooks, sessions, server.url())
    one = worker(webhooks, sessions, server, on_attempt=on_attempt)
    assert await one.run_once() == WebhookRun(delivered=1)


async def test_cancelled_while_it_reports_an_attempt_the_end_is_recorded(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    reporting = asyncio.Event()

    async def on_attempt(attempt: WebhookAttempt) -> None:
        reporting.set()
        await asyncio.Event().wait()

    await enqueue(webhooks, sessions, server.url())
    working = asyncio.create_task(worker(webhooks, sessions, server, on_attempt=on_attempt).run_once())
    await reporting.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert await row_of(engine) == ("delivered", 1, None)


async def test_a_resolver_is_asked_at_every_attempt_so_credentials_rotate(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    secrets = {"acme": SECRET, "bolt": "whsec_" + "Qm9s" * 8}
    asked: list[str] = []
    transport = server.transport()

    async def resolver(scope: str) -> WebhookSender:
        asked.append(scope)
        if scope == "gone":
            raise SigningScopeUnknown(scope)
        if scope == "vault":
            raise RuntimeError("hvs.SECRETTOKEN")
        return WebhookSender(StandardWebhooks(secrets[scope]), transport=transport)

    for scope in ("acme", "bolt", "gone", "vault"):
        await enqueue(webhooks, sessions, server.url(), key=scope, signing_scope=scope)
    await enqueue(webhooks, sessions, server.url(), key="none")
    server.answer = Answer(503)
    one = worker(webhooks, sessions, server, resolver=resolver, per_endpoint=8)
    assert await one.run_once() == WebhookRun(retried=3, quarantined=2)
    secrets["acme"] = "whsec_" + "TmV3" * 8
    server.answer = Answer(200)
    await pass_time(engine, MINUTE)
    assert await one.run_once() == WebhookRun(delivered=2, retried=1)
    found = {key: (state, error) for key, state, error in await rows(engine, "key, state, last_error")}
    assert found == {
        "acme": ("delivered", None),
        "bolt": ("delivered", None),
        "gone": ("quarantined", "SigningScopeUnknown"),
        "none": ("quarantined", "SigningScopeUnknown"),
        "vault": ("pending", "RuntimeError"),
    }
    assert Counter(asked) == {"acme": 2, "bolt": 2, "gone": 1, "vault": 2}
    by_id = {str(row[0]): row[1] for row in await rows(engine, "id, key")}
    signed = [request for request in server.requests if by_id[request.headers["webhook-id"]] == "acme"]
    for request, secret in zip(signed, (SECRET, secrets["acme"]), strict=True):
        StandardWebhooksVerifier(secret).verify(request.headers, request.body)


async def test_a_fixed_sender_takes_no_signing_scope(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    await enqueue(webhooks, sessions, server.url(), signing_scope="acme")
    assert await worker(webhooks, sessions, server).run_once() == WebhookRun(quarantined=1)
    assert (await row_of(engine))[2] == "SigningScopeUnknown"
    assert server.connections == 0


async def test_a_signer_that_fails_is_tried_again_and_does_not_end_the_worker(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    class Broken:
        def sign(self, message: object) -> list[tuple[str, str]]:
            raise RuntimeError("the key is SECRET")

    await enqueue(webhooks, sessions, server.url())
    one = worker(webhooks, sessions, server, sender=WebhookSender(Broken(), transport=server.transport()))
    assert await one.run_once() == WebhookRun(retried=1)
    assert (await row_of(engine))[2] == "RuntimeError"
    assert "in sign" in caplog.text
    assert 'key is SECRET"' not in caplog.text.replace('raise RuntimeError("the key is SECRET")', "")
    assert server.requests == []


async def test_settings_that_contradict_each_other_are_refused(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    fixed = sender(server)

    async def resolver(scope: str) -> WebhookSender:
        return fixed

    def refuses(match: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            WebhookWorker(webhooks, sessions, **options)

    refuses("exactly one")
    refuses("exactly one", sender=fixed, resolver=resolver)
    refuses("must be 0:00:05 longer", sender=fixed, lease=timedelta(seconds=19.9))
    refuses("below concurrency", sender=fixed, concurrency=4, per_endpoint=4)
    refuses("below concurrency", sender=fixed, per_endpoint=0)
    for name in ("lease", "poll_interval", "database_timeout", "grace"):
        refuses(f"{name} must be positive", resolver=resolver, **{name: timedelta(0)})
    refuses("24 times shorter than the horizon", sender=fixed, lease=timedelta(hours=3, seconds=1))
    WebhookWorker(webhooks, sessions, sender=fixed, lease=timedelta(seconds=20))
    # A resolver's sender is known only when it comes.
    await enqueue(webhooks, sessions, server.url(), signing_scope="acme")
    short = WebhookWorker(webhooks, sessions, resolver=resolver, lease=timedelta(seconds=10))
    assert await short.run_once() == WebhookRun(retried=1)
    assert "must be 0:00:05 longer" in caplog.text
    assert server.connections == 0


async def test_a_row_that_does_not_open_is_quarantined_alone(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    columns = {
        "caller": "'thief'",
        "account": "'thief'",
        "type": "'thief'",
        "key": "'thief'",
        "origin": "'https://thief.example.com'",
        "url_digest": "sha256('thief')",
        "dedup_digest": "sha256('thief')",
        "sealed": "sealed || 'x'",
        "nonce": "decode('000000000000000000000000', 'hex')",
        "id": "gen_random_uuid()",
    }
    for column in columns:
        await enqueue(webhooks, sessions, server.url(f"/{column}"), key=f"moved {column}")
    for number in range(3):
        await enqueue(webhooks, sessions, server.url(f"/{number}"), key=str(number))
    for column, value in columns.items():
        await execute(engine, f"UPDATE webhooks SET {column} = {value} WHERE key = 'moved {column}'")
    run = await worker(webhooks, sessions, server, per_endpoint=31).run_once()
    assert run == WebhookRun(delivered=3, quarantined=len(columns))
    assert sorted(request.target for request in server.requests) == ["/0", "/1", "/2"]
    bad = [row for row in await rows(engine, "state, last_error") if row[0] != "delivered"]
    assert bad == [("quarantined", "SealBroken")] * len(columns)


async def test_two_rows_whose_sealed_parts_were_exchanged_are_quarantined(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    for account in ("acme", "bolt"):
        await enqueue(webhooks, sessions, server.url(f"/{account}"), account=account)
    await execute(
        engine,
        "UPDATE webhooks AS one SET sealed = other.sealed, nonce = other.nonce"
        " FROM webhooks AS other WHERE one.id <> other.id",
    )
    assert await worker(webhooks, sessions, server).run_once() == WebhookRun(quarantined=2)
    assert server.connections == 0
