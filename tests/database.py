"""A database for one test: its URL, and engines that reach it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

__all__ = ["Database", "both_drivers"]

both_drivers = pytest.mark.usefixtures("driver")
"""The test runs once with each driver. Without it, `database` is reached by asyncpg alone."""

_SCHEMA = "oncely_test"


@dataclass(frozen=True)
class Database:
    """`url` is a SQLAlchemy URL with an async driver; `schema` is set when the server is the user's."""

    url: str
    schema: str | None = None

    @classmethod
    @contextmanager
    def in_schema(cls, url: str, driver: str) -> Iterator[Database]:
        """The schema `oncely_test` of a database of the user's, made empty and dropped after."""
        given = make_url(url)
        admin_url = given.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(admin_url, autocommit=True) as admin:
            admin.execute("SET lock_timeout = '20s'")  # a test that failed may have left a transaction open
            admin.execute(f"DROP SCHEMA IF EXISTS {_SCHEMA} CASCADE")
            admin.execute(f"CREATE SCHEMA {_SCHEMA}")
            try:
                target = given.set(drivername=f"postgresql+{driver}")
                yield cls(target.render_as_string(hide_password=False), _SCHEMA)
            finally:
                admin.execute(f"DROP SCHEMA IF EXISTS {_SCHEMA} CASCADE")

    @classmethod
    def in_file(cls, path: Path) -> Database:
        """An empty SQLite database, in WAL mode."""
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
        return cls(f"sqlite+aiosqlite:///{path}")

    @property
    def driver(self) -> str:
        return make_url(self.url).get_driver_name()

    def engine(self, **options: Any) -> AsyncEngine:
        """An engine on this database; options are create_async_engine's."""
        connect_args = dict(options.pop("connect_args", {}))
        if self.schema is not None and self.driver == "asyncpg":
            connect_args.setdefault("server_settings", {})["search_path"] = self.schema
        elif self.schema is not None:
            connect_args["options"] = f"-csearch_path={self.schema}"
        return create_async_engine(self.url, connect_args=connect_args, **options)

    def dsn(self) -> str:
        """A libpq URL, for a driver used bare."""
        url: URL = make_url(self.url).set(drivername="postgresql")
        if self.schema is not None:
            url = url.update_query_dict({"options": f"-csearch_path={self.schema}"})
        return url.render_as_string(hide_password=False)
