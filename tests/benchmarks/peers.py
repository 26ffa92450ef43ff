"""The same drain and the same emit by what users could pick instead, each at its documented best.

Every contestant is a process on a database of its own, in the one PostgreSQL of this run. Its package is
installed once into an environment of its own under `.bench/`, since their dependencies exclude one another.
They take turns, a round each, after one to warm up. After each round the handler's calls and the rows that
are left are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import asyncpg

from tests.benchmarks.adapters.adapter import Answer
from tests.benchmarks.ratio import Absent, Ratio, Servers

__all__ = [
    "BARE",
    "OURS",
    "PEERS",
    "UNMEASURED",
    "Contestant",
    "Impossible",
    "Peer",
    "measure",
    "running",
    "why",
]

EVENTS = 10_000
EMITS = 200
ROUNDS = 5
PROMISED = 2.5
ENVIRONMENTS = Path(".bench")


@dataclass(frozen=True)
class Peer:
    """`needs` is what is installed for it; `differs` is where its promises are not ours."""

    name: str
    adapter: str
    needs: tuple[str, ...]
    differs: str
    events: int = EVENTS


OURS = Peer("oncely", "ours", (), "rows kept, order per key, leased")
BARE = Peer("bare asyncpg", "bare", (), "rows kept, no order, locks held while publishing, no retries")
PEERS = (
    Peer(
        "txoutbox",
        "txoutbox",
        ("txoutbox[postgres]==0.2.2",),
        "rows deleted, order per key switched off, leased",
    ),
    Peer(
        "pgqueuer",
        "pgqueuer",
        ("pgqueuer[asyncpg]==1.6.0",),
        "a job queue: rows moved to a log, no order, heartbeats",
    ),
    Peer(
        "faststream-outbox",
        "faststream_outbox",
        ("faststream-outbox[asyncpg]==0.19.0",),
        "rows deleted, no order per key, leased",
    ),
    Peer(
        "event-forge",
        "event_forge",
        ("event-forge[postgresql]==1.5.0", "asyncpg"),
        "rows kept, no order, an UPDATE an event, locks expire",
        events=500,
    ),
    Peer(
        "procrastinate",
        "procrastinate",
        ("procrastinate==3.10.0", "psycopg[binary,pool]"),
        "a job queue: rows deleted, order by lock, a fetch a job",
        events=500,
    ),
)
UNMEASURED = (
    Absent("omni-box", "needs Python 3.12 or newer; no adapter yet"),
    Absent("pactix", "needs Python 3.12 or newer; no adapter yet"),
    Absent("fastapi-effects", "needs database roles, tenants and a schema of its own; no adapter yet"),
)


async def measure(servers: Servers) -> list[Ratio | Absent]:
    async with contextlib.AsyncExitStack() as stack:
        contestants: list[Contestant] = []
        absent = list(UNMEASURED)
        for peer in (OURS, BARE, *PEERS):
            try:
                python = await asyncio.to_thread(_environment, peer)
                contestants.append(await stack.enter_async_context(running(peer, python, servers)))
            except Impossible as reason:
                if peer not in PEERS:
                    raise
                absent.append(Absent(peer.name, str(reason).strip().splitlines()[-1]))
        for number in range(ROUNDS + 1):
            # Who goes first changes, so that a drift of the machine's speed favours nobody.
            for contestant in (
                contestants[number % len(contestants) :] + contestants[: number % len(contestants)]
            ):
                drained = await contestant.rate("drain", contestant.peer.events)
                emitted = await contestant.rate("emit", EMITS)
                if number:
                    contestant.drained.append(drained)
                    contestant.emitted.append(emitted)
    ours, *others = contestants
    return [
        *(_drains(ours, other) for other in others),
        *(Absent(f"draining {EVENTS:,} events / {each.name}", each.reason) for each in absent),
        *(_emits(ours, other) for other in others),
    ]


def _drains(ours: Contestant, other: Contestant) -> Ratio:
    peer, note = other.peer, other.peer.differs
    if peer.events != EVENTS:
        note += f"; {peer.events:,} events a round"
    return Ratio.of(
        f"draining {EVENTS:,} events / {peer.name}",
        list(zip(ours.drained, other.drained, strict=True)),
        limit=None if peer is BARE else PROMISED,
        against=peer.name,
        note=note,
    )


def _emits(ours: Contestant, other: Contestant) -> Ratio:
    return Ratio.of(
        f"a transaction with one emit / {other.peer.name}",
        list(zip(ours.emitted, other.emitted, strict=True)),
        limit=None,
        against=other.peer.name,
    )


class Impossible(Exception):
    """Why a contestant does not take part."""


def _environment(peer: Peer) -> Path:
    """The interpreter that has what the peer needs; ours is the one that runs this."""
    if not peer.needs:
        return Path(sys.executable)
    folder = ENVIRONMENTS / peer.adapter
    python, installed = folder / "bin" / "python", folder / "installed"
    needs = "\n".join(peer.needs)
    if not installed.exists() or installed.read_text() != needs:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.needs]
        result = subprocess.run(pip, capture_output=True, text=True, check=False)
        if result.returncode:
            raise Impossible(why(result.stderr))
        installed.write_text(needs)
    return python.absolute()


def why(error: str) -> str:
    if versions := re.findall(r"Requires-Python (\S+)", error):
        return f"needs Python {versions[-1].rstrip(';,')}"
    return "cannot be installed: " + (error.strip() or "pip failed").splitlines()[-1]


@contextlib.asynccontextmanager
async def running(peer: Peer, python: Path, servers: Servers) -> AsyncIterator[Contestant]:
    database = f"bench_{peer.adapter}"
    connection = await asyncpg.connect(servers.postgres.dsn())
    await connection.execute(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")
    await connection.execute(f"CREATE DATABASE {database}")
    await connection.close()
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            python,
            "-m",
            f"tests.benchmarks.adapters.{peer.adapter}",
            servers.postgres.dsn(database),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        contestant = Contestant(peer, process, errors)
        try:
            await contestant.line()
            yield contestant
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class Contestant:
    """A peer's process. Rates are events a second."""

    def __init__(self, peer: Peer, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self.peer = peer
        self.process = process
        self.errors = errors
        self.drained: list[float] = []
        self.emitted: list[float] = []

    async def rate(self, command: str, count: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {count}\n".encode())
        answer = Answer(**json.loads(await self.line()))
        told = (answer.handled, answer.pending)
        if told != ((count, 0) if command == "drain" else (0, count)):
            raise AssertionError(f"{self.peer.name}: {command} {count} handled and left {told}")
        return count / answer.seconds

    async def line(self) -> bytes:
        assert self.process.stdout is not None
        async with asyncio.timeout(120):
            line = await self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise Impossible(f"{self.peer.name} ended: {self.errors.read().decode()[-2000:]}")
        return line
