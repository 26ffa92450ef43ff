"""A consumer on one stream: what is handled, how often, in what order, and what is said of it.

Every test runs on Valkey and on the oldest Redis that is supported.
"""

from __future__ import annotations

import asyncio
import contextvars
from datetime import timedelta

import pytest
from redis.asyncio import Redis

from oncely.errors import Reject
from oncely.event import Event
from oncely.streams import StreamConsumer, stream_publisher
from tests.streams import Recorder, consumer_of, deliver, entries, events, ids, pending, until


@pytest.fixture(params=["valkey", "redis_6_2"])
def redis_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param).url)


async def test_events_arrive_as_they_were_published(redis: Redis, stream: str) -> None:
    consumer = StreamConsumer(redis, stream=stream)
    seen: list[Event] = []

    @consumer.subscribe("order.paid")
    async def handle(event: Event) -> None:
        seen.append(event)

    sent = [
        *events({"total": "9.99", "names": ["Zoë", "\u0000".strip("\u0000"), "😀"]}, None, 0, ""),
        Event(events(1)[0].id, "order.paid", [1.5], headers={"traceparent": "00-1"}, key="k"),
    ]
    await stream_publisher(redis, stream)(sent)
    assert await consumer.run_once() == 5
    assert seen == sent
    assert await consumer.run_once() == 0
    assert await pending(consumer, redis) == []


async def test_a_group_begins_with_what_was_published_before_it(redis: Redis, stream: str) -> None:
    await stream_publisher(redis, stream)(events("a", "b", "c"))
    handler = Recorder()
    await consumer_of(redis, stream, handler).run_once()
    await consumer_of(redis, stream, handler).run_once()
    assert handler.handled == ["a", "b", "c"]


async def test_an_event_that_nobody_subscribed_to_is_acknowledged(redis: Redis, stream: str) -> None:
    await stream_publisher(redis, stream)(events("a", topic="other"))
    consumer = StreamConsumer(redis, stream=stream)
    consumer.subscribe("order.*", handler := Recorder())
    assert await consumer.run_once() == 1
    assert handler.handled == []
    assert await pending(consumer, redis) == []


async def test_a_failure_touches_its_neighbours_not(redis: Redis, stream: str) -> None:
    handler = Recorder(b=1)
    consumer = consumer_of(redis, stream, handler)
    await stream_publisher(redis, stream)(events("a", "b", "c", "d", "e"))
    assert await consumer.run_once() == 4
    assert handler.handled == ["a", "c", "d", "e"]
    assert sorted(handler.results) == [("a", "ok"), ("b", "retry"), ("c", "ok"), ("d", "ok"), ("e", "ok")]
    assert await pending(consumer, redis) == [(consumer.consumer, 1)]


async def test_a_failed_event_comes_again_after_its_time_and_not_before(redis: Redis, stream: str) -> None:
    handler = Recorder(a=2)
    consumer = consumer_of(redis, stream, handler, retry_after_ms=100)
    await stream_publisher(redis, stream)(events("a"))
    assert await consumer.run_once() == 0
    assert await consumer.run_once() == 0
    assert handler.attempts == [("a", 1)]
    await until(lambda: settles(consumer))
    assert handler.attempts == [("a", 1), ("a", 2), ("a", 3)]
    assert handler.results == [("a", "retry"), ("a", "retry"), ("a", "ok")]


async def test_what_fails_at_the_last_attempt_is_a_dead_letter(redis: Redis, stream: str) -> None:
    handler = Recorder(a=99)
    consumer = consumer_of(redis, stream, handler, max_attempts=3)
    [event] = events("a")
    await stream_publisher(redis, stream)([event])
    await until(lambda: settles(consumer))
    assert handler.attempts == [("a", 1), ("a", 2), ("a", 3)]
    assert handler.results == [("a", "retry"), ("a", "retry"), ("a", "dead")]
    assert await pending(consumer, redis) == []
    [letter] = await entries(redis, consumer.dead_letter_stream)
    [entry_id] = await ids(redis, stream)
    dead_at = letter.pop(b"dead_at")
    assert letter == {
        b"id": str(event.id).encode(),
        b"topic": b"order.paid",
        b"payload": b'"a"',
        b"error": b"ValueError: no a",
        b"attempts": b"3",
        b"group": b"workers",
        b"entry": entry_id,
    }
    assert int(dead_at) >= int(entry_id.split(b"-")[0])


