"""With its extras: a program of a user's runs on the wheel, type-checks against it, and has the command."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import oncely

PROGRAM = Path(__file__).with_name("program.py")


def test_it_is_the_installed_one() -> None:
    assert Path(oncely.__file__).is_relative_to(sys.prefix)


def test_a_program_runs_on_servers_that_it_starts() -> None:
    spec = importlib.util.spec_from_file_location("program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert program.main() == {
        "answers": [(201, None), (201, "true")],
        "orders": ["tea"],
        "emitted": 1.0,
        "published": 1,
        "handled": 2,
        "booked": ["tea"],
        "webhooks": 1,
        "pruned": 0,
    }


@pytest.mark.timeout(600)  # mypy has no cache here
def test_the_types_are_seen_from_outside() -> None:
    checked = _run(sys.executable, "-m", "mypy", "--strict", "--cache-dir", "mypy", str(PROGRAM))
    assert checked == (0, "Success: no issues found in 1 source file\n", "")


def test_the_command_is_there() -> None:
    command = str(Path(sys.executable).with_name("oncely"))
    code, out, _ = _run(command, "--help")
    assert code == 0
    assert [
        name for name in ("check", "dead", "effects", "keys", "prune", "run", "status") if name not in out
    ] == []
    assert _run(command, "--version") == (0, f"oncely {version('oncely')}\n", "")


def _run(*command: str) -> tuple[int, str, str]:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout, ran.stderr
