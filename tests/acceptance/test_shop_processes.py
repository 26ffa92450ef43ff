"""The demo finds a worker that does not end in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.shop.demo import stop
from examples.shop.processes import WorkerProcess


def test_a_worker_that_does_not_end_with_0_is_found_by_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with WorkerProcess("examples.shop.places:absent") as worker:
        [log] = stop([worker])
        assert worker.exit_code != 0
        assert log == worker.log()
