"""A few seconds of `make soak`: all kinds of faults at once, and the ledger over everything."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.soak.soak import soak


@pytest.mark.faults
async def test_a_line_under_faults_by_chance_balances_to_the_last_event() -> None:
    report = await soak(timedelta(seconds=5), seed=20261129)
    assert report.mistakes() == []
    assert report.balance.handled > 0
    assert report.faults.total() >= 3
