"""The line as it is looked at, and what `make faults` shows: how long it took until all went on again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.acceptance.line import Line


@pytest.fixture
def recovered(record_property: Callable[[str, object], None]) -> Callable[[str, float], None]:
    """`recovered(fault, seconds)` notes how long after this fault everything was as it should be."""

    def note(fault: str, seconds: float) -> None:
        record_property("recovered", [fault, seconds])

    return note


@pytest.fixture
async def beside(engine: AsyncEngine, redis: Redis, stream: str) -> Line:
    """The line as it is seen from beside the wires."""
    line = Line(engine, redis, stream)
    await line.begin()
    return line


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.markexpr != "faults":
        return
    found = [
        value
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == "recovered"
    ]
    terminalreporter.section("recovery times")
    for fault, seconds in sorted(found):
        terminalreporter.write_line(f"{seconds:6.2f} s   {fault}")
