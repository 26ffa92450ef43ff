"""`make coverage` counts branches for themselves, and fails when too few were taken."""

from __future__ import annotations

import io
import json
import sys

import pytest

from tests import branches


@pytest.mark.parametrize(
    ("taken", "exit_code", "figure"),
    [
        (1_900, False, "Branches: 1,900 of 2,000 taken, 95.00%; 95% are asked for\n"),
        (1_899, True, "Branches: 1,899 of 2,000 taken, 94.95%; 95% are asked for\n"),
    ],
)
def test_branches_under_the_limit_fail(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    taken: int,
    exit_code: bool,
    figure: str,
) -> None:
    report = json.dumps({"totals": {"covered_branches": taken, "num_branches": 2_000}})
    monkeypatch.setattr(sys, "stdin", io.StringIO(report))
    monkeypatch.setattr(sys, "version_info", (3, 13))
    with pytest.raises(SystemExit) as ended:
        branches.main()
    assert (ended.value.code, capsys.readouterr().out) == (exit_code, figure)
