"""What an operator does with a stream: trim it, ask for its lag, decide over its dead letters."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from oncely.errors import Reject
from oncely.event import Event
from oncely.streams import DeadLetters, GroupLag, Lost, StreamConsumer, Trimmed, stream_publisher
from oncely.testing import EmbeddedValkey
from tests.streams import Recorder, consumer_of, deliver, entries, events, ids, pending, until


@pytest.fixture(params=["valkey", "redis_6_2"])
def redis_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param).url)


async def acknowledge(redis: Redis, stream: str, group: str) -> None:
    """All that is pending in the group."""
    for one in await redis.xpending_range(stream, group, "-", "+", 10_000):
        await redis.xack(stream, group, one["message_id"])


# ---- trim


async def test_trim_removes_what_every_group_has_done_and_keeps_so_many(redis: Redis, stream: str) -> None:
    consumer = consumer_of(redis, stream, Recorder())
    await stream_publisher(redis, stream)(events(*range(1234)))
    while await consumer.run_once(count=500):
        pass
    assert await consumer.trim(keep=2000) == Trimmed(0, {})
    assert await consumer.trim(keep=1000) == Trimmed(234, {})
    assert await consumer.trim(keep=0) == Trimmed(1000, {})
    assert await redis.xlen(stream) == 0
    assert await consumer.trim(keep=0) == Trimmed(0, {})


async def test_trim_keeps_what_a_group_has_not_read(redis: Redis, stream: str) -> None:
    fast, slow = (consumer_of(redis, stream, Recorder(), group=group) for group in ("fast", "slow"))
    await stream_publisher(redis, stream)(events(*range(300)))
    await slow.run_once(count=100)
    while await fast.run_once():
        pass
    assert await fast.trim(keep=0) == Trimmed(100, {})
    assert await slow.run_once(count=500) == 200
    assert await fast.trim(keep=0) == Trimmed(200, {})


async def test_trim_keeps_what_is_pending_in_a_group(redis: Redis, stream: str) -> None:
    consumer = consumer_of(redis, stream, Recorder())
    await stream_publisher(redis, stream)(events(*range(10)))
    await deliver(redis, stream, "dead", group="other", count=10)
    all_ids = await ids(redis, stream)
    await redis.xack(stream, "other", *all_ids[:4], *all_ids[5:])
    assert await consumer.run_once() == 10
    assert await consumer.trim(keep=0) == Trimmed(4, {})
    assert await ids(redis, stream) == all_ids[4:]


async def test_trim_keeps_all_for_a_group_that_has_not_begun(redis: Redis, stream: str) -> None:
    """The consumer's own group counts, although no worker of it has come yet."""
    await stream_publisher(redis, stream)(events(1, 2, 3))
    await deliver(redis, stream, "one", group="other")
    await acknowledge(redis, stream, "other")
    assert await StreamConsumer(redis, stream=stream, group="late").trim(keep=0) == Trimmed(0, {})
    assert await redis.xlen(stream) == 3


async def test_a_forced_trim_says_what_was_lost_and_to_whom(redis: Redis, stream: str) -> None:
    await stream_publisher(redis, stream)(events(*range(250)))
    await deliver(redis, stream, "a", group="ahead", count=250)
    await deliver(redis, stream, "b", group="behind", count=30)
    all_ids = await ids(redis, stream)
    await redis.xack(stream, "ahead", *all_ids[:240])
    consumer = StreamConsumer(redis, stream=stream, group="ahead")
    assert await consumer.trim(keep=5, force=True) == Trimmed(
        245, {"ahead": Lost(unread=0, pending=5), "behind": Lost(unread=215, pending=30)}
    )
    assert await ids(redis, stream) == all_ids[245:]


async def test_what_a_forced_trim_took_is_reported_and_nothing_stays_pending(
    redis: Redis, stream: str
) -> None:
    handler = Recorder()
    consumer = consumer_of(redis, stream, handler)
    await stream_publisher(redis, stream)(events("a", "b", "c"))
    await deliver(redis, stream, "dead")
    assert (await consumer.trim(keep=1, force=True)).lost == {"workers": Lost(unread=0, pending=2)}
    await until(lambda: settled_all(consumer, redis))
    assert handler.handled == ["c"]
    assert [result for _, result in handler.results].count("lost") == 2


