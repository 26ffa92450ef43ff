"""Worker processes that are told to stop, whatever they do just then: nothing is lost, nothing hangs."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import Outbox
from tests.acceptance.worker_process import GROUP
from tests.acceptance.workers import Process, process
from tests.database import Database
from tests.outboxes import Sessions, claims, emit, rows
from tests.waiting import until

Start = Callable[..., AbstractAsyncContextManager[Process]]


@pytest.fixture
def start(database: Database, redis_url: str, stream: str) -> Start:
    """Starts a worker process, and waits until it runs."""

    @asynccontextmanager
    async def start(*options: str) -> AsyncIterator[Process]:
        command = ("-m", "tests.acceptance.worker_process", database.url, redis_url, stream)
        async with process(*command, *options) as started:
            await started.says("running Relay outbox")
            yield started

    return start


async def states(engine: AsyncEngine) -> list[Any]:
    """Of each event: its payload, whether it was published, its ended tries."""
    return await rows(
        engine, "SELECT payload, published_at IS NOT NULL, attempts FROM outbox ORDER BY position"
    )


async def pending(redis: Redis, stream: str) -> list[int]:
    """How often each pending entry was delivered."""
    found: Any = await redis.xpending_range(stream, GROUP, "-", "+", 100)
    return [entry["times_delivered"] for entry in found]


async def consumers(redis: Redis, stream: str) -> list[Any]:
    return list(await redis.xinfo_consumers(stream, GROUP))


async def waits_for_entries(redis: Redis) -> bool:
    return bool((await redis.info("clients"))["blocked_clients"])


@pytest.mark.parametrize(
    ("number", "options"), [(signal.SIGTERM, ()), (signal.SIGINT, ()), (signal.SIGTERM, ("--uvloop",))]
)
async def test_an_idle_worker_ends_with_0_at_once_and_without_a_word_too_many(
    number: signal.Signals,
    options: tuple[str, ...],
    start: Start,
    outbox: Outbox,
    sessions: Sessions,
    redis: Redis,
    stream: str,
) -> None:
    async with start(*options) as worker:
        await emit(outbox, sessions, "nothing", topic="handle")
        await worker.says("ended handle")
        await until(lambda: waits_for_entries(redis))
        assert await worker.stop(number) == 0
    services = f"Relay outbox, StreamConsumer {stream}/{GROUP}, Retention outbox"
    assert worker.lines == [
        f"oncely.worker INFO running {services}; a stop takes up to 0:00:10",
        f"oncely.streams INFO made group '{GROUP}' of stream '{stream}', which was not there",
        "begun handle nothing",
        "ended handle nothing",
        "oncely.worker INFO stopping",
        "oncely.worker INFO ended",
    ]
    assert await pending(redis, stream) == []
    assert await consumers(redis, stream) == []


async def test_what_is_being_published_is_finished_and_nothing_more_is_claimed(
    start: Start, outbox: Outbox, sessions: Sessions, engine: AsyncEngine
) -> None:
    await emit(outbox, sessions, "wait", topic="publish")
    async with start() as worker:
        await worker.says("begun publish wait")
        await emit(outbox, sessions, "nothing", topic="publish")
        worker.send(signal.SIGTERM)
        await worker.says("stopping")
        worker.go()
        assert await worker.ends() == 0, worker.output
    assert await states(engine) == [("wait", True, 0), ("nothing", False, 0)]
    assert await claims(engine) == 0


async def test_a_publisher_that_does_not_end_is_cancelled_and_its_events_given_back(
    start: Start, outbox: Outbox, sessions: Sessions, engine: AsyncEngine
) -> None:
    await emit(outbox, sessions, "swallow", topic="publish")
    async with start("--grace", "4") as worker:
        await worker.says("begun publish swallow")
        assert await worker.stop() == 0, worker.output
    assert await states(engine) == [("swallow", False, 0)]
    assert await claims(engine) == 0


@pytest.mark.parametrize("options", [(), ("--uvloop",)])
async def test_what_is_being_handled_is_finished_and_nothing_more_is_read(
    options: tuple[str, ...],
    start: Start,
    outbox: Outbox,
    sessions: Sessions,
    engine: AsyncEngine,
    redis: Redis,
    stream: str,
) -> None:
    await emit(outbox, sessions, "wait", topic="handle")
    async with start(*options) as worker:
        await worker.says("begun handle wait")
        worker.send(signal.SIGTERM)
        await worker.says("stopping")
        worker.go()
        assert await worker.ends() == 0, worker.output
    assert "ended handle wait" in worker.lines
    assert await pending(redis, stream) == []
    assert await consumers(redis, stream) == []


async def test_a_handler_that_catches_exception_is_cancelled_and_its_event_given_back(
    start: Start, outbox: Outbox, sessions: Sessions, redis: Redis, stream: str
) -> None:
    await emit(outbox, sessions, "swallow", topic="handle")
    async with start("--grace", "4") as worker:
        await worker.says("begun handle swallow")
        assert await worker.stop() == 0, worker.output
    assert "ended handle swallow" not in worker.lines
    assert await pending(redis, stream) == [0]


@pytest.mark.parametrize(
    ("does", "left"),
    [
        # Its own event stays counted, since it may have been handled; the other is given back.
        ("ignore", [1, 0]),
        ("thread", [0, 0]),
        # Nobody could give anything back: that is found when it is due again.
        ("block", [1, 1]),
    ],
)
async def test_a_handler_that_will_not_end_is_left_behind_when_the_grace_is_over(
    does: str, left: list[int], start: Start, outbox: Outbox, sessions: Sessions, redis: Redis, stream: str
) -> None:
    await emit(outbox, sessions, does, "nothing", topic="handle", key="k")
    async with start("--grace", "2.5") as worker:
        await worker.says(f"begun handle {does}")
        assert await worker.stop() == 3, worker.output
    assert "oncely: not at an end after 2.5 s" in worker.lines
    assert await pending(redis, stream) == left


@pytest.mark.parametrize(("does", "number"), [("ignore", signal.SIGTERM), ("block", signal.SIGINT)])
async def test_a_second_signal_ends_it_there_and_then(
    does: str,
    number: signal.Signals,
    start: Start,
    outbox: Outbox,
    sessions: Sessions,
    redis: Redis,
    stream: str,
) -> None:
    await emit(outbox, sessions, does, topic="handle")
    async with start("--grace", "100") as worker:
        await worker.says(f"begun handle {does}")
        worker.send(signal.SIGTERM)
        assert await worker.ends_when_it_is_told_again(number) == 128 + number, worker.output
    assert worker.lines[-1] == f"oncely: {number.name} again, so nothing more is waited for"
    assert await pending(redis, stream) == [1]


async def test_a_signal_that_comes_twice_at_once_is_one(
    start: Start, outbox: Outbox, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "wait", topic="handle")
    async with start("--grace", "100") as worker:
        await worker.says("begun handle wait")
        for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
            worker.send(number)  # it hears of both when it goes on
        await worker.says("stopping")
        worker.go()
        assert await worker.ends() == 0, worker.output


async def test_a_service_with_a_bug_ends_the_process_with_1_and_its_traceback_when_the_others_have_ended(
    start: Start, outbox: Outbox, sessions: Sessions, redis: Redis, stream: str
) -> None:
    async with start("--bug") as worker:
        await emit(outbox, sessions, "nothing", topic="handle")
        await worker.says("ended handle")
        worker.go()
        assert await worker.ends() == 1
    assert "oncely.worker CRITICAL bug has failed; the worker ends" in worker.lines
    assert worker.output.count("Traceback (most recent call last):") == 1
    assert "ZeroDivisionError: the bug" in worker.lines
    assert "ExceptionGroup" not in worker.output
    assert worker.lines[-1] == "oncely.worker INFO ended"
    assert await consumers(redis, stream) == []


async def test_after_a_bug_nobody_who_will_not_end_keeps_the_process(
    start: Start, outbox: Outbox, sessions: Sessions
) -> None:
    await emit(outbox, sessions, "ignore", topic="handle")
    async with start("--bug", "--grace", "2") as worker:
        await worker.says("begun handle ignore")
        worker.go()
        assert await worker.ends() == 1, worker.output
    assert "ZeroDivisionError: the bug" in worker.lines


async def test_a_handler_that_exits_ends_the_process_with_its_code_and_that_was_its_attempt(
    start: Start, outbox: Outbox, sessions: Sessions, engine: AsyncEngine, redis: Redis, stream: str
) -> None:
    async with start() as worker:
        await emit(outbox, sessions, "swallow", topic="handle")
        await worker.says("begun handle swallow")
        await emit(outbox, sessions, "leave", topic="handle")
        assert await worker.ends() == 5, worker.output
    assert await claims(engine) == 0
    assert await pending(redis, stream) == [0, 1]
