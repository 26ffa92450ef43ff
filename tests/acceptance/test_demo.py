"""The demo ends with 0 when all is right and with 1 when it is not, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from redis import Redis

from oncely.testing import EmbeddedPostgres, EmbeddedValkey

ROOT = Path(__file__).parents[2]


class Demo:
    """A run of the demo. `processes` are all that it has started and that still live."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._mark = uuid.uuid4().hex
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ONCELY_")}
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "examples.shop.demo", *arguments],
            cwd=ROOT,
            env=inherited | environment | {"ONCELY_DEMO_MARK": self._mark, "COLUMNS": "100"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""

    def end(self) -> int:
        """Its exit status."""
        rest, _ = self._process.communicate(timeout=60)
        self.output += rest
        return self._process.returncode

    def read_until(self, words: str) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line
            if words in line:
                return
        raise AssertionError(self.output)

    def interrupt(self) -> None:
        """As a terminal does at Ctrl-C: it tells the whole group."""
        os.killpg(self._process.pid, signal.SIGINT)

    def terminate(self) -> None:
        self._process.terminate()

    def table(self) -> dict[str, str]:
        """The table at the end."""
        rows = [line.strip("│").split("│") for line in self.output.splitlines() if line.startswith("│")]
        return {name.strip(): number.strip() for name, number in rows}

    def processes(self) -> list[str]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_text().replace("\0", " "))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ended meanwhile, or is somebody else's
        return found

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


@contextmanager
def running(*arguments: str, **environment: str) -> Iterator[Demo]:
    demo = Demo(*arguments, **environment)
    try:
        yield demo
    finally:
        demo.kill()


only_on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@only_on_linux
def test_the_demo_finds_every_number_right_on_servers_of_its_own() -> None:
    with running("--orders", "20") as demo:
        assert demo.end() == 0, demo.output
        assert demo.processes() == []
    table = demo.table()
    assert int(table.pop("requests sent")) >= int(table.pop("cut before the answer")) + 50
    assert 30 <= int(table.pop("replayed")) <= 50
    for by_chance in ("in the middle of a batch", "handlings that failed", "duplicates delivered"):
        assert int(table.pop(by_chance)) >= 0
    assert table == {
        "answers": "50",
        "orders": "13",
        "refused: the seat was taken": "7",
        "events published": "13",
        "relays killed": "3",
        "messages handled": "13",
        "each order exists once": "yes",
    }


def test_without_the_promise_the_demo_fails_and_says_what_is_wrong(
    postgres: EmbeddedPostgres, valkey: EmbeddedValkey
) -> None:
    servers = {"ONCELY_TEST_DATABASE_URL": postgres.url(), "ONCELY_TEST_REDIS_URL": valkey.url}
    with running("--orders", "20", "--fresh-keys", **servers) as demo:
        assert demo.end() == 1, demo.output
    assert "Wrong: keys: " in demo.output
    assert "Wrong: customers who were told two different things: " in demo.output
    with psycopg.connect(postgres.dsn()) as connection:
        schemas = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'oncely%'")
        assert schemas.fetchall() == []
    with Redis.from_url(valkey.url) as redis:
        assert list(redis.scan_iter(match="oncely_shop*")) == []


@only_on_linux
@pytest.mark.parametrize(
    ("stop", "status"), [(Demo.interrupt, 128 + signal.SIGINT), (Demo.terminate, 128 + signal.SIGTERM)]
)
def test_a_demo_that_is_stopped_leaves_no_process_behind(stop: Callable[[Demo], None], status: int) -> None:
    with running("--orders", "2000") as demo:  # more than it could finish meanwhile
        demo.read_until("The relay was killed")
        lives = "\n".join(demo.processes())
        assert [
            name for name in ("demo", "relay", "consumer", "uvicorn", "postgres") if name not in lives
        ] == []
        stop(demo)
        assert demo.end() == status, demo.output
        deadline = time.monotonic() + 5
        while demo.processes() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert demo.processes() == []