async def test_ids_are_compared_as_numbers(redis: Redis, stream: str) -> None:
    """Ids of different length, and beyond what a floating-point number can tell apart."""
    big = 2**63
    for entry_id in ("9-1", "10-9", "10-10", f"{big}-0", f"{big + 1}-0"):
        await redis.xadd(stream, {"x": "y"}, id=entry_id)
    await deliver(redis, stream, "one", count=4)
    await redis.xack(stream, "workers", "9-1", "10-9", "10-10", f"{big}-0")
    assert await StreamConsumer(redis, stream=stream).trim(keep=0) == Trimmed(4, {})
    assert await ids(redis, stream) == [f"{big + 1}-0".encode()]


async def test_trim_loses_nothing_while_others_publish_and_consume(redis: Redis, stream: str) -> None:
    handler = Recorder()
    workers = [consumer_of(redis, stream, handler, retry_after_ms=60_000) for _ in range(2)]
    publish = stream_publisher(redis, stream)

    async def work(consumer: StreamConsumer) -> None:
        while len(handler.handled) < 1000:
            await consumer.run_once(count=7, block_ms=20)

    async def trim() -> None:
        while len(handler.handled) < 1000:
            await workers[0].trim(keep=0)
            await asyncio.sleep(0)

    async def send() -> None:
        for number in range(100):
            await publish(events(*range(number * 10, number * 10 + 10)))

    await asyncio.gather(send(), trim(), *(work(consumer) for consumer in workers))
    assert sorted(handler.handled) == list(range(1000))


async def test_of_a_key_that_holds_no_stream_nothing_is_trimmed_or_measured(
    redis: Redis, stream: str
) -> None:
    await redis.set(stream, "no stream")
    consumer = StreamConsumer(redis, stream=stream)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await consumer.trim(keep=0)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await consumer.measure()
    assert await redis.get(stream) == b"no stream"


async def test_keep_is_not_negative(redis: Redis, stream: str) -> None:
    with pytest.raises(ValueError):
        await StreamConsumer(redis, stream=stream).trim(keep=-1)


# ---- lag


async def test_lag_tells_for_each_group_what_is_unread_and_pending(redis: Redis, stream: str) -> None:
    consumer = StreamConsumer(redis, stream=stream, group="none")
    assert await consumer.lag() == {}
    await stream_publisher(redis, stream)(events(*range(500)))
    await deliver(redis, stream, "a", group="all", count=500)
    await acknowledge(redis, stream, "all")
    await deliver(redis, stream, "b", group="some", count=30)
    await consumer._group.make()
    lag = await consumer.lag()
    oldest = lag["some"].oldest_pending
    assert lag == {
        "all": GroupLag(unread=0, pending=0, oldest_pending=None),
        "some": GroupLag(unread=470, pending=30, oldest_pending=oldest),
        "none": GroupLag(unread=500, pending=0, oldest_pending=None),
    }
    assert oldest is not None
    assert timedelta(0) <= oldest < timedelta(seconds=10)


async def test_lag_counts_right_over_gaps_in_the_stream(redis: Redis, stream: str) -> None:
    await stream_publisher(redis, stream)(events(*range(500)))
    await deliver(redis, stream, "a", count=100)
    all_ids = await ids(redis, stream)
    await redis.xdel(stream, *all_ids[90:110], *all_ids[300:310])
    [lag] = (await StreamConsumer(redis, stream=stream).lag()).values()
    assert lag.unread == 380
    assert lag.pending == 100


async def test_the_age_of_the_oldest_pending_entry_is_counted_from_its_publication(
    redis: Redis, stream: str
) -> None:
    seconds, _ = await redis.time()
    await redis.xadd(stream, {"x": "y"}, id=f"{(seconds - 3600) * 1000}-0")
    await deliver(redis, stream, "a")
    [lag] = (await StreamConsumer(redis, stream=stream).lag()).values()
    assert lag.oldest_pending is not None
    assert timedelta(minutes=59) < lag.oldest_pending < timedelta(minutes=61)


# ---- dead letters


