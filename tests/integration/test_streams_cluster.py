"""On a cluster: every key of a command in one slot, names chosen so, and refused where they are not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import RedisCluster

from oncely.streams import StreamConsumer, stream_publisher
from tests.streams import EmbeddedCluster, Recorder, events, until


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster() as server:
        yield server


@pytest.fixture
async def client(cluster: EmbeddedCluster) -> AsyncIterator[RedisCluster]:
    async with RedisCluster(host="127.0.0.1", port=cluster.port) as client:
        yield client
        await client.flushall()


@pytest.mark.parametrize("stream", ["orders", "shop:{orders}:stream"])
async def test_a_consumer_works_on_a_cluster(client: RedisCluster, stream: str) -> None:
    handler = Recorder(dies=99, again=1)
    consumer = StreamConsumer(
        client, stream=stream, retry_after_ms=20, max_attempts=2, on_result=handler.on_result
    )
    consumer.subscribe("*", handler)
    stop = asyncio.Event()
    running = asyncio.create_task(consumer.run(stop))
    await stream_publisher(client, stream)(events("a", "dies", "again"))

    async def is_settled() -> bool:
        return sorted(result for _, result in handler.results) == ["dead", "ok", "ok", "retry", "retry"]

    await until(is_settled)
    stop.set()
    await running
    assert await consumer.dead_letters.replay() == 1
    handler.failures.clear()
    assert await consumer.run_once() == 1
    assert await consumer.trim(keep=1) is not None
    assert (await consumer.lag())["workers"].pending == 0
    assert sorted(handler.handled) == ["a", "again", "dies"]


async def test_the_dead_letters_are_in_the_streams_slot(client: RedisCluster) -> None:
    plain = StreamConsumer(client, stream="orders")
    tagged = StreamConsumer(client, stream="{shop}:orders")
    assert plain.dead_letter_stream == "{orders}:dead"
    assert tagged.dead_letter_stream == "{shop}:orders:dead"
    assert plain.dead_letters.dead_letter_stream == "{orders}:dead"
    for consumer in (plain, tagged):
        slots = {client.keyslot(name) for name in (consumer.stream, consumer.dead_letter_stream)}
        assert len(slots) == 1


async def test_dead_letters_in_another_slot_are_refused(client: RedisCluster) -> None:
    with pytest.raises(ValueError, match="slot"):
        StreamConsumer(client, stream="orders", dead_letter_stream="dead")


async def test_a_client_without_a_timeout_waits_as_any_other(cluster: EmbeddedCluster) -> None:
    async with RedisCluster(host="127.0.0.1", port=cluster.port, socket_timeout=None) as client:
        handler = Recorder()
        consumer = StreamConsumer(client, stream="orders")
        consumer.subscribe("*", handler)
        waiting = asyncio.create_task(consumer.run_once(block_ms=10_000))
        await asyncio.sleep(0)
        await stream_publisher(client, "orders")(events("a"))
        assert await asyncio.wait_for(waiting, 10) == 1
        await client.flushall()
    assert handler.handled == ["a"]
