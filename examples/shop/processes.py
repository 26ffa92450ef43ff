"""The processes of the shop: they can be frozen, looked at and killed, and do not outlive their parent."""

from __future__ import annotations

import os
import signal
import socket
import sys
from abc import abstractmethod
from pathlib import Path

from oncely.testing.server import EmbeddedServer

__all__ = ["Process", "WebServer", "WorkerProcess"]


class Process(EmbeddedServer):
    """`python -m` something."""

    exit_code: int | None = None
    """Of the one that was stopped last."""

    @property
    def has_died(self) -> bool:
        """Whether it has ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def freeze(self) -> None:
        """Stops it where it is; it knows nothing of that."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self, *, timeout: float = 20.0) -> None:
        process = self._process
        super().stop(timeout=timeout)
        if process is not None:
            self.exit_code = process.returncode

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            os.kill(self.pid, number)

    def _command(self) -> list[str]:
        return [sys.executable, "-m", *self._words()]

    @abstractmethod
    def _words(self) -> list[str]: ...


class WorkerProcess(Process):
    """`oncely run` with a worker of the shop."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target

    def _words(self) -> list[str]:
        return ["oncely.cli", "run", self.target]

    def _answers(self) -> bool:
        return True


class WebServer(Process):
    """Uvicorn with the shop's application, on a Unix socket."""

    @property
    def socket_path(self) -> Path:
        return self.folder / "http"

    def _words(self) -> list[str]:
        application = ["--factory", "examples.shop.app:create_app"]
        return ["uvicorn", *application, "--log-level", "warning", "--uds", str(self.socket_path)]

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket_path)) == 0
