"""A process of the shop, which can be frozen, looked at and killed, and does not outlive its parent."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from oncely.testing.server import EmbeddedServer

__all__ = ["WebServer", "Worker"]


class Worker(EmbeddedServer):
    """`python -m` what is given."""

    def __init__(self, *command: str) -> None:
        super().__init__()
        self.command = command

    @property
    def has_died(self) -> bool:
        """Whether it has ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def freeze(self) -> None:
        """Stops it where it is; it knows nothing of that."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            os.kill(self.pid, number)

    def _command(self) -> list[str]:
        return [sys.executable, "-m", *self.command]

    def _answers(self) -> bool:
        return True


class WebServer(Worker):
    """Uvicorn with the shop's application, on a Unix socket."""

    def __init__(self) -> None:
        super().__init__("uvicorn", "--factory", "examples.shop.app:create_app", "--log-level", "warning")
        self.command += ("--uds", str(self.socket_path))

    @property
    def socket_path(self) -> Path:
        return self.folder / "http"

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket_path)) == 0
