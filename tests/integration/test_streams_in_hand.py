"""What becomes of the entries that a worker has in hand while others, or the user's own code, interfere."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from oncely.event import Event
from oncely.streams import StreamConsumer, stream_publisher
from oncely.testing import EmbeddedValkey
from tests.streams import Recorder, consumer_of, deliver, events, ids, pending, until


async def left_under_its_name(redis: Redis, stream: str, *payloads: str) -> list[bytes]:
    """Their ids: they were delivered to a worker "back" that has died, and run one by one when it is back."""
    await stream_publisher(redis, stream)(events(*payloads))
    await deliver(redis, stream, "back")
    return await ids(redis, stream)


async def tells_what_is_gone(redis: Redis) -> bool:
    """Whether XCLAIM drops what has left the stream. Before Redis 7 it stays pending, to be lost when due."""
    server = await redis.info("server")
    return int(server["redis_version"].partition(".")[0]) >= 7


@pytest.mark.parametrize("noticed", [False, True])
async def test_an_entry_that_was_stolen_before_its_turn_is_left_to_the_thief(
    redis: Redis, stream: str, caplog: pytest.LogCaptureFixture, noticed: bool
) -> None:
    handler = Recorder()
    _, second = await left_under_its_name(redis, stream, "a", "b")
    patience = 300 if noticed else 60_000
    consumer = consumer_of(redis, stream, handler, consumer="back", retry_after_ms=patience)

    @consumer.subscribe("*")
    async def robbed(event: Event) -> None:
        await redis.xclaim(stream, "workers", "thief", 0, [second])
        if noticed:
            await until(lambda: is_noticed(caplog))

    assert await consumer.run_once() == 1
    assert handler.results == [("a", "ok")]
    assert await pending(consumer, redis) == [("thief", 2)]


async def is_noticed(caplog: pytest.LogCaptureFixture) -> bool:
    return any("was stolen" in message for message in caplog.messages)


async def test_an_entry_that_was_stolen_is_not_given_back(
    redis: Redis, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, second = await left_under_its_name(redis, stream, "a", "b")
    consumer = StreamConsumer(redis, stream=stream, consumer="back", retry_after_ms=300)

    @consumer.subscribe("*")
    async def robbed(event: Event) -> None:
        await redis.xclaim(stream, "workers", "thief", 0, [second])
        await asyncio.Event().wait()

    working = asyncio.create_task(consumer.run_once())
    await until(lambda: is_noticed(caplog))
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert await pending(consumer, redis) == [("back", 1), ("thief", 2)]


@pytest.mark.parametrize("fails", [False, True])
async def test_an_entry_that_was_trimmed_before_its_turn_is_in_hand_still_and_handled(
    redis: Redis, stream: str, fails: bool
) -> None:
    handler = Recorder(b=9) if fails else Recorder()
    _, second = await left_under_its_name(redis, stream, "a", "b")
    consumer = StreamConsumer(redis, stream=stream, consumer="back", on_result=handler.on_result)

    @consumer.subscribe("*")
    async def trimming(event: Event) -> None:
        await redis.xdel(stream, second)

    consumer.subscribe("*", handler)
    await consumer.run_once()
    assert handler.attempts == [("a", 2), ("b", 2)]
    told = await tells_what_is_gone(redis)
    assert handler.results == [("a", "ok"), ("b", "ok" if not fails else "lost" if told else "retry")]
    assert await pending(consumer, redis) == ([("back", 2)] if fails and not told else [])


async def test_an_entry_that_was_trimmed_before_it_is_given_back_is_lost_and_reported(
    redis: Redis, stream: str
) -> None:
    handler = Recorder()
    consumer = StreamConsumer(redis, stream=stream, concurrency=1, on_result=handler.on_result)
    began = asyncio.Event()

    @consumer.subscribe("*")
    async def slow(event: Event) -> None:
        began.set()
        await asyncio.Event().wait()

    await stream_publisher(redis, stream)(events("a", "b"))
    working = asyncio.create_task(consumer.run_once())
    await began.wait()
    await redis.xtrim(stream, 0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    told = await tells_what_is_gone(redis)
    assert handler.results == ([("b", "lost"), ("a", "lost")] if told else [])
    assert len(await pending(consumer, redis)) == (0 if told else 2)


async def test_what_waits_behind_a_failed_entry_and_was_trimmed_is_lost_and_reported(
    redis: Redis, stream: str
) -> None:
    handler = Recorder(a1=1)
    consumer = consumer_of(redis, stream, handler, retry_after_ms=60_000)
    await stream_publisher(redis, stream)(events("a1", "a2", key="a"))
    await consumer.run_once()
    failed, follower = await ids(redis, stream)
    await redis.xdel(stream, follower)
    await redis.xack(stream, "workers", failed)
    await consumer.run_once()
    assert handler.results == [("a1", "retry"), ("a2", "lost" if await tells_what_is_gone(redis) else "ok")]
    assert await pending(consumer, redis) == []


async def test_what_waits_behind_a_failed_entry_at_a_stop_and_was_trimmed_is_lost_and_reported(
    redis: Redis, stream: str
) -> None:
    handler, stop = Recorder(a1=1), asyncio.Event()
    consumer = consumer_of(redis, stream, handler, retry_after_ms=60_000)
    await stream_publisher(redis, stream)(events("a1", "a2", key="a"))
    await consumer.run_once()
    _, follower = await ids(redis, stream)
    await redis.xdel(stream, follower)
    stop.set()
    await consumer.run(stop)
    told = await tells_what_is_gone(redis)
    assert handler.results == [("a1", "retry"), *([("a2", "lost")] if told else [])]
    assert len(await pending(consumer, redis)) == (1 if told else 2)


async def test_what_was_taken_over_is_not_begun_while_redis_is_away(own_valkey: EmbeddedValkey) -> None:
    """Its delivery is counted first, or one that ends the process would do so for ever."""
    async with Redis.from_url(own_valkey.url, socket_timeout=0.05, retry=Retry(NoBackoff(), 0)) as redis:
        await left_under_its_name(redis, "orders", "a", "b")
        consumer = StreamConsumer(redis, stream="orders", consumer="back")
        seen: list[tuple[str, int]] = []

        @consumer.subscribe("*")
        async def handle(event: Event) -> None:
            seen.append((event.payload, event.attempt))
            if len(seen) == 1:
                os.kill(own_valkey.pid or 0, signal.SIGSTOP)

        with pytest.raises((RedisConnectionError, RedisTimeoutError)):
            await consumer.run_once()
        os.kill(own_valkey.pid or 0, signal.SIGCONT)
        assert seen == [("a", 2)]

        async def both() -> bool:
            with suppress(RedisConnectionError, RedisTimeoutError):
                await consumer.run_once()
            return len(seen) == 2

        await until(both)
        assert seen[1][0] == "b"


async def test_a_stream_that_is_replaced_while_a_handler_works_ends_it_with_a_clear_error(
    redis: Redis, stream: str
) -> None:
    consumer, cancelled = StreamConsumer(redis, stream=stream), []

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        if event.payload == "quick":
            await redis.set(stream, "no stream")
            return
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(event.payload)

    await stream_publisher(redis, stream)(events("slow", "quick"))
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await asyncio.wait_for(consumer.run_once(), 10)
    assert cancelled == ["slow"]


class Ended(BaseException):
    """As a framework's own, which no `except Exception` sees."""


