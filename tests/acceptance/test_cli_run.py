"""`oncely run`, as a supervisor sees it."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from httpx import AsyncClient, ConnectError
from redis.asyncio import Redis

from oncely import Outbox
from tests.acceptance.worker_process import GROUP
from tests.acceptance.workers import process
from tests.database import Database
from tests.outboxes import Sessions, emit
from tests.waiting import until

TARGET = "tests.acceptance.worker_process:from_environment"


@pytest.fixture
def places(database: Database, redis_url: str, stream: str) -> dict[str, str]:
    return {"DATABASE_URL": database.url, "REDIS_URL": redis_url, "STREAM": stream}


@pytest.mark.parametrize("options", [(), ("--uvloop",)])
async def test_it_runs_the_worker_and_ends_with_0_when_it_is_told_to(
    options: tuple[str, ...],
    places: dict[str, str],
    outbox: Outbox,
    sessions: Sessions,
    redis: Redis,
    stream: str,
) -> None:
    await emit(outbox, sessions, "nothing", topic="handle")
    async with process("-m", "oncely.cli", "run", TARGET, *options, **places) as worker:
        await worker.says("ended handle")
        assert await worker.stop() == 0
    services = f"Relay outbox, StreamConsumer {stream}/{GROUP}, Retention outbox"
    time = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
    assert [re.sub(time, "", line) for line in worker.lines] == [
        f"INFO oncely.worker: running {services}; a stop takes up to 0:00:10",
        f"INFO oncely.streams: made group '{GROUP}' of stream '{stream}', which was not there",
        "begun handle nothing",
        "ended handle nothing",
        "INFO oncely.worker: stopping",
        "INFO oncely.worker: ended",
    ]
    assert await redis.xpending_range(stream, GROUP, "-", "+", 10) == []


async def test_a_service_with_a_bug_ends_it_with_1_and_a_traceback(
    places: dict[str, str], outbox: Outbox
) -> None:
    async with process("-m", "oncely.cli", "run", TARGET, **places, BUG="") as worker:
        await worker.says("running")
        worker.go()
        assert await worker.ends() == 1
    assert "ZeroDivisionError: the bug" in worker.lines
    assert worker.output.count("Traceback") == 1


async def test_it_tells_over_http_that_it_lives_and_what_it_waits_for(redis_url: str, stream: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = {"DATABASE_URL": "postgresql+asyncpg:///?host=/absent", "REDIS_URL": redis_url, "STREAM": stream}
    command = ("-m", "oncely.cli", "run", TARGET, "--health-port", str(port))
    async with (
        process(*command, **places) as worker,
        AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        await worker.says("running")

        async def waits() -> bool:
            with suppress(ConnectError):  # it does not listen yet
                services = (await client.get("/health")).json()["services"]
                return [(each["name"], each["healthy"], each["waits_for"]) for each in services] == [
                    ("Relay outbox", False, "database"),
                    (f"StreamConsumer {stream}/{GROUP}", True, None),
                    ("Retention outbox", False, "database"),
                ]
            return False

        await until(waits)
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/live")).status_code == 200
        assert await worker.stop() == 0


async def test_a_table_that_is_not_there_ends_it_with_1_and_its_name(places: dict[str, str]) -> None:
    async with process("-m", "oncely.cli", "run", TARGET, **places) as worker:
        assert await worker.ends() == 1
    assert any("TablesMissing" in line and "outbox" in line for line in worker.lines), worker.output


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("tests.acceptance.worker_process:GROUP", "is of type str, and not a Worker"),
        (
            "tests.acceptance.worker_process:SERVICE",
            "is of type Bug, and not a Worker; make it one: Worker(…)",
        ),
        ("tests.acceptance.worker_process:absent", "has no attribute 'absent'"),
        ("tests.acceptance.absent:worker", "there is no module 'tests.acceptance.absent'"),
    ],
)
async def test_a_target_that_is_no_worker_ends_it_with_2_and_a_line(target: str, words: str) -> None:
    async with process("-m", "oncely.cli", "run", target) as worker:
        assert await worker.ends() == 2
    [line] = worker.lines
    assert line.startswith("oncely: ")
    assert words in line


def test_its_exit_codes_are_those_of_the_readme() -> None:
    from oncely.cli.run import run

    assert run.__doc__ is not None
    codes = set(re.findall(r"\b(\d{1,3})\b", run.__doc__.partition("Exit codes:")[2]))
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    table = readme.partition("| exit code |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| (\d+)(?: or (\d+))? \|", table, re.MULTILINE)) == {
        ("0", ""),
        ("1", ""),
        ("2", ""),
        ("3", ""),
        ("143", "130"),
    }
    assert codes == {"0", "1", "2", "3", "143", "130"}