async def test_what_is_rejected_is_a_dead_letter_at_once(redis: Redis, stream: str) -> None:
    recorder = Recorder()
    consumer = StreamConsumer(redis, stream=stream, on_result=recorder.on_result)

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        raise Reject("no such account")

    await stream_publisher(redis, stream)(events("a"))
    assert await consumer.run_once() == 1
    assert recorder.results == [("a", "dead")]
    assert await redis.xlen(f"{stream}:dead") == 1


async def test_an_entry_that_is_no_event_is_a_dead_letter_at_once(redis: Redis, stream: str) -> None:
    handler = Recorder()
    consumer = consumer_of(redis, stream, handler)
    publish = stream_publisher(redis, stream)
    good = events("a", "b")
    await publish(good[:1])
    await redis.xadd(stream, {"hello": "world"})
    await redis.xadd(stream, {"id": "x", "topic": "t", "payload": "1"})
    await redis.xadd(stream, {"id": str(good[0].id), "topic": "t", "payload": "{"})
    await redis.xadd(stream, {"id": str(good[0].id), "topic": b"\xff", "payload": "1"})
    await redis.xadd(stream, {"id": str(good[0].id), "topic": "t", "payload": "1", "headers": "[]"})
    await redis.xadd(stream, {"id": str(good[0].id), "topic": "t", "payload": '{"total": NaN}'})
    await redis.xadd(stream, {b"\xff": b"\xfe"})
    await redis.xadd(stream, {str(number): "x" for number in range(3000)})
    await redis.xadd(stream, {"id": str(good[0].id), "topic": "t", "payload": '"extra"', "colour": "red"})
    await publish(good[1:])
    assert await consumer.run_once() == 11
    assert handler.handled == ["a", "extra", "b"]
    assert [result for _, result in handler.results].count("dead") == 8
    letters = await entries(redis, consumer.dead_letter_stream)
    assert [letter[b"error"].split(b":")[0] for letter in letters] == [b"NotAnEvent"] * 8
    assert [letter[b"hello"] for letter in letters if b"hello" in letter] == [b"world"]
    assert [letter[b"\xff"] for letter in letters if b"\xff" in letter] == [b"\xfe"]
    assert await pending(consumer, redis) == []


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode_responses", [True, False])
async def test_every_kind_of_client_will_do(
    redis_url: str, stream: str, redis: Redis, protocol: int, decode_responses: bool
) -> None:
    handler = Recorder(b=1)
    async with Redis.from_url(redis_url, protocol=protocol, decode_responses=decode_responses) as client:
        consumer = consumer_of(client, stream, handler)
        waiting = asyncio.create_task(consumer.run_once(block_ms=10_000))
        await until(lambda: exists(redis, stream))
        await stream_publisher(client, stream)(events("a"))
        assert await waiting == 1
        await redis.xadd(stream, {b"\xff": b"\xfe"})
        await stream_publisher(client, stream)(events("b", "c"))
        await until(lambda: settles(consumer))
        await until(lambda: settles(consumer))
    assert handler.handled == ["a", "c", "b"]
    assert [result for _, result in handler.results].count("dead") == 1


async def test_scripts_survive_a_flush_of_scripts(redis: Redis, stream: str) -> None:
    handler = Recorder(a=1)
    consumer = consumer_of(redis, stream, handler)
    publish = stream_publisher(redis, stream)
    await publish(events("a"))
    await redis.script_flush()
    await consumer.run_once()
    await redis.script_flush()
    await publish(events("b"))
    await until(lambda: handled(consumer, handler, 2))
    assert sorted(handler.handled) == ["a", "b"]


async def test_no_more_handlers_run_together_than_asked_for(redis: Redis, stream: str) -> None:
    consumer = StreamConsumer(redis, stream=stream, concurrency=4)
    running, most, barrier = 0, 0, asyncio.Barrier(4)

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await barrier.wait()  # passes only when four run together
        running -= 1

    await stream_publisher(redis, stream)(events(*range(40)))
    assert await consumer.run_once() == 40
    assert most == 4


async def test_events_of_one_key_are_handled_one_after_another(redis: Redis, stream: str) -> None:
    consumer = StreamConsumer(redis, stream=stream, concurrency=64)
    running: set[str] = set()
    seen: dict[str, list[int]] = {key: [] for key in "abcde"}

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        assert event.key is not None
        assert event.key not in running
        running.add(event.key)
        await asyncio.sleep(0)
        running.remove(event.key)
        seen[event.key].append(event.payload)

    batch = [event for number in range(10) for key in "abcde" for event in events(number, key=key)]
    await stream_publisher(redis, stream)(batch)
    assert await consumer.run_once() == 50
    assert seen == {key: list(range(10)) for key in "abcde"}


