"""Every Python example in the README and under docs runs, in the order of reading, on real engines.

The blocks share one namespace, as a reader's module would. DATABASE_URL and REDIS_URL are given; the
tables are made after the block that defines them.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import httpx
import pytest
from redis.asyncio import Redis
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase

from oncely import Event, Outbox, PublisherUnavailable, Relay, Worker
from oncely.backoff import Backoff
from oncely.event import uuid7
from oncely.streams import StreamConsumer, stream_publisher
from oncely.webhooks import Message, StandardWebhooks
from tests.database import Database
from tests.streams import entries
from tests.waiting import until

README = Path(__file__).parents[2] / "README.md"
DOCS = README.parent / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """Each block's first line on the page, and its text."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        yield text.count("\n", 0, match.start(1)), match[1]


def provider(request: httpx.Request) -> httpx.Response:
    """Somebody else's payment service, as far as the README needs it."""
    return httpx.Response(200, json=json.loads(request.content) if request.method == "POST" else [])


SERVERS_ANSWER = """
import asyncio
import os

from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import create_async_engine


def test_both_servers_answer() -> None:
    async def asked() -> tuple[object, object]:
        engine = create_async_engine(os.environ["DATABASE_URL"])
        redis = Redis.from_url(os.environ["REDIS_URL"])
        async with engine.connect() as connection:
            one = (await connection.exec_driver_sql("SELECT 1")).scalar_one()
        pong = await redis.ping()
        await redis.aclose()
        await engine.dispose()
        return one, pong

    assert asyncio.run(asked()) == (1, True)
"""


def test_the_conftest_of_the_testing_page_gives_both_servers(tmp_path: Path) -> None:
    page = (DOCS / "testing.md").read_text()
    block = re.search(r"^    import os\n(?:    .*\n|\n)+", page, re.MULTILINE)
    assert block is not None
    (tmp_path / "conftest.py").write_text(textwrap.dedent(block[0]))
    (tmp_path / "test_servers.py").write_text(SERVERS_ANSWER)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout.rpartition("\n1 passed")[1]) == (0, "\n1 passed"), ran


def test_every_promise_names_the_tests_that_prove_it_and_they_exist() -> None:
    section = README.read_text().partition("## What is promised")[2].partition("\n## ")[0]
    head, rule, *rows = [line for line in section.splitlines() if line.startswith("|")]
    assert (head, rule) == ("| promise | condition | test |", "|---|---|---|")
    assert len(rows) >= 40
    tests = "\n".join(path.read_text() for path in README.parent.glob("tests/**/test_*.py"))
    for row in rows:
        _, promise, _condition, named, _ = (cell.strip() for cell in row.split("|"))
        assert promise
        names = re.findall(r"`(test_\w+)`", named)
        assert ", ".join(f"`{name}`" for name in names) == named != ""
        assert [name for name in names if f"def {name}(" not in tests] == []


def test_no_page_has_an_example_that_does_not_run() -> None:
    with_examples = {page.name for page in DOCS.glob("*.md") if list(blocks(page))}
    assert with_examples == {"how-it-works.md", "operations.md"}


@pytest.mark.parametrize("page", [README, *sorted(DOCS.glob("*.md"))], ids=lambda page: str(page.name))
def test_every_link_leads_to_a_page_and_a_heading_that_are_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S))
    astray = []
    for link in links:
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not path.startswith("https:") and not (
            target.is_file() and (not heading or heading in _anchors(target))
        ):
            astray.append(link)
    assert astray == []


