"""`oncely run` before it runs: what it is given must be a worker, and what it asks for must be there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import async_sessionmaker

from oncely import Event, Outbox, Relay, Worker
from tests.command import oncely


async def publish(events: Sequence[Event]) -> None: ...


async def test_an_event_loop_that_is_not_installed_ends_it_with_2_and_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(target: str, *, app_dir: Path) -> Worker:
        return Worker(Relay(Outbox(MetaData()), async_sessionmaker(), publish))

    monkeypatch.setattr("oncely.cli.run.load", load)
    monkeypatch.setitem(sys.modules, "uvloop", None)
    ran = await oncely("run", "shop:worker", "--uvloop")
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert ran.stderr == "oncely: --uvloop needs uvloop: pip install uvloop\n"
