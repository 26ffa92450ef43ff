"""What is left of a run: the table on the screen, and every single measurement in bench.csv."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import asyncpg
from redis.asyncio import Redis
from rich.table import Table

from oncely.testing import EmbeddedPostgres, EmbeddedValkey
from tests.benchmarks.ratio import Absent, Ratio

__all__ = ["machine", "table", "write_measurements"]


async def machine(postgres: EmbeddedPostgres, valkey: EmbeddedValkey) -> dict[str, str]:
    """When, on what and with which versions the run was made: columns of bench.csv."""
    connection = await asyncpg.connect(postgres.dsn())
    settings = await connection.fetch(
        "SELECT name, setting FROM pg_settings"
        " WHERE name IN ('server_version', 'fsync', 'synchronous_commit') ORDER BY name"
    )
    await connection.close()
    async with Redis.from_url(valkey.url) as redis:
        server = await redis.info("server")
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "postgresql": ", ".join(f"{row['name']} {row['setting']}" for row in settings),
        "valkey": str(server.get("valkey_version") or server["redis_version"]),
        **{name: version(name) for name in ("oncely", "sqlalchemy", "asyncpg", "redis")},
    }


def table(results: Sequence[Ratio | Absent]) -> Table:
    made = Table(title="Ratios in one run: ours / bare limit, or ours / a peer's")
    for heading in ("what", "ours, 1/s", "other, 1/s", "ratio", "range", "promised", "", "the other differs"):
        made.add_column(
            heading, justify="right" if heading.endswith(("1/s", "ratio", "range", "promised")) else "left"
        )
    for r in results:
        if isinstance(r, Absent):
            made.add_row(r.name, "", "", "", "", "", "", f"[yellow]{r.reason}")
            continue
        made.add_row(
            r.name,
            f"{r.ours:,.0f}",
            f"{r.bare:,.0f}",
            f"{r.ratio:.2f}",
            f"{r.lowest:.2f} to {r.highest:.2f}",
            "" if r.limit is None else f"{r.limit:.2f}",
            "" if r.limit is None else "holds" if r.holds else "[red]broken",
            r.note,
        )
    return made


def write_measurements(results: Sequence[Ratio | Absent], facts: dict[str, str]) -> None:
    """bench.csv: a line for each measurement of each round, in operations a second."""
    with Path("bench.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["what", "who", "round", "per_second", *facts])
        for result in results:
            if isinstance(result, Ratio):
                writer.writerows([*line, *facts.values()] for line in _measurements(result))


def _measurements(ratio: Ratio) -> Iterator[tuple[str, str, int, float]]:
    for number, (ours, other) in enumerate(ratio.rounds or [(ratio.ours, ratio.bare)], 1):
        yield ratio.name, "oncely", number, ours
        yield ratio.name, ratio.against, number, other
