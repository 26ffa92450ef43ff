"""The demo finds a worker that does not end in order."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from examples.shop.demo import stop
from examples.shop.processes import WorkerProcess


def test_a_worker_that_does_not_end_with_0_is_found_by_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with WorkerProcess("examples.shop.places:absent") as worker:
        while not worker.has_died:
            time.sleep(0.01)
        [log] = stop([worker])
        assert worker.exit_code == 2
        assert "has no attribute 'absent'" in log


def test_a_worker_that_is_stopped_before_it_has_begun_is_in_order() -> None:
    with WorkerProcess("examples.shop.relay:make_worker") as worker:
        assert stop([worker]) == []
