"""A worker runs services together, and ends when it is told to or when one of them fails."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import MetaData
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from oncely import Event, IdempotencyKeys, Outbox, Relay, Retention, TablesMissing, Worker
from oncely.streams import StreamConsumer
from oncely.telemetry import Gauges
from oncely.webhooks import Keyring, Webhooks, WebhookWorker
from oncely.worker import Service, ServiceHealth

SHORT = timedelta(milliseconds=50)


class Idle:
    """A service that waits for its stop. `begun` once it runs; `ended` says how it went."""

    waits_for: str | None = None
    last_success: datetime | None = None

    def __init__(self, name: str = "idle") -> None:
        self.name = name
        self.begun = asyncio.Event()
        self.ended = ""

    async def run(self, stop: asyncio.Event | None = None) -> None:
        assert stop is not None
        self.begun.set()
        try:
            await self.work(stop)
            self.ended = "in order"
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise

    async def work(self, stop: asyncio.Event) -> None:
        await stop.wait()


class Doing(Idle):
    """A service that does something else."""

    def __init__(self, name: str, does: Callable[[], Awaitable[object]]) -> None:
        super().__init__(name)
        self.does = does

    async def work(self, stop: asyncio.Event) -> None:
        await self.does()


class Bug(Exception):
    """What nobody expects."""


async def for_ever() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise Bug


async def nothing() -> None: ...


async def cancel_itself() -> None:
    raise asyncio.CancelledError


async def fail_in_groups() -> None:
    async with asyncio.TaskGroup() as outer:

        async def inner() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())

        outer.create_task(inner())


async def test_a_stop_ends_every_service_in_order() -> None:
    stop, services = asyncio.Event(), (Idle("a"), Idle("b"))
    running = asyncio.create_task(Worker(*services).run(stop))
    for service in services:
        await service.begun.wait()
    stop.set()
    await running
    assert [service.ended for service in services] == ["in order", "in order"]


async def test_a_worker_can_run_again() -> None:
    worker, stop = Worker(Idle()), asyncio.Event()
    stop.set()
    await worker.run(stop)
    await worker.run(stop)


async def test_it_runs_once_at_a_time() -> None:
    service, stop = Idle(), asyncio.Event()
    worker = Worker(service)
    running = asyncio.create_task(worker.run(stop))
    await service.begun.wait()
    with pytest.raises(RuntimeError, match="runs already"):
        await worker.run()
    stop.set()
    await running
    assert service.ended == "in order"


async def test_it_does_not_begin_again_before_it_has_closed() -> None:
    closing, closed, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def close() -> None:
        closing.set()
        await closed.wait()

    worker = Worker(Idle(), close=[close])
    stop.set()
    running = asyncio.create_task(worker.run(stop))
    await closing.wait()
    with pytest.raises(RuntimeError, match="runs already"):
        await worker.run(stop)
    closed.set()
    await running


async def test_a_service_may_see_the_callers_stop_before_the_worker_does() -> None:
    stop = asyncio.Event()
    service = Doing("its own", stop.wait)
    running = asyncio.create_task(Worker(service).run(stop))
    await service.begun.wait()
    stop.set()
    await running
    assert service.ended == "in order"


async def test_cancelling_it_cancels_every_service_and_closes() -> None:
    services, closed = (Idle("a"), Idle("b")), []

    async def close() -> None:
        await asyncio.sleep(0)
        closed.append([service.ended for service in services])

    running = asyncio.create_task(Worker(*services, close=[close]).run())
    for service in services:
        await service.begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert closed == [["cancelled", "cancelled"]]


@pytest.mark.parametrize(
    ("does", "error", "words"),
    [
        (fail, Bug, ""),
        (fail_in_groups, Bug, ""),
        (nothing, RuntimeError, "broken has returned, and nobody had stopped it"),
        (cancel_itself, RuntimeError, "broken has cancelled itself"),
    ],
)
async def test_a_service_that_ends_by_itself_stops_the_others_and_why_is_raised(
    does: Callable[[], Awaitable[object]],
    error: type[Exception],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = Idle()
    with pytest.raises(error) as raised:
        await Worker(other, Doing("broken", does)).run()
    assert str(raised.value) == words
    assert other.ended == "in order"
    [record] = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert record.message == "broken has failed; the worker ends"
    assert record.exc_info is not None
    assert record.exc_info[1] is raised.value


class RefusedConnection(Exception):
    """As a driver has it: with PostgreSQL's code."""

    def __init__(self, sqlstate: str, message: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            TablesMissing("outbox"),
            str(TablesMissing("outbox")),
        ),
        (
            DBAPIError(None, None, RefusedConnection("28P01", "password authentication failed")),
            "password authentication failed",
        ),
        (
            DBAPIError(None, None, RefusedConnection("3D000", 'database "shop" does not exist')),
            'database "shop" does not exist',
        ),
    ],
)
async def test_a_setting_that_is_wrong_is_one_line_of_the_log(
    error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse() -> None:
        raise error

    with pytest.raises(type(error)):
        await Worker(Doing("relay", refuse)).run()
    [record] = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert (record.message, record.exc_info) == (f"relay has failed: {said}; the worker ends", None)


async def test_the_callers_event_is_not_set_when_a_service_fails() -> None:
    stop = asyncio.Event()
    with pytest.raises(Bug):
        await Worker(Doing("broken", fail)).run(stop)
    assert not stop.is_set()


async def test_when_several_services_fail_all_their_errors_are_raised() -> None:
    stop = asyncio.Event()

    class FailsAtItsEnd(Idle):
        async def work(self, stop: asyncio.Event) -> None:
            await stop.wait()
            raise Bug

    running = asyncio.create_task(Worker(FailsAtItsEnd("a"), FailsAtItsEnd("b")).run(stop))
    stop.set()
    with pytest.raises(ExceptionGroup) as raised:
        await running
    assert [type(error) for error in raised.value.exceptions] == [Bug, Bug]


async def test_a_service_that_takes_too_long_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    slow, stop = Doing("slow", for_ever), asyncio.Event()
    stop.set()
    await Worker(slow, Idle(), grace=SHORT).run(stop)
    assert slow.ended == "cancelled"
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        "slow has not ended in its time; it is cancelled"
    ]