async def test_what_follows_a_failed_event_of_its_key_waits_for_it(redis: Redis, stream: str) -> None:
    handler = Recorder(a1=2)
    consumer = consumer_of(redis, stream, handler)
    publish = stream_publisher(redis, stream)
    await publish([*events("a1", "a2", key="a"), *events("b1", key="b")])
    assert await consumer.run_once() == 1
    await publish(events("a3", key="a"))
    assert await consumer.run_once() == 0
    assert handler.handled == ["b1"]
    await until(lambda: handled(consumer, handler, 4))
    assert handler.handled == ["b1", "a1", "a2", "a3"]
    assert [attempt for attempt in handler.attempts if attempt[0] in ("a2", "a3")] == [("a2", 1), ("a3", 1)]


async def test_what_follows_goes_on_when_another_worker_has_settled_it(redis: Redis, stream: str) -> None:
    handler = Recorder(a1=1)
    first = consumer_of(redis, stream, handler, retry_after_ms=60_000)
    await stream_publisher(redis, stream)(events("a1", "a2", key="a"))
    assert await first.run_once() == 0
    entry_id, _ = await ids(redis, stream)
    await redis.xclaim(stream, "workers", "another", 0, [entry_id])
    assert await first.run_once() == 0
    assert handler.handled == []
    await redis.xack(stream, "workers", entry_id)
    assert await first.run_once() == 1
    assert handler.handled == ["a2"]


async def test_a_dead_letter_lets_its_key_go_on(redis: Redis, stream: str) -> None:
    handler = Recorder(a1=99)
    consumer = consumer_of(redis, stream, handler, max_attempts=1)
    await stream_publisher(redis, stream)(events("a1", "a2", key="a"))
    assert await consumer.run_once() == 2
    assert handler.results == [("a1", "dead"), ("a2", "ok")]


async def test_a_retry_runs_all_handlers_of_the_topic_again(redis: Redis, stream: str) -> None:
    consumer = StreamConsumer(redis, stream=stream, retry_after_ms=20)
    calls: list[tuple[str, int]] = []

    @consumer.subscribe("order.*")
    async def first(event: Event) -> None:
        calls.append(("first", event.attempt))

    @consumer.subscribe("order.paid")
    async def second(event: Event) -> None:
        calls.append(("second", event.attempt))
        if event.attempt == 1:
            raise ValueError

    @consumer.subscribe("*")
    async def third(event: Event) -> None:
        calls.append(("third", event.attempt))

    @consumer.subscribe("order")
    async def never(event: Event) -> None:
        raise AssertionError

    await stream_publisher(redis, stream)(events("a"))
    assert await consumer.run_once() == 0
    await until(lambda: settles(consumer))
    assert calls == [("first", 1), ("second", 1), ("first", 2), ("second", 2), ("third", 2)]


async def test_entries_trimmed_away_while_pending_are_acknowledged_and_lost(
    redis: Redis, stream: str
) -> None:
    handler = Recorder()
    consumer = consumer_of(redis, stream, handler)
    await stream_publisher(redis, stream)(events("a", "b", "c"))
    await deliver(redis, stream, "dead")
    _, middle, _ = await ids(redis, stream)
    await redis.xdel(stream, middle)
    await until(lambda: handled(consumer, handler, 2))
    assert handler.handled == ["a", "c"]
    assert (None, "lost") in handler.results
    assert await pending(consumer, redis) == []


async def test_a_dead_worker_costs_nobody_more_than_one_attempt(redis: Redis, stream: str) -> None:
    """The first delivery of the batch it died with counts; takeovers by workers that die do not."""
    handler = Recorder()
    await stream_publisher(redis, stream)(events("a", "b", "c"))
    await deliver(redis, stream, "dead")
    for _ in range(10):
        dying = consumer_of(redis, stream, handler)
        await asyncio.sleep(0.021)
        taken = await dying._group.take_over(50)
        assert [entry.deliveries for entry in taken] == [1, 1, 1]
    consumer = consumer_of(redis, stream, handler)
    await until(lambda: handled(consumer, handler, 3))
    assert handler.attempts == [("a", 2), ("b", 2), ("c", 2)]


