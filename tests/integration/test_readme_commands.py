"""Every command that the page for operators shows runs, on real engines, and says what it says there.

Ids, times, ages and the widths that follow from them are those of the day; the rest is compared.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely.errors import Reject
from oncely.event import Event
from oncely.streams import StreamConsumer, stream_publisher
from tests.command import Shop, oncely, place
from tests.database import Database
from tests.outboxes import emit, execute, fail
from tests.streams import events

pytestmark = pytest.mark.in_schema

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OF_THE_DAY = {
    r"\b[0-9a-f]{8}-[0-9a-f-]{27}\b": "UUID",
    r"\b\d{13}-\d+\b": "ENTRY",
    r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ": "TIME",
    r"\b\d+\.\d+s": "AGE",
    r"─+": "─",
    r" +": " ",
    r" $": "",
}


def commands() -> Iterator[tuple[str, str]]:
    """Each command of the page, and what it says there."""
    for block in BLOCK.findall(PAGE.read_text()):
        for part in block.split("$ ")[1:]:
            command, _, output = part.partition("\n")
            if command.startswith("oncely "):
                yield command.removeprefix("oncely "), output


def comparable(text: str) -> list[str]:
    """The lines without what is of the day."""
    for pattern, word in OF_THE_DAY.items():
        text = re.sub(pattern, word, text, flags=re.MULTILINE)
    return text.strip().splitlines()


async def fill(shop: Shop, engine: AsyncEngine) -> None:
    await emit(shop.outbox, shop.sessions, 1, topic="order.paid")
    await fail(shop.outbox, shop.sessions, 1, error="ValueError: no such currency", delay=None)
    await execute(engine, "UPDATE outbox SET attempts = 10")
    await emit(shop.outbox, shop.sessions, 2, 3, topic="order.paid")
    consumer = StreamConsumer(shop.redis, stream=shop.stream, group="billing")
    consumer.subscribe("*", _reject)
    await stream_publisher(shop.redis, shop.stream)(events(4))
    await consumer.run_once()
    async with shop.sessions.begin() as session:
        await shop.keys.run(session, scope="7", key="k-1", fingerprint=b"1" * 32, work=_made)
    with pytest.raises(TimeoutError):
        await shop.effects.run("charge:order-7", _is_lost)


async def _reject(event: Event) -> None:
    raise Reject("no such customer")


async def _made() -> tuple[int, str]:
    return 201, "made"


async def _is_lost(provider_token: str) -> object:
    raise TimeoutError("no answer")


async def test_the_commands_say_what_the_page_for_operators_says(
    shop: Shop, engine: AsyncEngine, database: Database
) -> None:
    await fill(shop, engine)
    ran = 0
    for command, expected in commands():
        words = shlex.split(command.replace("shop.worker:worker", shop.target("worker")))
        if shop.target("worker") not in words:
            words += place(database)
        done = await oncely(*words)
        said = (done.stderr + done.stdout).replace(shop.stream, "shop").replace("oncely_test.", "")
        assert (command, done.exit_code, comparable(said)) == (command, 0, comparable(expected))
        ran += 1
    assert ran >= 6