async def test_dead_letters_are_listed_as_they_died(redis: Redis, stream: str) -> None:
    recorder = Recorder()
    consumer = StreamConsumer(redis, stream=stream, group="mailer", on_result=recorder.on_result)

    @consumer.subscribe("order.*")
    async def handle(event: Event) -> None:
        raise Reject("no such account")

    sent = [*events({"n": 1}, key="k"), *events({"n": 2}, topic="order.sent")]
    before = datetime.now(UTC) - timedelta(seconds=5)
    await stream_publisher(redis, stream)(sent)
    await redis.xadd(stream, {"hello": "world"})
    entry_ids = [entry_id.decode() for entry_id in await ids(redis, stream)]
    assert await consumer.run_once() == 3
    letters = {letter.entry: letter for letter in await consumer.dead_letters.list()}
    assert sorted(letters) == entry_ids
    first, second, foreign = (letters[entry_id] for entry_id in entry_ids)
    assert [first.event, second.event, foreign.event] == [*sent, None]
    assert first.error == "Reject: no such account"
    assert foreign.error == "NotAnEvent: no field 'payload'"
    assert list(foreign.fields) == [b"hello", b"world"]
    assert {letter.group for letter in letters.values()} == {"mailer"}
    assert {letter.attempts for letter in letters.values()} == {1}
    assert all(
        before < letter.dead_at < datetime.now(UTC) + timedelta(seconds=5) for letter in letters.values()
    )
    assert await consumer.dead_letters.show(first.id) == first
    assert await consumer.dead_letters.show("1-1") is None


async def test_an_error_that_cannot_say_what_it_is_makes_a_dead_letter_all_the_same(
    redis: Redis, stream: str
) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    consumer = StreamConsumer(redis, stream=stream, max_attempts=1)

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        raise Mute

    await stream_publisher(redis, stream)(events("a"))
    assert await consumer.run_once() == 1
    [letter] = await consumer.dead_letters.list()
    assert letter.error == "Mute: (its message raised ZeroDivisionError)"


async def test_dead_letters_are_chosen_by_what_is_given(redis: Redis, stream: str) -> None:
    await bury(redis, stream, *range(250), group="a")
    await bury(redis, stream, "x", topic="other", group="b")
    letters = DeadLetters(redis, stream=stream)
    assert len(await letters.list()) == 100
    assert len(await letters.list(limit=1000)) == 251
    assert len(await letters.list(limit=120)) == 120
    assert [letter.group for letter in await letters.list(topic="other")] == ["b"]
    assert len(await letters.list(group="a", limit=1000)) == 250
    assert len(await letters.list(error="Reject", limit=1000)) == 251
    assert await letters.list(error="ValueError") == []
    [newest] = await letters.list(group="b")
    assert await letters.list(since=newest.dead_at + timedelta(seconds=10)) == []
    assert await letters.list(until=newest.dead_at - timedelta(minutes=1)) == []
    assert newest in await letters.list(since=newest.dead_at - timedelta(minutes=1), limit=1000)
    with pytest.raises(ValueError):
        await letters.list(limit=0)
    with pytest.raises(ValueError):
        await letters.list(since=datetime(2026, 1, 1))  # noqa: DTZ001  that is what is refused


async def test_a_replayed_event_keeps_its_id_and_is_for_the_group_that_gave_up_on_it(
    redis: Redis, stream: str
) -> None:
    other = Recorder()
    others = consumer_of(redis, stream, other, group="others")
    mailer = Recorder(a=1)
    consumer = consumer_of(redis, stream, mailer, group="mailer", max_attempts=1)
    [event] = events("a", key="k")
    await stream_publisher(redis, stream)([event])
    assert await others.run_once() == 1
    assert await consumer.run_once() == 1
    [letter] = await consumer.dead_letters.list()
    assert await consumer.dead_letters.replay(ids=[letter.id]) == 1
    assert await consumer.dead_letters.list() == []
    assert await consumer.run_once() == 1
    assert await others.run_once() == 1
    assert mailer.results == [("a", "dead"), ("a", "ok")]
    assert other.results == [("a", "ok")]
    assert [fields[b"id"] for fields in await entries(redis, stream)] == [str(event.id).encode()] * 2
    assert await pending(others, redis) == []
    assert await consumer.dead_letters.replay(ids=[letter.id]) == 0


async def test_a_replayed_event_may_die_again(redis: Redis, stream: str) -> None:
    handler = Recorder(a=2)
    consumer = consumer_of(redis, stream, handler, max_attempts=1)
    await stream_publisher(redis, stream)(events("a"))
    for _ in range(2):
        await consumer.run_once()
        assert await consumer.dead_letters.replay() == 1
    await consumer.run_once()
    assert handler.results == [("a", "dead"), ("a", "dead"), ("a", "ok")]
    assert (await entries(redis, stream))[-1].keys() == {b"id", b"topic", b"payload", b"group"}