async def test_what_was_delivered_before_runs_alone(redis: Redis, stream: str) -> None:
    running = 0

    async def handle(event: Event) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0.001)
        running -= 1

    await stream_publisher(redis, stream)(events(*range(10)))
    await deliver(redis, stream, "dead", count=5)
    recorder = Recorder()
    consumer = StreamConsumer(redis, stream=stream, retry_after_ms=20, concurrency=1)
    consumer.subscribe("*", handle)
    consumer.subscribe("*", recorder)
    await asyncio.sleep(0.021)
    consumer.concurrency = 16
    await until(lambda: handled(consumer, recorder, 5))
    assert recorder.attempts[:5] == [(number, 2) for number in range(5)]


async def test_too_many_deliveries_are_dead_without_running(redis: Redis, stream: str) -> None:
    handler = Recorder()
    consumer = consumer_of(redis, stream, handler, max_attempts=2)
    await stream_publisher(redis, stream)(events("a"))
    await deliver(redis, stream, "dead")
    [entry_id] = await ids(redis, stream)
    await redis.xclaim(stream, "workers", "dead", 0, [entry_id], retrycount=2, justid=True)
    await until(lambda: settles(consumer))
    assert handler.attempts == []
    assert handler.results == [("a", "dead")]
    [letter] = await entries(redis, consumer.dead_letter_stream)
    assert letter[b"attempts"] == b"2"


async def test_a_worker_under_the_name_of_a_dead_one_handles_what_it_left_at_once(
    redis: Redis, stream: str
) -> None:
    handler = Recorder()
    await stream_publisher(redis, stream)(events("a", "b", "c"))
    await deliver(redis, stream, "one")
    await stream_publisher(redis, stream)(events("d"))
    other = consumer_of(redis, stream, handler, consumer="two", retry_after_ms=60_000)
    assert await other.run_once() == 1
    again = consumer_of(redis, stream, handler, consumer="one", retry_after_ms=60_000)
    assert await again.run_once(count=2) == 2
    assert await again.run_once(count=2) == 1
    assert handler.handled == ["d", "a", "b", "c"]


async def test_around_wraps_each_event_once(redis: Redis, stream: str) -> None:
    seen: list[str] = []

    async def around(event: Event, call: object) -> None:
        seen.append(f"before {event.payload}")
        await call()  # type: ignore[operator]  # a coroutine function
        seen.append(f"after {event.payload}")

    handler = Recorder(b=1)
    consumer = consumer_of(redis, stream, handler, around=around, concurrency=1)
    consumer.subscribe("order.paid", handler)
    await stream_publisher(redis, stream)(events("a", "b"))
    await consumer.run_once()
    assert seen == ["before a", "after a", "before b"]
    assert handler.handled == ["a", "a"]


async def test_on_result_may_be_async_and_may_fail(redis: Redis, stream: str) -> None:
    seen: list[str] = []

    async def on_result(event: Event | None, result: str, seconds: float, error: object) -> None:
        seen.append(result)
        raise ZeroDivisionError

    handler = Recorder(b=1)
    consumer = consumer_of(redis, stream, handler, on_result=on_result)
    await stream_publisher(redis, stream)(events("a", "b"))
    assert await consumer.run_once() == 1
    assert sorted(seen) == ["ok", "retry"]


async def test_a_handlers_context_is_its_own(redis: Redis, stream: str) -> None:
    variable = contextvars.ContextVar("variable", default="clean")
    consumer = StreamConsumer(redis, stream=stream, concurrency=2)
    seen: list[str] = []

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        seen.append(variable.get())
        variable.set("dirty")

    await stream_publisher(redis, stream)(events(*range(20)))
    assert await consumer.run_once() == 20
    assert seen == ["clean"] * 20


async def test_a_cancellation_that_a_handler_raises_itself_is_a_failure(redis: Redis, stream: str) -> None:
    recorder = Recorder()
    consumer = StreamConsumer(redis, stream=stream, on_result=recorder.on_result)

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        raise asyncio.CancelledError

    await stream_publisher(redis, stream)(events("a", "b"))
    assert await consumer.run_once() == 0
    assert recorder.results == [("a", "retry"), ("b", "retry")]


async def test_a_handler_that_cancels_its_own_task_fails_and_is_dead_in_the_end(
    redis: Redis, stream: str
) -> None:
    recorder = Recorder()
    seen: list[tuple[str, int]] = []
    consumer = StreamConsumer(
        redis, stream=stream, retry_after_ms=20, max_attempts=3, concurrency=1, on_result=recorder.on_result
    )

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        seen.append((event.payload, event.attempt))
        if event.payload == "a":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    await stream_publisher(redis, stream)(events("a", "b"))
    assert await consumer.run_once() == 1
    await until(lambda: settles(consumer))
    assert seen == [("a", 1), ("b", 1), ("a", 2), ("a", 3)]
    assert recorder.results == [("a", "retry"), ("b", "ok"), ("a", "retry"), ("a", "dead")]
    assert await pending(consumer, redis) == []


