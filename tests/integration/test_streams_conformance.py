"""The stream's publisher, put through what every publisher has to keep to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from oncely.event import Event, uuid7
from oncely.streams import stream_publisher
from oncely.streams.wire import decode
from oncely.testing import EmbeddedValkey
from oncely.testing.conformance import PUBLISHER_CHECKS, WITH_BAD_EVENTS, WITH_OUTAGES, PublisherCase
from tests.streams import entries, flat

Check = Callable[[PublisherCase], Awaitable[None]]


@pytest.fixture
async def case() -> AsyncIterator[PublisherCase]:
    with EmbeddedValkey() as server:
        async with Redis.from_url(server.url, retry=Retry(NoBackoff(), 0)) as redis:

            async def received() -> list[Event]:
                events = [decode(flat(fields), 1, b"") for fields in await entries(redis, "orders")]
                return [event for event in events if event is not None]

            async def unplug() -> None:
                server.kill()

            yield PublisherCase(stream_publisher(redis, "orders"), received, unsendable, unplug)


def unsendable(key: str | None) -> Event:
    return Event(uuid7(), "conformance", "an unpaired surrogate: \ud800", key=key)


@pytest.mark.parametrize("check", PUBLISHER_CHECKS + WITH_BAD_EVENTS + WITH_OUTAGES)
async def test_the_stream_publisher_conforms(check: Check, case: PublisherCase) -> None:
    await check(case)
