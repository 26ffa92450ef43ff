"""`make bench`: every measurement, one table; exit 1 when a promise does not hold."""

from __future__ import annotations

import asyncio
import csv
import importlib
import pkgutil
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import tests.benchmarks
from oncely.testing import EmbeddedPostgres, EmbeddedValkey
from tests.benchmarks.ratio import Ratio, Servers


def main() -> int:
    console = Console()
    names = [name for _, name, _ in pkgutil.iter_modules(tests.benchmarks.__path__)]
    modules = [importlib.import_module(f"tests.benchmarks.{name}") for name in names if name != "__main__"]
    chosen = [
        m
        for m in modules
        if hasattr(m, "measure") and (not sys.argv[1:] or m.__name__.split(".")[-1] in sys.argv[1:])
    ]
    ratios: list[Ratio] = []
    with EmbeddedPostgres() as postgres, EmbeddedValkey() as valkey:
        for module in chosen:
            with console.status(f"measuring {module.__name__.split('.')[-1]}"):
                ratios += asyncio.run(module.measure(Servers(postgres, valkey)))
    table = Table(title="Ratios in one run: ours / bare limit")
    for heading in ("what", "ours, 1/s", "bare, 1/s", "ratio", "range", "promised", ""):
        table.add_column(heading, justify="left" if heading in ("what", "") else "right")
    for r in ratios:
        spread = f"{r.lowest:.2f} to {r.highest:.2f}"
        verdict = "holds" if r.holds else "[red]broken"
        table.add_row(
            r.name, f"{r.ours:,.0f}", f"{r.bare:,.0f}", f"{r.ratio:.2f}", spread, f"{r.limit:.2f}", verdict
        )
    console.print(table)
    with Path("bench.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "ours", "bare", "ratio", "lowest", "highest", "limit"])
        writer.writerows([r.name, r.ours, r.bare, r.ratio, r.lowest, r.highest, r.limit] for r in ratios)
    return 0 if all(r.holds for r in ratios) else 1


if __name__ == "__main__":
    sys.exit(main())