def _anchors(page: Path) -> list[str]:
    """The headings of a page, spelled as links to them are."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize(("service", "unlisted"), [(Relay, ()), (StreamConsumer, ("stream", "observer"))])
def test_the_settings_are_listed_with_their_defaults(service: type, unlisted: Sequence[str]) -> None:
    of_service = README.read_text().partition(f"\n`{service.__name__}` has these settings")[2]
    table = of_service.partition("| setting | default | what it is |\n|---|---|---|\n")[2]
    listed = [
        [cell.strip() for cell in row.split("|")[1:3]] for row in table.partition("\n\n")[0].splitlines()
    ]
    settings = [
        each
        for each in inspect.signature(service).parameters.values()
        if each.kind is each.KEYWORD_ONLY and each.name not in unlisted
    ]
    assert listed == [[f"`{each.name}`", _in_words(each.default)] for each in settings]


def _in_words(value: object) -> str:
    if isinstance(value, Backoff):
        assert (value.factor, value.jitter) == (2, 0.2)
        return f"{_in_words(value.first)} to {_in_words(value.maximum)}"
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        if seconds < 1:
            return f"{seconds * 1000:g} ms"
        return f"{seconds:g} s" if seconds <= 60 else f"{seconds / 60:g} min"
    return "yes" if value is True else "none" if value is None else str(value)


async def the_routes_answer(app: Any) -> None:
    headers = {"X-User": "Ada"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
        for path, body, status in (
            ("/orders?item=tea", {"item": "tea"}, 201),
            ("/orders?item=the%20moon", {"detail": "there is only one"}, 409),
            ("/payments?amount=3", {"paid": 3}, 201),
        ):
            for replayed in (None, "true"):
                answer = await client.post(
                    path, headers=headers | {"Idempotency-Key": path.partition("=")[0] + path[-4:]}
                )
                assert (answer.status_code, answer.json()) == (status, body)
                assert answer.headers.get("Idempotency-Replayed") == replayed
        assert (await client.post("/payments?amount=3", headers={"X-User": "Ada"})).status_code == 400


async def the_bridge_is_away(namespace: dict[str, Any]) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    event = Event(uuid7(), "t", 1)
    for answer, error in (
        (refuse, PublisherUnavailable),
        (lambda _: httpx.Response(503), PublisherUnavailable),
        (lambda _: httpx.Response(422), httpx.HTTPStatusError),
    ):
        async with httpx.AsyncClient(
            base_url="https://bridge", transport=httpx.MockTransport(answer)
        ) as http:
            with pytest.raises(error):
                await _with(namespace["publish_to_bridge"], http=http)([event])
    await namespace["publish_to_bridge"]([event])


def _with(function: types.FunctionType, **names: object) -> Any:
    """The function, with other objects behind some of its globals."""
    return types.FunctionType(function.__code__, {**function.__globals__, **names})


async def the_webhook_is_received(receiver: Any, secret: str) -> None:
    message = Message(uuid7(), datetime.now(UTC), "https://shop/hooks", (), b'{"order": 1}')
    signed = StandardWebhooks(secret).sign(message)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(receiver), base_url="https://shop") as client:
        for body, status in ((message.body, 204), (message.body, 204), (b'{"order": 2}', 401)):
            assert (await client.post("/hooks", headers=signed, content=body)).status_code == status


async def test_the_examples_run(database: Database, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The reader's engine, on the test's schema where the server is the user's.
    monkeypatch.setattr("sqlalchemy.ext.asyncio.create_async_engine", lambda _url: database.engine())
    url = make_url(database.url).render_as_string(hide_password=False)
    http = httpx.AsyncClient(base_url="https://provider", transport=httpx.MockTransport(provider))
    namespace: dict[str, object] = {
        "DATABASE_URL": url,
        "REDIS_URL": redis_url,
        "http": http,
        "SEALING_KEY": os.urandom(32),
        "SIGNING_SECRET": base64.b64encode(os.urandom(32)).decode(),
        "__name__": "readme",
    }
    ran = 0
    try:
        operations = DOCS / "operations.md"
        for page, (line, source) in [
            *((README, each) for each in blocks(README)),
            *((operations, each) for each in blocks(operations)),
        ]:
            code = compile(
                "\n" * line + source,
                str(page),
                "exec",
                flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
                dont_inherit=True,
            )
            result = eval(code, namespace)  # a code object: it may be a coroutine's
            if inspect.isawaitable(result):
                await result
            ran += 1
        await the_bridge_is_away(namespace)
        await the_routes_answer(namespace["app"])
        worker = namespace["worker"]
        assert isinstance(worker, Worker)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run(stop))
            await until(lambda: all(each.last_success for each in worker.health()))
            stop.set()
        await the_webhook_is_received(namespace["receiver"], str(namespace["SIGNING_SECRET"]))
    finally:
        await http.aclose()
        engine, redis = namespace.get("engine"), namespace.get("redis")
        if isinstance(redis, Redis):
            await redis.delete("shop", "shop:dead")
            await redis.aclose()
        if isinstance(engine, AsyncEngine):
            await engine.dispose()
    assert ran >= 13


async def test_the_partitions_of_how_it_works_have_a_stream_each_and_a_key_stays_in_one(
    database: Database, engine: AsyncEngine, redis: Redis
) -> None:
    class Base(DeclarativeBase):
        pass

    [(_, source)] = blocks(DOCS / "how-it-works.md")
    sessions = async_sessionmaker(engine)
    namespace: dict[str, Any] = {"Base": Base, "sessions": sessions, "cluster": redis, "crc32": crc32}
    namespace |= {"Outbox": Outbox, "Relay": Relay, "stream_publisher": stream_publisher}
    exec(source, namespace)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    streams = [outbox.table.name for outbox in namespace["outboxes"]]
    keys = [f"order {number}" for number in range(40)]
    try:
        async with sessions.begin() as session:
            for key in keys * 2:
                await namespace["outbox_of"](key).emit(session, "order.paid", None, key=key)
        for relay in namespace["relays"]:
            await relay.run_once()
        found = [
            Counter(fields[b"key"].decode() for fields in await entries(redis, name)) for name in streams
        ]
    finally:
        await redis.delete(*streams)
    assert all(found)
    assert sum(found, Counter()) == dict.fromkeys(keys, 2)
    assert {count for counted in found for count in counted.values()} == {2}
