"""The application's clock jumps by an hour, forth and back: leases, order and ids do not mind."""

from __future__ import annotations

import time
from collections.abc import Callable
from uuid import UUID

import pytest
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

import oncely.emission
from oncely.outbox import uuid7
from tests.acceptance.line import Line
from tests.outboxes import rows
from tests.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.in_schema]

HOUR = 3600


class Clock:
    """The time of day as the application sees it; the monotonic clock goes on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ahead = 0
        real = time.time
        patch.setattr(time, "time", lambda: real() + self.ahead)
        patch.setattr(oncely.emission, "uuid7", self._uuid7)

    def _uuid7(self) -> UUID:
        made = uuid7()
        return UUID(int=made.int + (self.ahead * 1000 << 80))  # the first 48 bits are milliseconds


async def test_a_clock_that_jumps_by_an_hour_loses_nothing_and_keeps_each_key_in_order(
    engine: AsyncEngine,
    redis: Redis,
    stream: str,
    monkeypatch: pytest.MonkeyPatch,
    recovered: Callable[[str, float], None],
) -> None:
    clock = Clock(monkeypatch)
    line = Line(engine, redis, stream)
    await line.begin()
    async with line.running():
        for jump in (+HOUR, -2 * HOUR, +HOUR):
            clock.ahead += jump
            jumped = time.monotonic()
            await line.emit(4)
            await until(line.is_done)
            recovered(f"the application's clock jumps by {jump // HOUR:+} h", time.monotonic() - jumped)
    await line.check()
    # The ids tell that there was a jump, or nothing was tested.
    wrong = "SELECT count(*) > 0 FROM outbox AS a JOIN outbox AS b ON a.position < b.position AND a.id > b.id"
    assert await rows(engine, wrong) == [(True,)]
