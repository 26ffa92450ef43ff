"""Whatever a document allows, and much that it does not, is answered without a 5xx."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode

from tests.database import Database
from tests.web import Web

ALLOWED, NOT_ALLOWED = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


@pytest.fixture(scope="module")
def places(request: pytest.FixtureRequest) -> Iterator[Database]:
    """A schema with the application's tables, for all tests of the module."""
    url = os.environ.get("ONCELY_TEST_DATABASE_URL") or request.getfixturevalue("postgres").url()
    with Database.in_schema(url, "asyncpg") as database:
        asyncio.run(make_tables(database))
        yield database


@pytest.fixture(scope="module")
def document(places: Database) -> Iterator[Any]:
    """The document of an application that runs behind uvicorn."""
    listening = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/openapi.json"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "uvicorn", "--factory", "tests.acceptance.fastapi_documented:create_app"),
            *("--fd", str(listening.fileno()), "--log-level", "critical"),
        ],
        pass_fds=[listening.fileno()],
        env={**os.environ, "DATABASE_URL": places.url, "DATABASE_SCHEMA": places.schema or ""},
    )
    try:
        httpx.get(address, timeout=20)  # the socket listens already: it answers when the server does
        yield schemathesis.openapi.from_url(address)
    finally:
        process.kill()
        process.wait()
        listening.close()


@pytest.mark.parametrize(
    ("method", "path", "what"),
    [
        ("POST", "/orders/{number}", ALLOWED),
        ("POST", "/orders/{number}", NOT_ALLOWED),
        ("PATCH", "/orders/{number}", ALLOWED),
        ("PATCH", "/orders/{number}", NOT_ALLOWED),
        ("POST", "/optional/forms", ALLOWED),
        ("POST", "/optional/forms", NOT_ALLOWED),
        ("GET", "/optional/orders", ALLOWED),
    ],
)
def test_no_request_is_answered_with_a_5xx(
    document: Any, method: str, path: str, what: GenerationMode
) -> None:
    answers: Counter[int] = Counter()

    def ask(case: Any) -> None:
        response = case.call()
        answers[response.status_code] += 1
        assert response.status_code < 500, (case.as_curl_command(), response.text)

    relaxed = settings(max_examples=40, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    cases: SearchStrategy[Any] = document[path][method].as_strategy(generation_mode=what)
    ask_all: Callable[[], None] = relaxed(given(cases)(ask))
    ask_all()
    assert answers.total() > 0


async def make_tables(database: Database) -> None:
    engine = database.engine()
    await Web.open(engine)
    await engine.dispose()
