"""Processes there to be killed, forked from one that has imported everything: starting Python takes too long.

    with Forks("tests.acceptance.relay_process") as forks:
        process = forks.start(url, path)          # asyncio.run(relay_process.main(url, path)), over there
        process.kill()
        assert await process.ended() == -signal.SIGKILL

Arguments are JSON. All processes are gone at the end of the block.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from tests.waiting import until

__all__ = ["Forks", "Process"]


class Process:
    """One that was started; `status` is its exit code, or below zero the signal that ended it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal, unless the process has ended."""
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def ended(self) -> int:
        """How it ended, once it has."""
        await until(lambda: self.status is not None)
        assert self.status is not None
        return self.status


class Forks:
    """Starts processes that run the module's `main`, a coroutine function."""

    def __init__(self, module: str) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "tests.forks", module]
        self._starter = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        self._started: queue.SimpleQueue[Process] = queue.SimpleQueue()
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def start(self, *arguments: object) -> Process:
        """Start one: `main(*arguments)`."""
        assert self._starter.stdin is not None
        self._starter.stdin.write(json.dumps(arguments).encode() + b"\n")
        self._starter.stdin.flush()
        return self._started.get(timeout=30)

    def close(self) -> None:
        """Kill those that are left."""
        assert self._starter.stdin is not None
        self._starter.stdin.close()
        self._starter.wait()
        self._listening.join()
        assert self._starter.stdout is not None
        self._starter.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _listen(self) -> None:
        assert self._starter.stdout is not None
        processes: dict[int, Process] = {}
        for line in self._starter.stdout:
            pid, status = json.loads(line)
            if status is None:
                processes[pid] = Process(pid)
                self._started.put(processes[pid])
            else:
                processes[pid].status = status


def serve(module: str) -> None:
    """The starter: forks for every line that it reads, and says who has ended how."""
    main = importlib.import_module(module).main
    children: dict[int, int] = {}
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd in children:
                selector.unregister(key.fd)
                os.close(key.fd)
                pid = children.pop(key.fd)
                _say(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                continue
            line = sys.stdin.readline()
            if not line:
                for pid in children.values():
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                return
            pid = os.fork()
            if pid == 0:
                _work(main, json.loads(line))
            ended = os.pidfd_open(pid)
            children[ended] = pid
            selector.register(ended, selectors.EVENT_READ)
            _say(pid, None)


def _work(main: Any, arguments: list[Any]) -> None:
    try:
        os.close(0)
        asyncio.run(main(*arguments))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _say(pid: int, status: int | None) -> None:
    print(json.dumps([pid, status]), flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