async def test_a_handler_that_leaks_a_cancellation_harms_nobody_else(redis: Redis, stream: str) -> None:
    """A timeout that nobody took back comes when the handler is long over, and another one runs."""
    recorder = Recorder()
    consumer = StreamConsumer(redis, stream=stream, concurrency=1, on_result=recorder.on_result)
    leaked = asyncio.Event()

    def leak(task: asyncio.Task[None] | None) -> None:
        assert task is not None
        task.cancel()
        leaked.set()

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        if event.payload == "a":
            asyncio.get_running_loop().call_soon(leak, asyncio.current_task())
        else:
            await leaked.wait()
            await asyncio.sleep(0)

    await stream_publisher(redis, stream)(events("a", "b"))
    assert await consumer.run_once() == 2
    assert recorder.results == [("a", "ok"), ("b", "ok")]


async def test_a_handler_that_takes_longer_than_its_timeout_has_failed(redis: Redis, stream: str) -> None:
    recorder = Recorder()
    consumer = StreamConsumer(
        redis,
        stream=stream,
        max_attempts=1,
        handler_timeout=timedelta(milliseconds=30),
        on_result=recorder.on_result,
    )

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        if event.payload == "hangs":
            await asyncio.Event().wait()
        if event.payload == "raises":
            raise TimeoutError("its own")

    await stream_publisher(redis, stream)(events("hangs", "raises", "ends"))
    assert await consumer.run_once() == 3
    assert sorted(zip(recorder.results, map(str, recorder.errors), strict=True)) == [
        (("ends", "ok"), "None"),
        (("hangs", "dead"), "not handled within 0:00:00.030000"),
        (("raises", "dead"), "its own"),
    ]


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_on_result_that_raises_a_cancellation_ends_no_report(
    redis: Redis, stream: str, is_async: bool
) -> None:
    seen: list[str] = []

    def plain(event: Event | None, result: str, seconds: float, error: object) -> None:
        seen.append(result)
        raise asyncio.CancelledError

    async def waiting(event: Event | None, result: str, seconds: float, error: object) -> None:
        seen.append(result)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    handler = Recorder(b=1)
    consumer = consumer_of(redis, stream, handler, on_result=waiting if is_async else plain)
    await stream_publisher(redis, stream)(events("a", "b", "c"))
    assert await consumer.run_once() == 2
    assert sorted(seen) == ["ok", "ok", "retry"]


async def test_a_cancelled_turn_still_reports_what_was_acknowledged(redis: Redis, stream: str) -> None:
    seen: list[object] = []
    begun, go = asyncio.Event(), asyncio.Event()

    async def on_result(event: Event | None, result: str, seconds: float, error: object) -> None:
        assert event is not None
        begun.set()
        await go.wait()
        seen.append(event.payload)

    consumer = consumer_of(redis, stream, Recorder(), on_result=on_result)
    await stream_publisher(redis, stream)(events("a", "b", "c"))
    turn = asyncio.create_task(consumer.run_once())
    await begun.wait()
    turn.cancel()
    go.set()
    await asyncio.wait({turn})
    await consumer.run_once()
    assert seen[-2:] == ["b", "c"]


async def test_count_bounds_a_call(redis: Redis, stream: str) -> None:
    handler = Recorder()
    consumer = consumer_of(redis, stream, handler)
    await stream_publisher(redis, stream)(events("a", "b", "c"))
    assert await consumer.run_once(count=2) == 2
    assert await consumer.run_once(count=2) == 1
    with pytest.raises(ValueError):
        await consumer.run_once(count=0)


async def test_the_same_entry_is_never_given_to_two_workers(redis: Redis, stream: str) -> None:
    await stream_publisher(redis, stream)(events(*range(200)))
    handler = Recorder()
    workers = [consumer_of(redis, stream, handler, retry_after_ms=60_000) for _ in range(4)]
    await asyncio.gather(*(worker.run_once(count=20) for _ in range(3) for worker in workers))
    assert sorted(handler.handled) == list(range(200))


async def settles(consumer: StreamConsumer) -> bool:
    return await consumer.run_once() > 0


async def handled(consumer: StreamConsumer, handler: Recorder, count: int) -> bool:
    await consumer.run_once()
    return len(handler.handled) >= count


async def exists(redis: Redis, stream: str) -> bool:
    return bool(await redis.exists(stream))
