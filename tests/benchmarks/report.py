"""What is left of a run: a table on the screen and in the README, and every measurement in bench.csv."""

from __future__ import annotations

import csv
import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import asyncpg
from redis.asyncio import Redis
from rich.table import Table

from oncely.testing import EmbeddedPostgres, EmbeddedValkey
from tests.benchmarks.ratio import Absent, Curve, Ratio

__all__ = ["BEGIN", "END", "Result", "between_marks", "machine", "markdown", "table", "write_measurements"]

Result = Ratio | Absent | Curve
BEGIN = "<!-- make bench writes from here -->\n"
END = "<!-- to here -->"
_NAMED = {
    "Python": "python",
    "PostgreSQL": "postgresql",
    "Valkey": "valkey",
    "SQLAlchemy": "sqlalchemy",
    "asyncpg": "asyncpg",
}


async def machine(postgres: EmbeddedPostgres, valkey: EmbeddedValkey) -> dict[str, str]:
    """When, on what and with which versions the run was made: columns of bench.csv."""
    connection = await asyncpg.connect(postgres.dsn())
    settings = {
        name: await connection.fetchval(f"SHOW {name}")
        for name in ("server_version", "fsync", "synchronous_commit")
    }
    await connection.close()
    async with Redis.from_url(valkey.url) as redis:
        server = await redis.info("server")
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "postgresql": settings["server_version"].split()[0],
        "fsync": settings["fsync"],
        "synchronous_commit": settings["synchronous_commit"],
        "valkey": str(server.get("valkey_version") or server["redis_version"]),
        **{name: version(name) for name in ("oncely", "sqlalchemy", "asyncpg", "redis")},
    }


def table(results: Sequence[Result]) -> Table:
    made = Table(title="Ratios in one run: ours / bare limit, or ours / a peer's")
    for heading in ("what", "ours, 1/s", "other, 1/s", "ratio", "range", "promised", "", "the other differs"):
        figures = heading.endswith(("1/s", "ratio", "range", "promised"))
        made.add_column(heading, justify="right" if figures else "left")
    for result in results:
        if isinstance(result, Absent):
            made.add_row(result.name, "", "", "", "", "", "", f"[yellow]{result.reason}")
        elif isinstance(result, Ratio):
            verdict = "" if result.limit is None else "holds" if result.holds else "[red]broken"
            *cells, note = _cells(result)
            made.add_row(*cells, verdict, note)
        else:
            for what, rates in _places(result):
                middle, spread = statistics.median(rates), f"{min(rates):,.0f} to {max(rates):,.0f}"
                made.add_row(what, f"{middle:,.0f}", "", "", spread, "", "", "")
    return made


def markdown(results: Sequence[Result], facts: Mapping[str, str]) -> str:
    """The table of the README, under a line that says when and on what it was measured."""
    lines = [
        f"{facts['time'][:10]}, {facts['cores']} cores, load {facts['load']}, "
        + ", ".join(f"{name} {facts[key]}" for name, key in _NAMED.items()),
        "",
        "| ours / the other | ours, 1/s | other, 1/s | ratio | range | promised | the other differs |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for result in results:
        if isinstance(result, Absent):
            lines.append(f"| {result.name} | | | | | | not measured: {result.reason} |")
        elif isinstance(result, Ratio):
            lines.append(f"| {' | '.join(_cells(result))} |")
    return "\n".join(lines) + "\n"


def between_marks(text: str, inside: str) -> str:
    """The text with what stands between its marks replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{inside}{END}{after}"


def write_measurements(results: Sequence[Result], facts: Mapping[str, str], path: Path) -> None:
    """A line for each measurement of each round, in operations a second."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["what", "who", "round", "per_second", *facts])
        for result in results:
            writer.writerows([*line, *facts.values()] for line in _measurements(result))


def _cells(ratio: Ratio) -> tuple[str, ...]:
    return (
        ratio.name,
        f"{ratio.ours:,.0f}",
        f"{ratio.bare:,.0f}",
        f"{ratio.ratio:.2f}",
        f"{ratio.lowest:.2f} to {ratio.highest:.2f}",
        "" if ratio.limit is None else f"{ratio.limit:.2f}",
        ratio.note,
    )


def _measurements(result: Result) -> Iterator[tuple[str, str, int, float]]:
    match result:
        case Ratio():
            for number, (ours, other) in enumerate(result.rounds or [(result.ours, result.bare)], 1):
                yield result.name, "oncely", number, ours
                yield result.name, result.against, number, other
        case Curve():
            for what, rates in _places(result):
                yield from ((what, "oncely", number, each) for number, each in enumerate(rates, 1))


def _places(curve: Curve) -> Iterator[tuple[str, tuple[float, ...]]]:
    for name, line in curve.lines.items():
        for place, rates in line.items():
            yield ", ".join(filter(None, (f"{curve.axis}: {place:,}", curve.title, name))), rates
