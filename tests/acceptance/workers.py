"""Worker processes under a test's hand, and servers that are frozen."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from oncely.testing import EmbeddedPostgres, EmbeddedValkey

__all__ = ["Process", "frozen", "process"]

PATIENCE = 30.0


class Process:
    """A process, and what it has written so far, to stdout or stderr."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[str] = []

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    async def says(self, words: str) -> None:
        """Returns when it has written a line with these words, now or before."""
        async with asyncio.timeout(PATIENCE):
            while not any(words in line for line in self.lines):
                if not await self._read_line():
                    raise AssertionError(f"it ended without a word of {words!r}:\n{self.output}")

    def go(self) -> None:
        """Writes the line that it waits for."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ends(self) -> int:
        """Its exit code."""
        async with asyncio.timeout(PATIENCE):
            while await self._read_line():
                pass
            return await self._process.wait()

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.send(number)
        return await self.ends()

    async def ends_when_it_is_told_again(self, number: signal.Signals) -> int:
        """As `stop`, but it is told every now and then: two signals that come together are one."""
        ending = asyncio.ensure_future(self.ends())
        while not ending.done():
            with suppress(ProcessLookupError):
                self.send(number)
            await asyncio.wait({ending}, timeout=0.2)
        return ending.result()

    async def _read_line(self) -> bool:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if line:
            self.lines.append(line.decode().rstrip("\n"))
        return bool(line)


@asynccontextmanager
async def process(*command: str, **environment: str) -> AsyncIterator[Process]:
    """`python` with these arguments; killed at the end if it lives still."""
    pipe = asyncio.subprocess.PIPE
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "always::ResourceWarning", *command),
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | environment,
    )
    try:
        yield Process(started)
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


@contextmanager
def frozen(server: EmbeddedPostgres | EmbeddedValkey) -> Iterator[None]:
    """The server and each of its processes are stopped where they are, and know nothing of that."""
    assert server.pid is not None
    pids = [server.pid, *_children(server.pid)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)


def _children(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        if re.search(rf"^PPid:\s+{parent}$", text, re.MULTILINE):
            found.append(int(status.parent.name))
    return found
