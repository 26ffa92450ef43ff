"""What every contestant does when it is told to, and the loop that tells it.

A process per contestant, since the packages need versions of their dependencies that exclude one another.
It reads a command a line, `drain 10000` or `emit 1000`, and answers with a line of JSON. Only the standard
library is imported here: it has to run in everybody's environment.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["CALLERS", "PAYLOAD", "Adapter", "Answer", "at_once", "serve"]

CALLERS = 10
PAYLOAD = {"order": 4711, "customer": "c-1234", "lines": [{"sku": "a-1", "count": 2}], "total": "99.90"}
ORDERS = "CREATE TABLE IF NOT EXISTS orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text)"
INSERT_ORDER = "INSERT INTO orders (name) VALUES ('order')"


@dataclass(frozen=True)
class Answer:
    """Of a drain: how often the handler was called, and how many events the table still holds as pending."""

    seconds: float
    handled: int
    pending: int


class Adapter(ABC):
    """A contestant on a database of its own. `handled` counts the calls of a handler that does no more."""

    handled = 0

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    @abstractmethod
    async def prepare(self) -> None:
        """Once: make the tables, with the settings that its documentation recommends, and connect."""

    @abstractmethod
    async def fill(self, count: int) -> None:
        """Begin a round: so many events pending, nothing else in the tables, vacuumed and analysed."""

    @abstractmethod
    async def drain(self, count: int) -> None:
        """The part that is timed: until every event was handled, and is settled in the table."""

    async def rest(self) -> None:  # noqa: B027 (most have nothing to stop)
        """End a round, untimed: stop what still runs."""

    @abstractmethod
    async def pending(self) -> int:
        """How many events the table still holds as not done."""

    @abstractmethod
    async def emit(self, count: int) -> None:
        """Insert an order and one event in each of so many transactions, by CALLERS at once."""

    async def until_settled(self, count: int) -> None:
        """For workers that do not tell when they are done: the handler's count first, then the table."""
        while self.handled < count:  # noqa: ASYNC110 (the handlers only count, for all alike)
            await asyncio.sleep(0.001)
        while await self.pending():  # noqa: ASYNC110 (a table cannot call back)
            await asyncio.sleep(0.001)


def serve(
    adapter: Callable[[str], Adapter], run: Callable[[Coroutine[Any, Any, None]], object] = asyncio.run
) -> None:
    """Obey the commands on stdin until it ends. `run` is for who recommends a loop of its own."""
    # What a package prints goes to stderr: stdout is for the answers alone.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    async def obey() -> None:
        contestant = adapter(sys.argv[1])
        await contestant.prepare()
        print(json.dumps("ready"), file=answers)
        while line := await asyncio.to_thread(sys.stdin.readline):
            command, count = line.split()
            answer = await {"drain": _drain, "emit": _emit}[command](contestant, int(count))
            print(json.dumps(asdict(answer)), file=answers)

    run(obey())


async def at_once(work: Callable[[], Awaitable[None]], count: int) -> None:
    """CALLERS callers do the work count times in all."""

    async def caller() -> None:
        for _ in range(count // CALLERS):
            await work()

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def _drain(contestant: Adapter, count: int) -> Answer:
    await contestant.fill(count)
    contestant.handled = 0
    gc.collect()
    begin = time.perf_counter()
    await contestant.drain(count)
    seconds = time.perf_counter() - begin
    await contestant.rest()
    return Answer(seconds, contestant.handled, await contestant.pending())


async def _emit(contestant: Adapter, count: int) -> Answer:
    """`pending` is what the emits have left in a table that was empty."""
    await contestant.fill(0)
    contestant.handled = 0
    gc.collect()
    begin = time.perf_counter()
    await contestant.emit(count)
    return Answer(time.perf_counter() - begin, contestant.handled, await contestant.pending())
