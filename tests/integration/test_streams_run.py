"""A consumer that runs until it is told to stop: waiting, outages, shutdown, slow handlers, lost entries."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from oncely.backoff import Backoff
from oncely.errors import PublisherUnavailable
from oncely.event import Event, uuid7
from oncely.streams import StreamConsumer, stream_publisher
from oncely.streams.client import execute
from oncely.testing import EmbeddedValkey
from tests.streams import Recorder, deliver, events, ids, pending, until
from tests.wire import Wire

QUICK = Backoff(first=timedelta(milliseconds=10), maximum=timedelta(milliseconds=50))


@pytest.fixture(params=["valkey", "redis_6_2"])
def redis_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param).url)


@asynccontextmanager
async def running(consumer: StreamConsumer) -> AsyncIterator[asyncio.Event]:
    """The consumer runs inside; it is stopped at the end, and must end."""
    stop = asyncio.Event()
    task = asyncio.create_task(consumer.run(stop))
    try:
        yield stop
    finally:
        stop.set()
        await asyncio.wait_for(task, 10)


async def names(redis: Redis, stream: str) -> list[str]:
    return [found["name"].decode() for found in await redis.xinfo_consumers(stream, "workers")]


async def test_it_handles_what_comes_and_takes_over_what_is_due(redis: Redis, stream: str) -> None:
    handler = Recorder(b=2)
    consumer = StreamConsumer(redis, stream=stream, retry_after_ms=20, on_result=handler.on_result)
    consumer.subscribe("*", handler)
    publish = stream_publisher(redis, stream)
    async with running(consumer):
        for batch in ("a", "b", "c"):
            await publish(events(batch))
        await until(lambda: has(handler, 3))
    assert sorted(handler.handled) == ["a", "b", "c"]
    assert [one for one in handler.attempts if one[0] == "b"] == [("b", 1), ("b", 2), ("b", 3)]
    assert await pending(consumer, redis) == []


async def test_an_idle_consumer_waits_and_does_not_spin(redis: Redis, stream: str) -> None:
    consumer = StreamConsumer(redis, stream=stream)
    consumer.subscribe("*", Recorder())
    before = await reads(redis)
    async with running(consumer):
        began = time.monotonic()
        await until(lambda: has_read(redis, before + 6))
        assert time.monotonic() - began >= 0.5


async def test_a_wait_that_is_longer_than_the_socket_timeout_is_no_failure(
    redis_url: str, stream: str
) -> None:
    async with Redis.from_url(redis_url, socket_timeout=0.2) as client:
        handler = Recorder()
        consumer = StreamConsumer(client, stream=stream)
        consumer.subscribe("*", handler)
        began = time.monotonic()
        assert await consumer.run_once(block_ms=700) == 0
        assert 0.7 <= time.monotonic() - began < 2
        async with Redis.from_url(redis_url) as other:
            waits_since = await reads(other)
            waiting = asyncio.create_task(consumer.run_once(block_ms=30_000))
            await until(lambda: has_read(other, waits_since + 4))
        await stream_publisher(client, stream)(events("a"))
        assert await waiting == 1


async def test_waiting_consumers_leave_the_pool_to_others(redis_url: str, stream: str) -> None:
    async with Redis.from_url(redis_url, max_connections=2) as client:
        handler = Recorder()
        consumers = [StreamConsumer(client, stream=stream) for _ in range(3)]
        for consumer in consumers:
            consumer.subscribe("*", handler)

        async def handle_ten(consumer: StreamConsumer) -> None:
            while len(handler.handled) < 10:
                await consumer.run_once(block_ms=400)

        waiting = [asyncio.create_task(handle_ten(consumer)) for consumer in consumers]
        async with Redis.from_url(redis_url) as other:
            await until(lambda: blocked(other, 3))
        publish = stream_publisher(client, stream)
        await asyncio.gather(*(publish(events(number)) for number in range(10)))
        await asyncio.wait_for(asyncio.gather(*waiting), 10)
        assert sorted(handler.handled) == list(range(10))


async def test_a_flush_is_survived_and_what_comes_after_it_is_handled(
    own_valkey: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    async with Redis.from_url(own_valkey.url) as redis:
        handler = Recorder()
        consumer = StreamConsumer(redis, stream="orders", retry_after_ms=50)
        consumer.subscribe("*", handler)
        publish = stream_publisher(redis, "orders")
        with caplog.at_level(logging.WARNING, "oncely.streams"):
            async with running(consumer):
                for number in range(5):
                    await publish(events(number))
                    await until(lambda wanted=number + 1: has(handler, wanted))  # type: ignore[misc]
                    await redis.flushall()
            await publish(events(5))
            await redis.flushall()
            await publish(events(6))
            assert await consumer.run_once() == 1
        assert handler.handled == [0, 1, 2, 3, 4, 6]
        assert len(caplog.records) <= 10


async def test_an_outage_is_waited_out(own_valkey: EmbeddedValkey) -> None:
    async with Redis.from_url(own_valkey.url, retry=Retry(NoBackoff(), 0)) as redis:
        handler = Recorder()
        consumer = StreamConsumer(redis, stream="orders", outage=QUICK)
        consumer.subscribe("*", handler)
        async with running(consumer):
            await stream_publisher(redis, "orders")(events("a"))
            await until(lambda: has(handler, 1))
            own_valkey.kill()
            await until(lambda: waits(consumer))
            own_valkey.start()
            await stream_publisher(redis, "orders")(events("b"))
            await until(lambda: has(handler, 2))
        assert handler.handled == ["a", "b"]


@pytest.mark.parametrize(
    ("refuse", "accept"),
    [
        ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
        ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
    ],
)
async def test_a_server_that_takes_no_writes_is_waited_out(
    own_server: EmbeddedValkey, refuse: str, accept: str
) -> None:
    """Also when it is a script that it refuses to let write, which old servers word differently."""
    async with Redis.from_url(own_server.url) as redis:
        handler = Recorder()
        consumer = StreamConsumer(redis, stream="orders", retry_after_ms=20, outage=QUICK)
        consumer.subscribe("*", handler)
        await stream_publisher(redis, "orders")(events("a", "b"))
        await deliver(redis, "orders", "dead")
        await redis.execute_command(*refuse.split())  # type: ignore[no-untyped-call]  # redis-py's
        async with running(consumer):
            await until(lambda: waits(consumer))
            await redis.execute_command(*accept.split())  # type: ignore[no-untyped-call]  # redis-py's
            await until(lambda: has(handler, 2))
        assert handler.attempts == [("a", 2), ("b", 2)]


async def test_a_failover_that_moves_the_servers_name_is_followed(
    own_server: EmbeddedValkey, own_valkey: EmbeddedValkey
) -> None:
    """Connections to the old master stay open: it answers on them that it is a replica now.

    The publisher has a client of its own, or the consumer might be told first, and lead it away.
    """
    async with (
        Wire.to_socket(own_server.socket_path) as wire,
        Redis.from_url(wire.url) as redis,
        Redis.from_url(wire.url) as publishing,
    ):
        handler = Recorder()
        consumer = StreamConsumer(redis, stream="orders", outage=QUICK)
        consumer.subscribe("*", handler)
        publish = stream_publisher(publishing, "orders")
        await publish(events("a"))
        async with running(consumer), Redis.from_url(own_server.url) as admin:
            await until(lambda: has(handler, 1))
            await admin.execute_command("REPLICAOF", "127.0.0.1", "1")  # type: ignore[no-untyped-call]  # redis-py's
            wire.lead_to(own_valkey.socket_path)
            with pytest.raises(PublisherUnavailable, match="READONLY"):
                await publish(events("b"))
            await publish(events("c"))
            await until(lambda: has(handler, 2))
        assert handler.handled == ["a", "c"]


async def test_a_failover_is_followed_by_a_consumer_whose_client_nobody_publishes_with(
    own_server: EmbeddedValkey, own_valkey: EmbeddedValkey
) -> None:
    async with Wire.to_socket(own_server.socket_path) as wire, Redis.from_url(wire.url) as redis:
        handler = Recorder()
        consumer = StreamConsumer(redis, stream="orders", outage=QUICK)
        consumer.subscribe("*", handler)
        async with Redis.from_url(own_server.url) as old, Redis.from_url(own_valkey.url) as new:
            await stream_publisher(old, "orders")(events("a"))
            async with running(consumer):
                await until(lambda: has(handler, 1))
                await old.execute_command("REPLICAOF", "127.0.0.1", "1")  # type: ignore[no-untyped-call]  # redis-py's
                wire.lead_to(own_valkey.socket_path)
                await stream_publisher(new, "orders")(events("b"))
                await until(lambda: has(handler, 2))
        assert handler.handled == ["a", "b"]


async def test_acknowledgements_outlast_an_outage(own_valkey: EmbeddedValkey) -> None:
    """A handler that ended while Redis was away has ended: its event is acknowledged later."""
    async with Redis.from_url(own_valkey.url, socket_timeout=0.1, retry=Retry(NoBackoff(), 0)) as redis:
        handler = Recorder()
        consumer = StreamConsumer(redis, stream="orders", retry_after_ms=60_000, on_result=handler.on_result)

        async def freeze(event: Event) -> None:
            os.kill(own_valkey.pid or 0, signal.SIGSTOP)

        consumer.subscribe("*", handler)
        consumer.subscribe("*", freeze)
        await stream_publisher(redis, "orders")(events("a"))
        with pytest.raises(RedisTimeoutError):
            await consumer.run_once()
        assert handler.results == []
        os.kill(own_valkey.pid or 0, signal.SIGCONT)
        assert await consumer.run_once() == 1
        assert handler.results == [("a", "ok")]
        assert handler.attempts == [("a", 1)]


async def test_a_server_that_falls_silent_while_it_is_waited_on_is_an_outage(
    own_valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncely.streams.reader._LATE", 0.1)
    async with (
        Wire.to_socket(own_valkey.socket_path) as wire,
        Redis.from_url(wire.url, socket_timeout=0.2, retry=Retry(NoBackoff(), 0)) as redis,
    ):
        consumer = StreamConsumer(redis, stream="orders")
        consumer.subscribe("*", Recorder())
        async with Redis.from_url(own_valkey.url) as admin:
            waiting = asyncio.create_task(consumer.run_once(block_ms=30_000))
            await until(lambda: blocked(admin, 1))
        wire.silence()
        with pytest.raises(RedisTimeoutError, match="no answer to a read of "):
            await asyncio.wait_for(waiting, 10)
        wire.cut()


async def test_a_pool_of_one_connection_is_used_in_turn(redis_url: str) -> None:
    async with Redis.from_url(redis_url, max_connections=1) as client:
        assert await asyncio.gather(*(execute(client, "ECHO", str(n)) for n in range(50))) == [
            str(n).encode() for n in range(50)
        ]


async def test_workers_that_come_together_make_one_group(redis: Redis, stream: str) -> None:
    handler = Recorder()
    await stream_publisher(redis, stream)(events("a", "b", "c"))
    consumers = [StreamConsumer(redis, stream=stream) for _ in range(4)]
    for consumer in consumers:
        consumer.subscribe("*", handler)
    assert sum(await asyncio.gather(*(consumer.run_once() for consumer in consumers))) == 3
    assert sorted(handler.handled) == ["a", "b", "c"]


async def test_what_an_outage_kept_from_being_handled_is_charged_no_attempt(
    own_valkey: EmbeddedValkey,
) -> None:
    async with Redis.from_url(own_valkey.url, socket_timeout=0.05, retry=Retry(NoBackoff(), 0)) as redis:
        seen: list[tuple[str, int]] = []
        consumer = StreamConsumer(redis, stream="orders", retry_after_ms=90, concurrency=1)

        @consumer.subscribe("*")
        async def handle(event: Event) -> None:
            seen.append((event.payload, event.attempt))
            if len(seen) == 1:
                os.kill(own_valkey.pid or 0, signal.SIGSTOP)
                await asyncio.sleep(0.3)  # the batch cannot renew its entries meanwhile

        await stream_publisher(redis, "orders")(events("a", "b", "c"))
        with pytest.raises((RedisConnectionError, RedisTimeoutError)):
            await consumer.run_once()
        assert seen == [("a", 1)]
        os.kill(own_valkey.pid or 0, signal.SIGCONT)
        await until(lambda: handle_all(consumer, redis))
        assert seen == [("a", 1), ("b", 1), ("c", 1)]


async def test_slow_retries_do_not_keep_what_is_new_waiting(
    redis: Redis, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncely.streams.worker._ALONE", 0.1)
    await stream_publisher(redis, stream)(events(*range(30)))
    await deliver(redis, stream, "dead")
    handler = Recorder()
    consumer = StreamConsumer(redis, stream=stream, retry_after_ms=20)

    @consumer.subscribe("*")
    async def wait(event: Event) -> None:
        if event.payload != "new":
            await asyncio.sleep(0.03)

    consumer.subscribe("*", handler)
    async with running(consumer):
        await until(lambda: has(handler, 1))
        await stream_publisher(redis, stream)(events("new"))
        await until(lambda: has_handled(handler, "new"))
        assert 1 < len(handler.handled) < 15
    assert all(count <= 2 for _, count in await pending(consumer, redis))


async def test_a_key_that_holds_no_stream_ends_it_with_a_clear_error(redis: Redis, stream: str) -> None:
    await redis.set(stream, "text")
    consumer = StreamConsumer(redis, stream=stream)
    consumer.subscribe("*", Recorder())
    with pytest.raises(ResponseError, match="WRONGTYPE") as raised:
        await consumer.run()
    assert stream in raised.value.__notes__[0]


async def test_a_stop_lets_running_handlers_end_and_gives_the_rest_back(redis: Redis, stream: str) -> None:
    stop, go = asyncio.Event(), asyncio.Event()
    begun: list[int] = []
    consumer = StreamConsumer(redis, stream=stream, concurrency=2, retry_after_ms=60_000)

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        begun.append(event.payload)
        if len(begun) == 2:
            stop.set()
        await go.wait()

    await stream_publisher(redis, stream)(events(*range(5)))
    run = asyncio.create_task(consumer.run(stop))
    await stop.wait()
    await asyncio.sleep(0)
    go.set()
    await run
    assert begun == [0, 1]
    assert await pending(consumer, redis) == [(consumer.consumer, 0)] * 3
    handler = Recorder()
    other = StreamConsumer(redis, stream=stream, retry_after_ms=60_000)
    other.subscribe("*", handler)
    assert await other.run_once() == 3
    assert handler.attempts == [(2, 1), (3, 1), (4, 1)]


async def test_a_handler_that_outlives_the_grace_is_cancelled_and_its_event_given_back(
    redis: Redis, stream: str
) -> None:
    stop = asyncio.Event()
    consumer = StreamConsumer(redis, stream=stream, retry_after_ms=60_000, grace=timedelta(milliseconds=20))
    begun: list[str] = []
    cancelled: list[str] = []

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        begun.append(event.payload)
        if len(begun) == 2:
            stop.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(event.payload)
            raise

    await stream_publisher(redis, stream)([*events("a1", "a2", key="a"), *events("b")])
    await consumer.run(stop)
    assert sorted(cancelled) == ["a1", "b"]
    assert await pending(consumer, redis) == [(consumer.consumer, 0)] * 3
    handler = Recorder()
    other = StreamConsumer(redis, stream=stream, retry_after_ms=60_000)
    other.subscribe("*", handler)
    assert await other.run_once() == 3
    assert sorted(handler.attempts) == [("a1", 1), ("a2", 1), ("b", 1)]


async def test_cancelling_gives_back_as_well(redis: Redis, stream: str) -> None:
    started = asyncio.Event()
    consumer = StreamConsumer(redis, stream=stream, retry_after_ms=60_000)

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        started.set()
        await asyncio.Event().wait()

    await stream_publisher(redis, stream)(events("a", "b"))
    run = asyncio.create_task(consumer.run())
    await started.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert await pending(consumer, redis) == [(consumer.consumer, 0)] * 2


async def test_a_cancelled_wait_loses_nothing(redis: Redis, stream: str) -> None:
    """Cancelled at any moment of a wait, no entry is left with an attempt that nobody made."""
    publish = stream_publisher(redis, stream)
    for number in range(40):
        consumer = StreamConsumer(redis, stream=stream, consumer="one", retry_after_ms=60_000)
        consumer.subscribe("another topic", Recorder())
        waiting = asyncio.create_task(consumer.run_once(block_ms=5000))
        await asyncio.sleep(0.002)
        sending = asyncio.ensure_future(publish(events(number)))
        await asyncio.sleep(number / 20_000)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await sending
    left = await pending(StreamConsumer(redis, stream=stream), redis)
    assert all(deliveries == 0 for _, deliveries in left)


async def test_a_cancellation_is_heard_at_any_moment(redis: Redis, stream: str) -> None:
    """Also in the middle of a call to Redis: the entry is renewed every millisecond here."""
    consumer = StreamConsumer(redis, stream=stream, retry_after_ms=3)

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        await asyncio.Event().wait()

    await stream_publisher(redis, stream)(events("a"))
    for number in range(150):
        turn = asyncio.create_task(consumer.run_once())
        await asyncio.sleep(0.004 + number / 50_000)
        turn.cancel()
        await asyncio.wait({turn}, timeout=5)
        assert turn.cancelled()
    assert [count for _, count in await pending(consumer, redis)] == [0]


async def test_a_handler_that_swallows_its_cancellation_is_the_last(redis: Redis, stream: str) -> None:
    """Nothing is begun after it: the rest has been given back already."""
    started = asyncio.Event()
    consumer = StreamConsumer(redis, stream=stream, retry_after_ms=60_000, concurrency=1)
    begun: list[str] = []

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        begun.append(event.payload)
        started.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    await stream_publisher(redis, stream)([*events("a1", "a2", key="a"), *events("b")])
    run = asyncio.create_task(consumer.run())
    await started.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert begun == ["a1"]
    assert await pending(consumer, redis) == [(consumer.consumer, 0)] * 2


async def test_a_cancelled_handler_that_raises_something_else_costs_no_attempt(
    redis: Redis, stream: str
) -> None:
    """As a rollback does on a connection that the cancellation has broken."""
    stop, recorder = asyncio.Event(), Recorder()
    consumer = StreamConsumer(
        redis,
        stream=stream,
        max_attempts=1,
        on_result=recorder.on_result,
        grace=timedelta(milliseconds=20),
    )

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        stop.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ConnectionError("in the midst of a rollback")

    await stream_publisher(redis, stream)(events("a1", "a2", key="a"))
    await consumer.run(stop)
    assert recorder.results == []
    assert await pending(consumer, redis) == [(consumer.consumer, 0)] * 2


async def test_a_retry_that_a_stop_interrupts_keeps_its_count(redis: Redis, stream: str) -> None:
    await stream_publisher(redis, stream)(events("a"))
    await deliver(redis, stream, "dead")
    [entry_id] = await ids(redis, stream)
    await redis.xclaim(stream, "workers", "dead", 0, [entry_id], retrycount=3, justid=True)
    stop = asyncio.Event()
    consumer = StreamConsumer(redis, stream=stream, retry_after_ms=20, grace=timedelta(milliseconds=20))
    seen: list[int] = []

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        seen.append(event.attempt)
        stop.set()
        await asyncio.Event().wait()

    await consumer.run(stop)
    assert seen == [4]
    assert await pending(consumer, redis) == [(consumer.consumer, 3)]


async def test_a_slow_handler_keeps_its_entry(redis: Redis, stream: str) -> None:
    """Renewing is no attempt, and nobody else is given the entry while it is renewed."""
    calls: list[tuple[str, int]] = []
    consumers = [StreamConsumer(redis, stream=stream, retry_after_ms=500, consumer=name) for name in "ab"]
    for consumer in consumers:

        @consumer.subscribe("*")
        async def handle(event: Event, name: str = consumer.consumer) -> None:
            calls.append((name, event.attempt))
            await asyncio.sleep(1.2)

    await stream_publisher(redis, stream)(events("1", "2", key="k"))
    async with running(consumers[0]):
        await until(lambda: called(calls, 1))
        async with running(consumers[1]):
            await until(lambda: called(calls, 2))
            await until(lambda: has_left(consumers[0], redis, [("a", 1)]))
    assert calls == [("a", 1), ("a", 1)]
    assert await pending(consumers[0], redis) == []


async def test_entries_that_wait_behind_a_failed_one_are_kept_too(redis: Redis, stream: str) -> None:
    """Whoever retries the failed one, its followers stay where they are and keep their turn."""
    calls: list[tuple[str, str, int]] = []
    consumers = [StreamConsumer(redis, stream=stream, retry_after_ms=600, consumer=name) for name in "ab"]
    for consumer in consumers:

        @consumer.subscribe("*")
        async def handle(event: Event, name: str = consumer.consumer) -> None:
            calls.append((name, event.payload, event.attempt))
            if event.payload == "a1" and event.attempt < 4:
                raise ValueError

    await stream_publisher(redis, stream)(events("a1", "a2", "a3", key="a"))
    async with running(consumers[0]):
        await until(lambda: called(calls, 1))
        async with running(consumers[1]):
            await until(lambda: called(calls, 6))
    assert [(payload, attempt) for _, payload, attempt in calls] == [
        ("a1", 1),
        ("a1", 2),
        ("a1", 3),
        ("a1", 4),
        ("a2", 1),
        ("a3", 1),
    ]
    assert [name for name, payload, _ in calls if payload != "a1"] == ["a", "a"]


async def test_a_stop_leaves_the_order_of_a_key_as_it_is(redis: Redis, stream: str) -> None:
    """What waits behind a failed event is not given to anybody before that one."""
    handler = Recorder(a1=1)
    for _ in range(2):
        consumer = StreamConsumer(redis, stream=stream, retry_after_ms=150)
        consumer.subscribe("*", handler)
        if not handler.attempts:
            await stream_publisher(redis, stream)(events("a1", "a2", "a3", key="a"))
            async with running(consumer):
                await until(lambda: called(handler.attempts, 1))
            assert [count for _, count in await pending(consumer, redis)] == [1, 0, 0]
        else:
            async with running(consumer):
                await until(lambda: has(handler, 3))
    assert handler.attempts == [("a1", 1), ("a1", 2), ("a2", 1), ("a3", 1)]


async def test_a_worker_that_comes_back_under_its_name_keeps_the_order_of_each_key(
    redis: Redis, stream: str
) -> None:
    """However much its earlier life has left: that comes first, then what is new."""
    publish = stream_publisher(redis, stream)
    await publish([event for number in range(12) for key in "ab" for event in events(number, key=key)])
    await deliver(redis, stream, "one")
    await publish([event for number in range(12, 15) for key in "ab" for event in events(number, key=key)])
    seen: dict[str | None, list[int]] = {"a": [], "b": []}
    consumer = StreamConsumer(redis, stream=stream, consumer="one", retry_after_ms=60_000, count=5)

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        seen[event.key].append(event.payload)

    async with running(consumer):
        await until(lambda: called([*seen["a"], *seen["b"]], 30))
    assert seen == {"a": list(range(15)), "b": list(range(15))}


async def test_what_is_new_does_not_overtake_a_retry_of_its_key_that_must_wait(
    redis: Redis, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retries run alone, and for so long only; then what is new has its turn."""
    monkeypatch.setattr("oncely.streams.worker._ALONE", 0.01)
    publish = stream_publisher(redis, stream)
    await publish([*events("a1", key="a"), *events("b1", key="b")])
    await deliver(redis, stream, "dead")
    handler = Recorder()
    consumer = StreamConsumer(redis, stream=stream, retry_after_ms=20, concurrency=1)
    consumer.subscribe("*", handler)

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        if event.payload == "a1":
            await publish([*events("b2", key="b"), *events("c1", key="c")])
            await asyncio.sleep(0.02)

    await asyncio.sleep(0.03)
    async with running(consumer):
        await until(lambda: has(handler, 4))
    assert [payload for payload in handler.handled if payload != "c1"] == ["a1", "b1", "b2"]