async def test_what_no_except_sees_ends_the_consumer_and_gives_everything_back(
    redis: Redis, stream: str
) -> None:
    consumer = StreamConsumer(redis, stream=stream, concurrency=1)

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        raise Ended

    await stream_publisher(redis, stream)(events("a", "b"))
    with pytest.raises(Ended):
        await consumer.run_once()
    assert [count for _, count in await pending(consumer, redis)] == [0, 0]


async def test_a_report_that_swallows_the_cancellation_does_not_keep_the_consumer_from_ending(
    redis: Redis, stream: str
) -> None:
    reporting = asyncio.Event()

    async def swallow(event: Event | None, result: str, seconds: float, error: BaseException | None) -> None:
        reporting.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    consumer = StreamConsumer(redis, stream=stream, on_result=swallow)

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        if event.payload == "slow":
            await asyncio.Event().wait()

    await stream_publisher(redis, stream)(events("slow", "quick"))
    working = asyncio.create_task(consumer.run_once())
    await reporting.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(working, 10)
    assert [count for _, count in await pending(consumer, redis)] == [0]


async def test_what_comes_for_a_key_that_is_being_handled_lines_up_behind_it(
    redis: Redis, stream: str
) -> None:
    handler, go, stop = Recorder(), asyncio.Event(), asyncio.Event()
    consumer = StreamConsumer(redis, stream=stream, concurrency=2)
    running: list[object] = []

    @consumer.subscribe("*")
    async def slow(event: Event) -> None:
        running.append(event.payload)
        if event.payload == "a1":
            await go.wait()

    consumer.subscribe("*", handler)
    publish = stream_publisher(redis, stream)
    await publish(events("a1", key="a"))
    working = asyncio.create_task(consumer.run(stop))
    await until(lambda: are(running, ["a1"]))
    await publish(events("a2", key="a"))
    await until(lambda: is_read(redis, stream, 2))
    await publish(events("b", key="b"))
    await until(lambda: are(running, ["a1", "b"]))
    go.set()
    await until(lambda: are(running, ["a1", "b", "a2"]))
    stop.set()
    await working
    assert handler.handled == ["b", "a1", "a2"]


async def are(seen: list[object], expected: list[object]) -> bool:
    return seen == expected


async def is_read(redis: Redis, stream: str, count: int) -> bool:
    [group] = await redis.xinfo_groups(stream)
    return bool(group["pending"] == count)
