"""Real engines for every test: one PostgreSQL and one Valkey a session, a database of its own per test.

ONCELY_TEST_DATABASE_URL and ONCELY_TEST_REDIS_URL point the tests at servers of yours instead.
There they keep to a schema `oncely_test`, dropped after each test, and to keys of that prefix.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from redis.asyncio import Redis
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import Outbox
from oncely.testing import EmbeddedPostgres, EmbeddedValkey
from tests.database import Database
from tests.web import Web
from tests.webhooks import Endpoint, endpoint
from tests.wire import Wire

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or the processes of tests would be deaf to it

DRIVERS = ("asyncpg", "psycopg")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that was skipped fails the run")


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("no_skips") and reporter is not None and reporter.stats.get("skipped"):
        reporter.write_line("\n--no-skips: tests were skipped", red=True)
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """The session's PostgreSQL server. Tests that stop a server start one of their own."""
    with EmbeddedPostgres() as server:
        yield server


@pytest.fixture(scope="session")
def valkey() -> Iterator[EmbeddedValkey]:
    """The session's Valkey server. Tests that stop or flush a server start one of their own."""
    with EmbeddedValkey() as server:
        yield server


@pytest.fixture
def own_valkey() -> Iterator[EmbeddedValkey]:
    """A server that the test may fill, flush and stop."""
    with EmbeddedValkey() as server:
        yield server


@pytest.fixture(scope="session")
def redis_url(request: pytest.FixtureRequest) -> str:
    given = os.environ.get("ONCELY_TEST_REDIS_URL")
    if given is not None:
        return given
    server: EmbeddedValkey = request.getfixturevalue("valkey")
    return server.url


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    """Both drivers, for the tests that name it; `database` alone runs on asyncpg."""
    return str(request.param)


@pytest.fixture
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    """An empty database, reached by the test's `driver` if it has one, else by asyncpg.

    For tests marked `in_schema` it is an empty schema, which is made much faster.
    """
    name = f"test_{uuid.uuid4().hex}"
    driver = request.getfixturevalue("driver") if "driver" in request.fixturenames else "asyncpg"
    given = os.environ.get("ONCELY_TEST_DATABASE_URL")
    if given is not None:
        with Database.in_schema(given, driver) as database:
            yield database
        return
    server: EmbeddedPostgres = request.getfixturevalue("postgres")
    if request.node.get_closest_marker("in_schema") is not None:
        with Database.in_schema(server.url(), driver) as database:
            yield database
        return
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE template0".encode())
        yield Database(server.url(driver, name))
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture(params=(*DRIVERS, "aiosqlite"))
def any_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A place for tables on PostgreSQL by each driver, and on SQLite (a file, WAL): for effects.

    On PostgreSQL it is a schema, which is made much faster than a database.
    """
    if request.param == "aiosqlite":
        yield Database.in_file(tmp_path / "test.db")
        return
    url = os.environ.get("ONCELY_TEST_DATABASE_URL") or request.getfixturevalue("postgres").url()
    with Database.in_schema(url, request.param) as database:
        yield database


@pytest.fixture
async def any_engine(any_database: Database) -> AsyncIterator[AsyncEngine]:
    # SQLite had no pool before SQLAlchemy 2.0.38, and needs no large one.
    pool = {} if any_database.driver == "aiosqlite" else {"pool_size": 20, "max_overflow": 20}
    engine = any_database.engine(**pool)
    yield engine
    await engine.dispose()


@pytest.fixture
def metadata() -> MetaData:
    return MetaData()


@pytest.fixture
async def engines(database: Database) -> AsyncIterator[Callable[..., AsyncEngine]]:
    """Makes engines on the test's database: `engines(pool_size=1)`; disposes of them all."""
    made: list[AsyncEngine] = []

    def make(**options: object) -> AsyncEngine:
        made.append(database.engine(**options))
        return made[-1]

    yield make
    for engine in made:
        await engine.dispose()


@pytest.fixture
def engine(engines: Callable[..., AsyncEngine]) -> AsyncEngine:
    return engines(pool_size=20, max_overflow=20)


@pytest.fixture
def sessions(engine: AsyncEngine) -> async_sessionmaker:  # type: ignore[type-arg]  # of AsyncSession
    return async_sessionmaker(engine)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
async def stream(redis: Redis) -> AsyncIterator[str]:
    """The name of a stream of the test's own; all keys that begin with it are removed after."""
    name = f"oncely_test:{uuid.uuid4().hex}"
    yield name
    left = [key async for key in redis.scan_iter(match=f"{name}*")]
    if left:
        await redis.delete(*left)


@pytest.fixture
async def outbox(engine: AsyncEngine, metadata: MetaData) -> Outbox:
    """An outbox of default settings, its tables made and empty."""
    outbox = Outbox(metadata)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    return outbox


@pytest.fixture
async def web(engine: AsyncEngine) -> Web:
    """A shop whose routes are guarded, its tables made and empty."""
    return await Web.open(engine)


@pytest.fixture
async def server() -> AsyncIterator[Endpoint]:
    """An endpoint for webhooks."""
    async with endpoint() as server:
        yield server


@pytest.fixture
async def wire(database: Database) -> AsyncIterator[Wire]:
    """A wire to the test's database, that can be cut."""
    async with Wire.to_postgres(database.url) as wire:
        yield wire
