"""The database's URL: as people have it, with an async driver that is there, and nothing of a password."""

from __future__ import annotations

import sys

import pytest

from oncely.cli.address import connect
from oncely.cli.failure import Failure


def without(monkeypatch: pytest.MonkeyPatch, *drivers: str) -> None:
    """As where these are not installed."""
    for driver in drivers:
        monkeypatch.setitem(sys.modules, driver, None)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("postgres://me@host/shop", "postgresql+psycopg://me@host/shop"),
        ("postgresql://me@host/shop", "postgresql+psycopg://me@host/shop"),
        ("postgresql+asyncpg://me@host/shop", "postgresql+asyncpg://me@host/shop"),
        ("sqlite:///shop.db", "sqlite+aiosqlite:///shop.db"),
        ("sqlite+aiosqlite:///shop.db", "sqlite+aiosqlite:///shop.db"),
    ],
)
def test_a_url_without_a_driver_gets_one(given: str, taken: str) -> None:
    assert str(connect(given).url) == taken


def test_asyncpg_is_taken_where_psycopg_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "psycopg")
    assert connect("postgresql://me@host/shop").url.drivername == "postgresql+asyncpg"


def test_a_machine_without_a_driver_is_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "psycopg", "asyncpg")
    with pytest.raises(Failure) as refused:
        connect("postgresql://me:hush@host/shop")
    assert str(refused.value) == "no async driver is installed: pip install 'psycopg[binary]', or asyncpg"


def test_a_driver_that_was_asked_for_and_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "asyncpg")
    with pytest.raises(Failure) as refused:
        connect("postgresql+asyncpg://me:hush@host:5433/shop")
    assert str(refused.value).startswith("no engine for database 'shop' at host:5433: ")
    assert "asyncpg" in str(refused.value)
    assert ("hush" in str(refused.value), refused.value.exit_code) == (False, 2)


def test_what_libpq_calls_otherwise_is_asyncpgs() -> None:
    url = connect("postgresql+asyncpg://host/shop?sslmode=require&application_name=me&connect_timeout=3").url
    assert dict(url.query) == {"ssl": "require"}


def test_a_timeout_that_is_no_number_is_wrong_use() -> None:
    with pytest.raises(Failure) as refused:
        connect("postgresql+asyncpg://me:hush@host/shop?connect_timeout=soon")
    assert str(refused.value) == "connect_timeout in the database's URL is no number: 'soon'"
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("given", ["hush", "postgresql://me:hush@host:port/shop"])
def test_what_is_no_url_is_not_repeated(given: str) -> None:
    with pytest.raises(Failure) as refused:
        connect(given)
    assert str(refused.value).startswith("the database's URL cannot be read; it has the form ")
    assert "hush" not in str(refused.value)
