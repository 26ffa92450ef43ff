"""The command `oncely` in tests: run in this process, on a module that stands for an application.

ran = await oncely("status", shop.target(), "--json")
assert (ran.exit_code, ran.json) == (0, …)
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from sqlalchemy import MetaData, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
from typer.testing import CliRunner

from oncely import Effects, IdempotencyKeys, Inbox, Outbox
from oncely.cli.app import app
from oncely.webhooks import Keyring, Webhooks
from tests.database import Database
from tests.outboxes import Sessions
from tests.webhooks import KEY, SECRET

__all__ = ["Ran", "Shop", "in_terminal", "oncely", "place", "shop"]

_MODULE = """
from datetime import timedelta

from redis.asyncio import Redis
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import async_sessionmaker

from oncely import Effects, IdempotencyKeys, Inbox, Outbox, Relay, Retention
from oncely.streams import StreamConsumer, stream_publisher
from oncely.webhooks import Keyring, StandardWebhooks, Webhooks, WebhookSender, WebhookWorker
from oncely.worker import Worker
from tests.database import Database

metadata = MetaData()
outbox = Outbox(metadata)
keys = IdempotencyKeys(metadata)
inbox = Inbox(metadata)
effects = Effects(metadata, stale_after=timedelta(seconds=30))
webhooks = Webhooks(metadata, keyring=Keyring({{"one": bytes(range(32))}}, write="one"))

sessions = async_sessionmaker(Database({url!r}, {schema!r}).engine())
redis = Redis.from_url({redis_url!r})
relay = Relay(outbox, sessions, stream_publisher(redis, {stream!r}))
consumer = StreamConsumer(redis, stream={stream!r}, group="billing")
retention = Retention(sessions, {{outbox: timedelta(days=7), keys: timedelta(days=1)}})


async def book(session, event): ...


booking = StreamConsumer(redis, stream={stream!r}, group="booking")
booking.subscribe("order.paid", inbox.handler(sessions, book, consumer="booking"))
worker = Worker(relay, consumer, retention)
calm = StreamConsumer(redis, stream={stream!r}, group="billing", concurrency=8)
careful = Worker(Retention(sessions, {{effects: timedelta(days=7)}}))
forgetful = [relay, calm, Retention(sessions, {{inbox: timedelta(days=30)}})]
everything = [worker, inbox, effects, webhooks]
outboxes = [outbox, sessions]
rooms = (sessions, outbox, keys, inbox, effects, webhooks)
of_engine = [sessions.kw["bind"], outbox]
nothing = []
two_consumers = [consumer, booking]


class OurOwn:
    table = inbox.table

    async def prune(self, session, *, older_than, limit):
        return 0


mixed = [relay, "ours", OurOwn(), Retention(sessions, {{OurOwn(): timedelta(days=1)}})]
webhook_worker = WebhookWorker(webhooks, sessions, sender=WebhookSender(StandardWebhooks({secret!r})))


def make():
    return everything


async def make_later():
    return everything


def broken():
    raise LookupError("no configuration")
"""


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


@dataclass(frozen=True)
class Shop:
    """An application, twice: as a module that the command imports, and as objects to fill its tables with."""

    module: str
    engine: AsyncEngine
    sessions: Sessions
    redis: Redis
    stream: str
    outbox: Outbox
    keys: IdempotencyKeys
    inbox: Inbox
    effects: Effects
    webhooks: Webhooks

    def target(self, attribute: str = "everything") -> str:
        """The import string of an attribute of the module."""
        return f"{self.module}:{attribute}"


# click before 8.2 keeps stderr apart only when asked to.
_APART: dict[str, Any] = {"mix_stderr": False}
_RUNNER = CliRunner(**_APART if "mix_stderr" in signature(CliRunner.__init__).parameters else {})


async def oncely(*words: str, env: Mapping[str, str] | None = None, answer: str | None = None) -> Ran:
    """Run the command, in a thread, since it has an event loop of its own. It finds no terminal."""
    quiet = {"ONCELY_DATABASE_URL": None, "ONCELY_REDIS_URL": None, "ONCELY_DEBUG": None}
    result = await asyncio.to_thread(
        _RUNNER.invoke, app, list(words), input=answer, env=quiet | dict(env or {}), prog_name="oncely"
    )
    return Ran(result.exit_code, result.stdout, result.stderr)


def place(database: Database) -> list[str]:
    """Options that lead to the database as a person would write them: without a driver."""
    url = make_url(database.url).set(drivername="postgresql").render_as_string(hide_password=False)
    return ["--database-url", url, *(["--schema", database.schema] if database.schema else [])]


async def in_terminal(*words: str, answer: str = "", columns: int = 80) -> Ran:
    """Run the command as a process on a terminal; `answer` is typed. All it says is stdout, uncoloured."""
    return await asyncio.to_thread(_in_terminal, words, answer, columns)


def _in_terminal(words: Sequence[str], answer: str, columns: int) -> Ran:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ONCELY_")}
    environment |= {"TERM": "xterm"}
    environment.pop("COLUMNS", None)
    command = [sys.executable, "-m", "oncely.cli", *words]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        os.write(ours, answer.encode())
        said = b""
        with contextlib.suppress(OSError):  # how the end of a terminal reads on Linux
            while part := os.read(ours, 65_536):
                said += part
    os.close(ours)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said.decode())
    return Ran(process.returncode, plain.replace("\r\n", "\n"), "")


@asynccontextmanager
async def shop(
    folder: Path, database: Database, engine: AsyncEngine, redis: Redis, redis_url: str, stream: str
) -> AsyncIterator[Shop]:
    """The application on this database and stream, its tables made."""
    module = f"shop_{uuid.uuid4().hex}"
    text = _MODULE.format(
        url=database.url, schema=database.schema, redis_url=redis_url, stream=stream, secret=SECRET
    )
    (folder / f"{module}.py").write_text(text)
    metadata = MetaData()
    sessions = async_sessionmaker(engine)
    made = Shop(
        module=module,
        engine=engine,
        sessions=sessions,
        redis=redis,
        stream=stream,
        outbox=Outbox(metadata),
        keys=IdempotencyKeys(metadata),
        inbox=Inbox(metadata),
        effects=Effects(metadata, stale_after=timedelta(seconds=30), sessionmaker=sessions),
        webhooks=Webhooks(metadata, keyring=Keyring({"one": KEY}, write="one")),
    )
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    sys.path.insert(0, str(folder))
    try:
        yield made
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(module, None)
