"""PgBouncer in transaction mode, the engine settings for it, and what is left behind in a session."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely.testing import EmbeddedPostgres
from oncely.testing.server import EmbeddedServer

__all__ = ["SETTINGS", "EmbeddedPgBouncer", "left_behind"]

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "asyncpg": {
            "statement_cache_size": 0,
            "prepared_statement_cache_size": 0,
            "prepared_statement_name_func": lambda: "",  # without a name it lasts until the next one
        },
        "psycopg": {"prepare_threshold": None},
    }
)
"""The `connect_args` of an engine behind the pooler, by its driver."""

_LISTEN_PORT = 6432
_CONFIGURATION = """
[databases]
* = host={server}

[pgbouncer]
listen_port = {port}
unix_socket_dir = {folder}
auth_type = trust
auth_file = {folder}/users
pool_mode = transaction
min_pool_size = {backends}
default_pool_size = {backends}
max_client_conn = 200
server_round_robin = 1
"""


class EmbeddedPgBouncer(EmbeddedServer):
    """Debian's PgBouncer, which gives each transaction the next of `backends` connections to the server."""

    def __init__(self, postgres: EmbeddedPostgres, *, backends: int) -> None:
        program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
        assert program is not None, "there is no pgbouncer"
        super().__init__()
        self._program = program
        self._account = "nobody" if os.geteuid() == 0 else None  # it refuses to run as root, too
        if self._account is not None:
            shutil.chown(self.folder, self._account)
        (self.folder / "users").write_text('"postgres" ""\n')
        self._configuration = self.folder / "pgbouncer.ini"
        self._configuration.write_text(
            _CONFIGURATION.format(
                server=postgres.folder, port=_LISTEN_PORT, folder=self.folder, backends=backends
            )
        )

    def url(self, driver: str, database: str) -> str:
        """A SQLAlchemy URL for `driver`."""
        return f"postgresql+{driver}://postgres@/{database}?host={self.folder}&port={_LISTEN_PORT}"

    def dsn(self, database: str) -> str:
        """A libpq URL."""
        return f"postgresql://postgres@/{database}?host={self.folder}&port={_LISTEN_PORT}"

    def _command(self) -> list[str]:
        return [self._program, str(self._configuration)]

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(Path(self.folder, f".s.PGSQL.{_LISTEN_PORT}")))
            except OSError:
                return False
            return True


async def left_behind(engine: AsyncEngine) -> list[tuple[str, str]]:
    """What a session holds that outlives a transaction: the kind of each thing, and its name."""
    async with engine.connect() as connection:
        return [(kind, name) for kind, name in await connection.execute(_LEFT_BEHIND)]


_LEFT_BEHIND = text("""
SELECT 'setting', name FROM pg_settings
    WHERE source = 'session' AND setting IS DISTINCT FROM reset_val AND name <> 'transaction_isolation'
UNION ALL SELECT 'prepared statement', statement FROM pg_prepared_statements
UNION ALL SELECT 'cursor', name FROM pg_cursors WHERE is_holdable
UNION ALL SELECT 'channel', channel FROM pg_listening_channels() AS channel
UNION ALL SELECT 'advisory lock', mode FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()
UNION ALL SELECT 'temporary table', relname::text FROM pg_class
    WHERE relpersistence = 't' AND pg_table_is_visible(oid)
""")