async def test_all_dead_letters_are_replayed_once(redis: Redis, stream: str) -> None:
    """Those that die again while the replay goes on are left for the next."""
    await bury(redis, stream, *range(250))
    consumer = StreamConsumer(redis, stream=stream)

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        raise Reject

    async def work() -> None:
        while await consumer.run_once(block_ms=100):
            pass

    replayed, _ = await asyncio.gather(consumer.dead_letters.replay(), work())
    assert replayed == 250
    assert await redis.xlen(consumer.dead_letter_stream) == 250


async def test_dead_letters_are_discarded(redis: Redis, stream: str) -> None:
    await bury(redis, stream, 1, 2, 3)
    letters = DeadLetters(redis, stream=stream)
    first, *_ = await letters.list()
    assert await letters.discard(ids=[first.id, "1-1"]) == 1
    assert await letters.discard() == 2
    assert await letters.list() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"hello": "world"},
        {"error": "x", "attempts": "many", "group": "g", "entry": "1-0", "dead_at": "1"},
        {"error": "x", "attempts": "1", "group": "g", "entry": "1-0", "dead_at": "soon"},
        {"error": "x", "attempts": "1", "group": "g", "entry": "1-0", "dead_at": "9" * 17},
        {"error": "x", "attempts": "1", "group": "g", "entry": "1-0", "dead_at": "9" * 30},
    ],
)
async def test_what_is_no_dead_letter_is_left_alone(
    redis: Redis, stream: str, fields: dict[str, str]
) -> None:
    letters = DeadLetters(redis, stream=stream)
    await redis.xadd(letters.dead_letter_stream, fields)  # type: ignore[arg-type]  # of str is a dict too
    assert await letters.list() == []
    assert await letters.replay() == 0
    assert await letters.discard() == 0
    assert await redis.xlen(letters.dead_letter_stream) == 1


async def test_an_entry_stays_pending_while_its_dead_letter_cannot_be_written(
    redis: Redis, stream: str
) -> None:
    handler = Recorder(a=99)
    consumer = consumer_of(redis, stream, handler, max_attempts=1)
    await redis.set(consumer.dead_letter_stream, "text")
    await stream_publisher(redis, stream)(events("a", "b"))
    await redis.xadd(stream, {"no": "event"})
    assert await consumer.run_once() == 1
    assert await consumer.run_once() == 0
    assert await pending(consumer, redis) == [(consumer.consumer, 1)] * 2
    await redis.delete(consumer.dead_letter_stream)
    await until(lambda: settled_all(consumer, redis))
    assert await redis.xlen(consumer.dead_letter_stream) == 2
    assert handler.attempts == [("a", 1), ("b", 1)]


async def test_an_entry_stays_pending_while_the_server_is_full(own_server: EmbeddedValkey) -> None:
    async with Redis.from_url(own_server.url) as redis:
        handler = Recorder(a=99)
        consumer = consumer_of(redis, "orders", handler, max_attempts=1)
        await stream_publisher(redis, "orders")(events("a", "b"))
        await consumer._group.make()
        await redis.config_set("maxmemory", 1)
        assert await consumer.run_once() == 1
        assert handler.results == [("a", "retry"), ("b", "ok")]
        assert await pending(consumer, redis) == [(consumer.consumer, 1)]
        await redis.config_set("maxmemory", 0)
        await until(lambda: settled_all(consumer, redis))
        assert await redis.xlen("orders:dead") == 1


async def bury(
    redis: Redis, stream: str, *payloads: object, topic: str = "order.paid", group: str = "workers"
) -> None:
    """Dead letters of these payloads."""
    consumer = StreamConsumer(redis, stream=stream, group=group)

    @consumer.subscribe(topic)
    async def handle(event: Event) -> None:
        raise Reject

    await stream_publisher(redis, stream)(events(*payloads, topic=topic))
    while await consumer.run_once(count=500):
        pass


async def settled_all(consumer: StreamConsumer, redis: Redis) -> bool:
    await consumer.run_once()
    return await pending(consumer, redis) == []