async def test_closing_is_done_in_order_at_the_end_and_survives_what_fails_or_hangs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service, stop, closed = Idle(), asyncio.Event(), []

    async def first() -> None:
        closed.append(f"first, when the service had ended {service.ended}")

    async def last() -> None:
        closed.append("last")

    stop.set()
    await Worker(service, close=[first, fail, for_ever, last], grace=SHORT).run(stop)
    assert closed == ["first, when the service had ended in order", "last"]
    assert [record.message for record in caplog.records] == [
        f"could not close {fail!r}: Bug()",
        f"could not close {for_ever!r}: TimeoutError('no answer within 0:00:00.001250')",
    ]


async def test_what_is_closed_need_not_be_async(caplog: pytest.LogCaptureFixture) -> None:
    stop, closed = asyncio.Event(), []
    stop.set()
    await Worker(Idle(), close=[lambda: closed.append("closed")]).run(stop)
    assert (closed, caplog.records) == (["closed"], [])


async def test_health_says_who_lives_what_was_last_done_and_what_is_waited_for() -> None:
    noon = datetime(2026, 1, 2, 12, tzinfo=UTC)
    well, waiting, stop = Idle("well"), Idle("waiting"), asyncio.Event()
    worker = Worker(well, waiting)
    assert [(each.alive, each.healthy) for each in worker.health()] == [(False, False), (False, False)]
    running = asyncio.create_task(worker.run(stop))
    await waiting.begun.wait()
    well.last_success = noon
    waiting.waits_for = "broker"
    assert worker.health() == (
        ServiceHealth("well", alive=True, last_success=noon, waits_for=None),
        ServiceHealth("waiting", alive=True, last_success=None, waits_for="broker"),
    )
    assert json.loads(json.dumps([each.to_json() for each in worker.health()])) == [
        {
            "name": "well",
            "alive": True,
            "healthy": True,
            "last_success": "2026-01-02T12:00:00+00:00",
            "waits_for": None,
        },
        {"name": "waiting", "alive": True, "healthy": False, "last_success": None, "waits_for": "broker"},
    ]
    stop.set()
    await running
    assert [each.alive for each in worker.health()] == [False, False]


async def test_a_service_that_has_failed_is_not_alive_while_the_others_end() -> None:
    stuck, broken = Idle("stuck"), Doing("broken", fail)
    seen: list[ServiceHealth] = []

    async def look() -> None:
        await asyncio.sleep(0)
        seen.extend(worker.health())

    class Looks(Idle):
        async def work(self, stop: asyncio.Event) -> None:
            await stop.wait()
            await look()

    worker = Worker(Looks("looks"), broken, stuck)
    with pytest.raises(Bug):
        await worker.run()
    assert {each.name: each.alive for each in seen} == {"looks": True, "broken": False, "stuck": False}


def test_a_worker_without_services_is_refused() -> None:
    with pytest.raises(ValueError, match="without services"):
        Worker()


def test_a_service_that_is_given_twice_is_refused() -> None:
    service = Idle("one")
    with pytest.raises(ValueError, match="one is given twice"):
        Worker(service, Idle("other"), service)


def test_a_grace_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="grace"):
        Worker(Idle(), grace=timedelta(0))


@pytest.mark.parametrize("what", [[Idle("a")], Idle("a").run, None, "relay", Relay])
def test_what_is_no_service_is_refused(what: Any) -> None:
    with pytest.raises(TypeError, match="a service has"):
        Worker(what)


def every_service() -> list[Service]:
    metadata, sessions, redis = MetaData(), async_sessionmaker[AsyncSession](), Redis()
    outbox, keys = Outbox(metadata, schema="shop"), IdempotencyKeys(metadata)
    webhooks = Webhooks(metadata, keyring=Keyring({"one": bytes(32)}, write="one"))

    async def publish(_: object) -> None: ...

    async def resolve(_: str) -> Any: ...

    return [
        Relay(outbox, sessions, publish),
        StreamConsumer(redis, stream="orders", group="mailer"),
        WebhookWorker(webhooks, sessions, resolver=resolve),
        Retention(sessions, {outbox: timedelta(days=1), keys: timedelta(days=1)}),
        Relay(outbox, sessions, publish),
    ]


def test_services_have_names_of_their_own() -> None:
    services = every_service()
    assert [each.name for each in Worker(*services).health()] == [
        "Relay shop.outbox",
        "StreamConsumer orders/mailer",
        "WebhookWorker webhooks",
        "Retention shop.outbox, idempotency_keys",
        "Relay shop.outbox 2",
    ]
    assert [(each.waits_for, each.last_success) for each in services] == [(None, None)] * 5


async def handle(event: Event) -> None: ...


@pytest.mark.parametrize(
    "service", [*every_service()[:4], Gauges(print, async_sessionmaker(), Outbox(MetaData()))]
)
async def test_each_service_runs_once_at_a_time(service: Service) -> None:
    if isinstance(service, StreamConsumer):
        service.subscribe("order.paid")(handle)
    running = asyncio.create_task(service.run())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="runs already"):
        await service.run()
    running.cancel()
    await asyncio.wait([running])
