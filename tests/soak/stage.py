"""Servers, wires and processes of the soak, and how each of them can be harmed."""

from __future__ import annotations

import asyncio
import random
import resource
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from oncely.testing import EmbeddedPostgres
from tests.forks import Forks, Process
from tests.outboxes import execute
from tests.soak.workers import NAME
from tests.streams import DurableValkey
from tests.wire import Wire

__all__ = ["Stage", "Worker"]

_POSTGRES = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "autovacuum_naptime": "1s",
    "autovacuum_vacuum_threshold": "500",
    "autovacuum_vacuum_scale_factor": "0.05",
}


@dataclass
class Worker:
    """One process and its successors. A veteran is never killed, so that its memory can be watched."""

    role: str
    number: int
    is_veteran: bool
    process: Process

    def memory(self) -> int:
        """Its resident set, in bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()


@dataclass
class Stage:
    """`engine` and `valkey.url` reach the servers past the wires, which only the workers use."""

    postgres: EmbeddedPostgres
    valkey: DurableValkey
    engine: AsyncEngine
    to_postgres: Wire
    to_valkey: Wire
    forks: Forks
    chance: random.Random
    rate: float
    workers: list[Worker] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    ended_by_themselves: int = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, seed: int, rate: float) -> AsyncIterator[Stage]:
        with (
            EmbeddedPostgres(_POSTGRES) as postgres,
            DurableValkey() as valkey,
            Forks("tests.soak.workers") as forks,
        ):
            engine = create_async_engine(postgres.url())
            async with (
                Wire.to_postgres(postgres.url()) as to_postgres,
                Wire.to_socket(valkey.socket_path) as to_valkey,
            ):
                stage = cls(
                    postgres, valkey, engine, to_postgres, to_valkey, forks, random.Random(seed), rate
                )
                try:
                    yield stage
                finally:
                    for worker in stage.workers:
                        worker.process.kill()
                    await engine.dispose()

    def start(self, role: str, number: int, *, is_veteran: bool = False) -> None:
        """A worker more."""
        self.workers.append(Worker(role, number, is_veteran, self._process(role, number)))

    def stop(self, role: str) -> None:
        """End all workers of a role for good."""
        for worker in [worker for worker in self.workers if worker.role == role]:
            worker.process.kill()
            self.workers.remove(worker)

    def replace_the_ended(self) -> None:
        """A worker that ended by itself is a mistake; it is noted, and the soak goes on."""
        for worker in self.workers:
            if worker.process.status is not None:
                self.ended_by_themselves += 1
                worker.process = self._process(worker.role, worker.number)

    async def harm(self) -> None:
        """One fault, by chance. It is over when this returns, but for what it has left behind."""
        kinds = {
            self._kill: 6,
            self._freeze: 4,
            self._terminate_backends: 3,
            self._cut_a_wire: 4,
            self._lose_a_reply: 4,
            self._restart_valkey: 1,
            self._restart_postgres: 1,
        }
        [kind] = self.chance.choices(list(kinds), list(kinds.values()))
        self.faults[kind.__name__.strip("_").replace("_", " ")] += 1
        await kind()

    async def _kill(self) -> None:
        victim = self.chance.choice([worker for worker in self.workers if not worker.is_veteran])
        victim.process.kill()
        victim.process = self._process(victim.role, victim.number)

    async def _freeze(self) -> None:
        """Some for longer than a lease."""
        victim = self.chance.choice(self.workers).process
        victim.kill(signal.SIGSTOP)
        await asyncio.sleep(self.chance.choice([0.2, 0.5, 2.5]))
        victim.kill(signal.SIGCONT)

    async def _terminate_backends(self) -> None:
        with suppress(DBAPIError, OSError):  # the server itself may have been restarted just now
            await execute(
                self.engine,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = :name",
                name=NAME,
            )

    async def _cut_a_wire(self) -> None:
        self.chance.choice([self.to_postgres, self.to_valkey]).cut()

    async def _lose_a_reply(self) -> None:
        self.chance.choice([self.to_postgres, self.to_valkey]).lose_next_reply()

    async def _restart_valkey(self) -> None:
        await asyncio.to_thread(self.valkey.kill)
        await asyncio.sleep(self.chance.random())
        await asyncio.to_thread(self.valkey.start)

    async def _restart_postgres(self) -> None:
        await asyncio.to_thread(self.chance.choice([self.postgres.stop, self.postgres.kill]))
        await asyncio.sleep(self.chance.random())
        await asyncio.to_thread(self.postgres.start)

    def _process(self, role: str, number: int) -> Process:
        seed = self.chance.randrange(2**32)
        urls = self.to_postgres.url, self.to_valkey.url
        return self.forks.start(role, number, *urls, seed, self.rate)
