"""The stream as a publisher: order, whose fault a failure is, and what is said to be sent."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from oncely.errors import PublisherUnavailable, PublishFailed
from oncely.event import Event, uuid7
from oncely.streams import stream_publisher
from oncely.testing import EmbeddedValkey
from tests.streams import entries, events, until


async def payloads(redis: Redis, stream: str) -> list[object]:
    return [json.loads(fields[b"payload"]) for fields in await entries(redis, stream)]


async def holds(redis: Redis, count: int) -> bool:
    return await redis.xlen("orders") >= count


async def test_an_event_is_these_fields(redis: Redis, stream: str) -> None:
    created_at = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    text = '{"b":1,  "a":[1.50]}'
    full = Event.from_json(uuid7(), "order.paid", text, '{"h":"1"}', "key", created_at)
    bare = Event(uuid7(), "order.paid", None)
    await stream_publisher(redis, stream)([full, bare])
    assert await entries(redis, stream) == [
        {
            b"id": str(full.id).encode(),
            b"topic": b"order.paid",
            b"payload": text.encode(),
            b"headers": b'{"h":"1"}',
            b"key": b"key",
            b"created_at": b"2026-01-02T03:04:05.678901+00:00",
        },
        {b"id": str(bare.id).encode(), b"topic": b"order.paid", b"payload": b"null"},
    ]


async def test_a_batch_of_many_chunks_arrives_in_order(redis: Redis, stream: str) -> None:
    await stream_publisher(redis, stream)(events(*range(1777)))
    assert await payloads(redis, stream) == list(range(1777))


async def test_a_large_event_passes(redis: Redis, stream: str) -> None:
    await stream_publisher(redis, stream)(events("x" * 5_000_000, "y"))
    assert await payloads(redis, stream) == ["x" * 5_000_000, "y"]


async def test_nothing_of_a_key_is_sent_after_its_failure(redis: Redis, stream: str) -> None:
    bad = Event(uuid7(), "order.paid", "\ud800", key="a")
    before, after = events("before", "after", key="a")
    others = [*events("b", key="b"), *events("none")]
    with pytest.raises(PublishFailed) as failed:
        await stream_publisher(redis, stream)([before, bad, others[0], after, others[1]])
    assert list(failed.value.failures) == [bad.id]
    assert failed.value.unsent == {after.id}
    assert await payloads(redis, stream) == ["before", "b", "none"]


async def test_what_redis_refuses_is_named_and_holds_its_key_back(redis: Redis, stream: str) -> None:
    await redis.xadd(stream, {"x": "y"}, id=f"{2**64 - 1}-{2**64 - 1}")  # no id is left
    first, second = events("a1", "a2", key="a")
    other = events("b")[0]
    with pytest.raises(PublishFailed) as failed:
        await stream_publisher(redis, stream)([first, second, other])
    assert set(failed.value.failures) == {first.id, other.id}
    assert {type(error) for error in failed.value.failures.values()} == {ResponseError}
    assert failed.value.unsent == {second.id}


async def test_a_key_that_holds_no_stream_is_no_events_fault(redis: Redis, stream: str) -> None:
    await redis.set(stream, "text")
    with pytest.raises(PublisherUnavailable, match="WRONGTYPE"):
        await stream_publisher(redis, stream)(events("a"))


async def test_a_server_that_is_away_is_no_events_fault(tmp_path: Path) -> None:
    async with Redis(unix_socket_path=str(tmp_path / "nobody"), retry=Retry(NoBackoff(), 0)) as redis:
        with pytest.raises(PublisherUnavailable):
            await stream_publisher(redis, "orders")(events("a"))


async def test_a_full_server_is_no_events_fault_and_what_was_sent_counts(own_server: EmbeddedValkey) -> None:
    async with Redis.from_url(own_server.url) as redis:
        publish = stream_publisher(redis, "orders")
        used = (await redis.info("memory"))["used_memory"]
        await redis.config_set("maxmemory", used + 3_000_000)
        batch = events(*("x" * 400_000 for _ in range(30)))
        with pytest.raises(PublishFailed) as failed:
            await publish(batch)
        sent = await redis.xlen("orders")
        assert 0 < sent < 30
        assert failed.value.failures == {}
        assert failed.value.unsent == {event.id for event in batch[sent:]}
        with pytest.raises(PublisherUnavailable, match="OOM"):
            await publish(batch[sent:])
        assert await redis.xlen("orders") == sent
        await redis.config_set("maxmemory", 0)
        await publish(batch[sent:])
        assert await redis.xlen("orders") == 30


@pytest.mark.parametrize(
    ("word", "command"),
    [
        ("READONLY", "REPLICAOF 127.0.0.1 1"),
        ("NOREPLICAS", "CONFIG SET min-replicas-to-write 1"),
        ("can't run|no permissions", "ACL SETUSER default -xadd"),
        ("WRONGTYPE", "SET orders text"),
    ],
)
async def test_what_would_refuse_every_event_is_no_events_fault(
    own_server: EmbeddedValkey, word: str, command: str
) -> None:
    async with Redis.from_url(own_server.url) as redis:
        await redis.execute_command(*command.split())  # type: ignore[no-untyped-call]
        with pytest.raises(PublisherUnavailable, match=word):
            await stream_publisher(redis, "orders")(events("a"))


async def test_a_server_that_goes_away_in_between_leaves_the_rest_unsent(own_server: EmbeddedValkey) -> None:
    async with Redis.from_url(own_server.url, retry=Retry(NoBackoff(), 0)) as redis:
        publish = stream_publisher(redis, "orders")
        batch = events(*("x" * 2_000_000 for _ in range(20)))

        async def kill() -> None:
            async with Redis.from_url(own_server.url) as other:
                await until(lambda: holds(other, 2))
            own_server.kill()

        killing = asyncio.create_task(kill())
        with pytest.raises(PublishFailed) as failed:
            await publish(batch)
        await killing
        assert failed.value.failures == {}
        unsent = [event.id for event in batch if event.id in failed.value.unsent]
        assert 1 <= len(unsent) <= 19
        assert unsent == [event.id for event in batch[-len(unsent) :]]


async def test_maxlen_bounds_the_stream(redis: Redis, stream: str) -> None:
    await stream_publisher(redis, stream, maxlen=100)(events(*range(2000)))
    assert 100 <= await redis.xlen(stream) < 400
    with pytest.raises(ValueError):
        stream_publisher(redis, stream, maxlen=0)


async def test_an_empty_batch_is_sent_without_a_word(redis: Redis, stream: str) -> None:
    await stream_publisher(redis, stream)([])
    assert not await redis.exists(stream)
