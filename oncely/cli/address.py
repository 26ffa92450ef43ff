"""The address of a database: a URL as people have it, with an async driver that is installed here."""

from __future__ import annotations

import importlib
from typing import Any

from sqlalchemy import URL, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from oncely.cli.failure import WRONG_USE, Failure

__all__ = ["connect", "named"]

_CONNECT_SECONDS = 10
_DRIVERS = ("postgresql+psycopg", "postgresql+psycopg_async", "postgresql+asyncpg", "sqlite+aiosqlite")


def connect(text: str) -> AsyncEngine:
    """An engine for `postgresql://`, or with a driver: `postgresql+asyncpg://`, `sqlite+aiosqlite://`."""
    try:
        url = make_url(text)
    except (SQLAlchemyError, ValueError):
        # Not with the text, or the error's: a password may be in it.
        raise Failure(
            "the database's URL cannot be read; it has the form postgresql://user:password@host/database",
            exit_code=WRONG_USE,
        ) from None
    url, options = _with_options(_with_driver(url))
    try:
        return create_async_engine(url, connect_args=options, hide_parameters=True)
    except (SQLAlchemyError, ImportError) as error:
        raise Failure(f"no engine for {named(url)}: {error}", exit_code=WRONG_USE) from None


def named(url: URL) -> str:
    """The database in words, with nothing secret in them."""
    host = url.host or url.query.get("host") or ""
    port = f":{url.port}" if url.port is not None else ""
    return f"database {url.database or ''!r}" + (f" at {host}{port}" if host else "")


def _with_driver(url: URL) -> URL:
    if url.drivername == "sqlite":
        return url.set(drivername="sqlite+aiosqlite")
    if url.drivername in ("postgres", "postgresql"):
        # psycopg first: it takes every parameter that a libpq URL may have.
        if _is_installed("psycopg"):
            return url.set(drivername="postgresql+psycopg")
        if _is_installed("asyncpg"):
            return url.set(drivername="postgresql+asyncpg")
        raise Failure("no async driver is installed: pip install 'psycopg[binary]', or asyncpg")
    if url.drivername in _DRIVERS:
        return url
    raise Failure(
        f"{url.drivername!r} is no driver that oncely works with; "
        "write postgresql://, postgresql+asyncpg:// or postgresql+psycopg://",
        exit_code=WRONG_USE,
    )


def _with_options(url: URL) -> tuple[URL, dict[str, Any]]:
    """The URL and the arguments of its driver; asyncpg has other names for what libpq's URLs say."""
    if url.drivername.startswith("postgresql+psycopg"):
        defaults = {"connect_timeout": _CONNECT_SECONDS, "application_name": "oncely"}
        return url, {name: value for name, value in defaults.items() if name not in url.query}
    if url.drivername != "postgresql+asyncpg":
        return url, {}
    query = dict(url.query)
    if "sslmode" in query:
        query["ssl"] = query.pop("sslmode")
    name = str(query.pop("application_name", "oncely"))
    timeout = str(query.pop("connect_timeout", _CONNECT_SECONDS))
    try:
        seconds = float(timeout)
    except ValueError:
        raise Failure(
            f"connect_timeout in the database's URL is no number: {timeout!r}", exit_code=WRONG_USE
        ) from None
    return url.set(query=query), {"timeout": seconds, "server_settings": {"application_name": name}}


def _is_installed(driver: str) -> bool:
    try:
        importlib.import_module(driver)
    except ImportError:  # also psycopg without a libpq
        return False
    return True