async def test_a_handler_that_will_not_be_cancelled_is_left_behind_and_its_event_is_acknowledged(
    redis: Redis, stream: str
) -> None:
    stop, go, begun = asyncio.Event(), asyncio.Event(), asyncio.Event()
    consumer = StreamConsumer(redis, stream=stream, retry_after_ms=60_000, grace=timedelta(milliseconds=30))

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        begun.set()
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue

    await stream_publisher(redis, stream)(events("a", "b"))
    run = asyncio.create_task(consumer.run(stop))
    await begun.wait()
    stop.set()
    await run
    assert [count for _, count in await pending(consumer, redis)] == [1, 1]
    go.set()
    await until(lambda: has_left(consumer, redis, []))


async def test_a_worker_that_lost_its_entry_notices_and_its_late_end_harms_nobody(
    redis: Redis, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    go = asyncio.Event()
    slow = StreamConsumer(redis, stream=stream, retry_after_ms=90, consumer="slow", max_attempts=1)

    @slow.subscribe("*")
    async def fail(event: Event) -> None:
        await go.wait()
        raise ValueError

    await stream_publisher(redis, stream)(events("a"))
    turn = asyncio.create_task(slow.run_once())
    await until(lambda: is_pending(slow, redis))
    with caplog.at_level(logging.WARNING, "oncely.streams"):
        await redis.xclaim(stream, "workers", "other", 0, await ids(redis, stream))
        await until(lambda: noticed(caplog))
    go.set()
    assert await turn == 0
    assert await pending(slow, redis) == [("other", 2)]
    assert await redis.xlen(slow.dead_letter_stream) == 0


async def test_a_slow_handler_does_not_hold_up_the_others(redis: Redis, stream: str) -> None:
    handler = Recorder()
    go = asyncio.Event()
    consumer = StreamConsumer(redis, stream=stream, concurrency=4, count=5)
    consumer.subscribe("order.*", handler)
    order: list[str] = []

    @consumer.subscribe("slow")
    async def slow(event: Event) -> None:
        order.append(event.payload)
        await go.wait()

    publish = stream_publisher(redis, stream)
    await publish(events("slow 1", topic="slow", key="k"))
    async with running(consumer):
        await until(lambda: called(order, 1))
        await publish(
            [*events(*range(30)), *events("slow 2", topic="slow", key="k"), *events(*range(30, 60))]
        )
        await until(lambda: has(handler, 60))
        assert order == ["slow 1"]
        go.set()
        await until(lambda: called(order, 2))
    assert handler.handled == list(range(60))
    assert await pending(consumer, redis) == []


async def test_what_is_due_again_waits_for_a_slow_handler_and_runs_alone(redis: Redis, stream: str) -> None:
    go, failed = asyncio.Event(), asyncio.Event()
    running_now: set[str] = set()
    retried: list[set[str]] = []
    consumer = StreamConsumer(redis, stream=stream, retry_after_ms=300)

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        running_now.add(event.payload)
        try:
            if event.payload == "slow":
                await go.wait()
            elif event.attempt == 1:
                failed.set()
                raise ValueError
            else:
                retried.append(set(running_now))
        finally:
            running_now.discard(event.payload)

    await stream_publisher(redis, stream)(events("slow", "fails"))
    async with running(consumer):
        await failed.wait()
        await until(lambda: is_older(redis, stream, 300))
        await until(lambda: is_younger(redis, stream, 300))  # that is, it was taken over
        assert retried == []
        go.set()
        await until(lambda: called(retried, 1))
    assert retried == [{"fails"}]


async def test_waits_between_attempts_grow(redis: Redis, stream: str) -> None:
    times: list[float] = []
    consumer = StreamConsumer(
        redis,
        stream=stream,
        retry_after_ms=40,
        backoff_factor=3,
        backoff_maximum=timedelta(milliseconds=200),
        max_attempts=4,
    )

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        times.append(time.monotonic())
        raise ValueError

    await stream_publisher(redis, stream)(events("a"))
    async with running(consumer):
        await until(lambda: called(times, 4))
    waits = [round((after - before) * 1000) for before, after in pairwise(times)]
    # Redis's clock says when; it counts whole milliseconds, from the delivery on.
    assert waits[0] >= 35
    assert waits[1] >= 115
    assert 195 <= waits[2] < 2000


async def test_a_stopped_worker_takes_its_name_away(redis: Redis, stream: str) -> None:
    handler = Recorder()
    for number in range(3):
        consumer = StreamConsumer(redis, stream=stream)
        consumer.subscribe("*", handler)
        async with running(consumer):
            await stream_publisher(redis, stream)(events(number))
            await until(lambda wanted=number + 1: has(handler, wanted))  # type: ignore[misc]
            assert await names(redis, stream) == [consumer.consumer]
    assert await names(redis, stream) == []


async def test_a_stopped_worker_with_something_pending_leaves_its_name(redis: Redis, stream: str) -> None:
    handler = Recorder(a=99)
    consumer = StreamConsumer(redis, stream=stream, consumer="one", retry_after_ms=60_000)
    consumer.subscribe("*", handler)
    await stream_publisher(redis, stream)(events("a"))
    async with running(consumer):
        await until(lambda: called(handler.attempts, 1))
    assert await names(redis, stream) == ["one"]
    assert await pending(consumer, redis) == [("one", 1)]


async def test_names_of_workers_that_are_gone_are_reaped_and_their_entries_kept(
    redis: Redis, stream: str
) -> None:
    for number in range(50):
        consumer = StreamConsumer(redis, stream=stream, consumer=f"gone-{number}")
        consumer.subscribe("*", Recorder())
        await stream_publisher(redis, stream)(events(number))
        await consumer.run_once()
    await stream_publisher(redis, stream)(events("a"))
    await deliver(redis, stream, "died")
    await until(lambda: are_silent(redis, stream, 200))
    consumer = StreamConsumer(redis, stream=stream, consumer="new", retry_after_ms=20)
    consumer.subscribe("*", Recorder())
    consumer._group.due = [60_000]  # so that it leaves the entry where it is
    await consumer.run_once()
    assert "died" in await names(redis, stream)
    assert set(await names(redis, stream)) <= {"died", "new"}
    assert await pending(consumer, redis) == [("died", 1)]


@pytest.mark.parametrize("how", ["run", "run_once"])
async def test_a_consumer_without_a_handler_reads_nothing(redis: Redis, stream: str, how: str) -> None:
    consumer = StreamConsumer(redis, stream=stream)
    await stream_publisher(redis, stream)(events("paid"))
    with pytest.raises(ValueError, match="no handler is subscribed, so every event would be skipped"):
        await getattr(consumer, how)()
    consumer.subscribe("*", handler := Recorder())
    assert await consumer.run_once() == 1
    assert handler.handled == ["paid"]


async def test_a_topic_that_nobody_wants_is_told_once(
    redis: Redis, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = StreamConsumer(redis, stream=stream)
    consumer.subscribe("order.*", Recorder())
    await stream_publisher(redis, stream)([Event(uuid7(), "typo", number) for number in range(3)])
    assert await consumer.run_once() == 3
    assert [record.message for record in caplog.records if "typo" in record.message] == [
        "no handler for topic 'typo': its events are acknowledged and skipped"
    ]


async def test_a_consumer_runs_with_handlers_and_once_at_a_time(redis: Redis, stream: str) -> None:
    consumer = StreamConsumer(redis, stream=stream)
    consumer.subscribe("*", Recorder())
    async with running(consumer):
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError):
            await consumer.run()


async def test_while_a_handler_takes_long_it_still_tells_that_redis_answers(
    redis: Redis, stream: str
) -> None:
    consumer = StreamConsumer(redis, stream=stream, retry_after_ms=60, concurrency=1)
    begun, go = asyncio.Event(), asyncio.Event()

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        begun.set()
        await go.wait()

    await stream_publisher(redis, stream)(events("a"))
    async with running(consumer):
        await begun.wait()
        for _ in range(2):
            before = datetime.now(UTC)
            await until(lambda: has_succeeded_since(consumer, before))  # noqa: B023  awaited at once
        go.set()


async def has_succeeded_since(consumer: StreamConsumer, moment: datetime) -> bool:
    return consumer.last_success is not None and consumer.last_success > moment


async def has(handler: Recorder, count: int) -> bool:
    return len(handler.handled) >= count


async def waits(consumer: StreamConsumer) -> bool:
    return consumer.waits_for == "broker"


async def reads(redis: Redis) -> int:
    """How often the server was asked for new entries."""
    calls = (await redis.info("commandstats")).get("cmdstat_xreadgroup", {"calls": 0})["calls"]
    return int(calls)


async def has_read(redis: Redis, count: int) -> bool:
    return await reads(redis) >= count


async def is_older(redis: Redis, stream: str, milliseconds: int) -> bool:
    """Whether the second entry was given to somebody, or renewed, longer ago than that."""
    _, second = await redis.xpending_range(stream, "workers", "-", "+", 2)
    return int(second["time_since_delivered"]) >= milliseconds


async def is_younger(redis: Redis, stream: str, milliseconds: int) -> bool:
    return not await is_older(redis, stream, milliseconds)


async def are_silent(redis: Redis, stream: str, milliseconds: int) -> bool:
    return all(one["idle"] >= milliseconds for one in await redis.xinfo_consumers(stream, "workers"))


async def has_handled(handler: Recorder, payload: object) -> bool:
    return payload in handler.handled


async def handle_all(consumer: StreamConsumer, redis: Redis) -> bool:
    await consumer.run_once()
    return await pending(consumer, redis) == []


async def called(calls: Sequence[object], count: int) -> bool:
    return len(calls) >= count


async def blocked(redis: Redis, count: int) -> bool:
    return bool((await redis.info("clients"))["blocked_clients"] >= count)


async def is_pending(consumer: StreamConsumer, redis: Redis) -> bool:
    try:
        return bool(await pending(consumer, redis))
    except ResponseError:  # the group is not there yet
        return False


async def has_left(consumer: StreamConsumer, redis: Redis, left: list[tuple[str, int]]) -> bool:
    return await pending(consumer, redis) == left


async def noticed(caplog: pytest.LogCaptureFixture) -> bool:
    return any("was stolen" in record.getMessage() for record in caplog.records)
