"""A server as a child process: started in a folder of its own, stopped with its parent, folder removed.

It listens on a Unix socket only, so no port can be taken. On Linux the kernel ends it when the
process that started it dies, however it dies.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

__all__ = ["EmbeddedServer"]

_PR_SET_PDEATHSIG = 1


class EmbeddedServer(ABC):
    """Start and stop it as often as you like; `close` (or leaving `with`) removes its folder."""

    _stop_signal = signal.SIGTERM
    _death_signal = signal.SIGKILL

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="oncely-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._account: str | None = None  # who runs the server, when not ourselves

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._process.pid if self._process is not None else None

    def start(self, *, timeout: float = 30.0) -> None:
        """Start the server, unless it runs, and return when it answers. `timeout` is in seconds."""
        if self._process is not None and self._process.poll() is None:
            return
        started: Future[subprocess.Popen[bytes]] = Future()
        Thread(target=self._run, args=[started], name=str(self.folder), daemon=True).start()
        self._process = started.result()
        deadline = time.monotonic() + timeout
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{type(self).__name__} did not start:\n{self.log()}")
            time.sleep(0.01)

    def stop(self, *, timeout: float = 20.0) -> None:
        """Ask the server to end and wait for it; kill it after `timeout` seconds."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(self._stop_signal)
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
        self._process = None

    def kill(self) -> None:
        """End the server as a crash would: SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def close(self) -> None:
        """Stop the server and remove its folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """What the server has written so far."""
        return (self.folder / "log").read_text(errors="replace")

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, started: Future[subprocess.Popen[bytes]]) -> None:
        """Starts the server and waits for its end: to Linux, its parent is the thread that started it."""
        try:
            with (self.folder / "log").open("ab") as log:
                process = subprocess.Popen(  # noqa: S603  our own command line
                    self._command(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    start_new_session=True,  # a terminal's Ctrl-C is for the parent, which then stops us
                    preexec_fn=_dies_with_parent(self._death_signal),
                    user=self._account,
                )
        except BaseException as error:  # noqa: BLE001  it is raised where the result is asked for
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _answers(self) -> bool: ...


def _dies_with_parent(signal_number: int) -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal_number)
        if os.getppid() != parent:  # it died before we could ask
            os.kill(os.getpid(), signal_number)

    return ask
