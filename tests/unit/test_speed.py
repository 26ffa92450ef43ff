"""What `make bench` leaves behind, and what the README shows of it."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.benchmarks import peers, report
from tests.benchmarks.ratio import Absent, Curve, Ratio

README = Path(__file__).parents[2] / "README.md"
FACTS = {
    "time": "2026-11-30T09:00:00+00:00",
    "cores": "2",
    "load": "0.1",
    "python": "3.11",
    "postgresql": "18",
    "valkey": "8",
    "sqlalchemy": "2.1",
    "asyncpg": "0.31",
}
RATIO = Ratio.of(
    "ours / theirs", [(300.0, 100.0), (200.0, 100.0), (2500.0, 100.0)], limit=2.5, against="them"
)
ABSENT = Absent("ours / a stranger's", "needs Python 4")
CURVE = Curve("one relay", "events a batch", {"": {10: (1.0, 2.0)}, "slow": {1_000: (3.0,)}})


def test_a_ratio_is_the_median_of_its_rounds_and_not_that_of_the_medians() -> None:
    assert (RATIO.ours, RATIO.bare, RATIO.ratio, RATIO.lowest, RATIO.highest) == (300, 100, 3, 2, 25)


def test_a_ratio_breaks_its_promise_below_its_limit_and_never_without_one() -> None:
    limits = (3.1, 3.0, None)
    assert [Ratio.of("", RATIO.rounds, limit=limit).holds for limit in limits] == [False, True, True]


def test_the_table_names_what_was_not_measured_and_why() -> None:
    assert report.markdown([RATIO, ABSENT, CURVE], FACTS).splitlines() == [
        "2026-11-30, 2 cores, load 0.1, Python 3.11, PostgreSQL 18, Valkey 8, SQLAlchemy 2.1, asyncpg 0.31",
        "",
        "| ours / the other | ours, 1/s | other, 1/s | ratio | range | promised | the other differs |",
        "|---|--:|--:|--:|--:|--:|---|",
        "| ours / theirs | 300 | 100 | 3.00 | 2.00 to 25.00 | 2.50 |  |",
        "| ours / a stranger's | | | | | | not measured: needs Python 4 |",
    ]


def test_only_what_stands_between_the_marks_is_replaced() -> None:
    text = f"before\n{report.BEGIN}old\n{report.END}\nafter\n"
    assert report.between_marks(text, "new\n") == f"before\n{report.BEGIN}new\n{report.END}\nafter\n"


def test_the_file_has_every_measurement_of_every_round(tmp_path: Path) -> None:
    report.write_measurements([RATIO, ABSENT, CURVE], FACTS, tmp_path / "bench.csv")
    with (tmp_path / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["what"], row["who"], row["round"], row["per_second"]) for row in rows] == [
        ("ours / theirs", "oncely", "1", "300.0"),
        ("ours / theirs", "them", "1", "100.0"),
        ("ours / theirs", "oncely", "2", "200.0"),
        ("ours / theirs", "them", "2", "100.0"),
        ("ours / theirs", "oncely", "3", "2500.0"),
        ("ours / theirs", "them", "3", "100.0"),
        ("events a batch: 10, one relay", "oncely", "1", "1.0"),
        ("events a batch: 10, one relay", "oncely", "2", "2.0"),
        ("events a batch: 1,000, one relay, slow", "oncely", "1", "3.0"),
    ]
    assert {name: rows[0][name] for name in FACTS} == FACTS


def test_the_table_of_the_readme_has_a_row_for_every_peer() -> None:
    shown = _shown()
    names = [peer.name for peer in peers.PEERS] + [absent.name for absent in peers.UNMEASURED]
    drains = [f"draining 10,000 events / {name}" for name in ["bare asyncpg", *names]]
    assert sorted(name for name in shown if name in drains) == sorted(drains)


def test_the_pictures_of_the_readme_are_there_and_those_of_the_speed_are_in_it() -> None:
    pictures = re.findall(r"!\[[^]]+\]\((\S+)\)", README.read_text())
    assert [picture for picture in pictures if not (README.parent / picture).is_file()] == []
    drawn = {f"docs/speed/{path.name}" for path in (README.parent / "docs/speed").iterdir()}
    assert drawn == {picture for picture in pictures if picture.startswith("docs/speed/")}


@pytest.mark.parametrize(("handled", "pending"), [(9, 0), (11, 0), (10, 1)])
async def test_a_drain_that_lost_doubled_or_left_an_event_is_no_figure(handled: int, pending: int) -> None:
    async with _answering({"seconds": 1.0, "handled": handled, "pending": pending}) as contestant:
        with pytest.raises(AssertionError, match="somebody: drain 10"):
            await contestant.rate("drain", 10)


async def test_a_peer_that_ends_says_with_which_error() -> None:
    async with _answering() as contestant:
        with pytest.raises(peers.Impossible, match="somebody ended: no table"):
            await contestant.line()


def test_a_peer_that_wants_another_python_says_which() -> None:
    error = (
        "ERROR: Ignored the following versions that require a different python version:"
        " 0.1.0 Requires-Python >=3.12; 0.2.0 Requires-Python >=3.12\nERROR: No matching distribution"
    )
    assert peers.why(error) == "needs Python >=3.12"


def _shown() -> list[str]:
    """The first cell of each row between the marks."""
    _, _, rest = README.read_text().partition(report.BEGIN)
    inside, mark, _ = rest.partition(report.END)
    assert mark
    return [line.split("|")[1].strip() for line in inside.splitlines() if line.startswith("| ")][1:]


@contextlib.asynccontextmanager
async def _answering(*answers: dict[str, float]) -> AsyncIterator[peers.Contestant]:
    """A process that gives these answers, says on stderr that it has no table, and ends."""
    lines = "\n".join(json.dumps(answer) for answer in answers)
    script = f"import sys; print({lines!r}) if {bool(lines)} else sys.exit('no table')"
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        yield peers.Contestant(peers.Peer("somebody", "", (), ""), process, errors)
        await process.wait()
