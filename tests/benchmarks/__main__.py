"""`make bench`: every measurement, one table; exit 1 when a promise does not hold."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import sys

from rich.console import Console

import tests.benchmarks
from oncely.testing import EmbeddedPostgres, EmbeddedValkey
from tests.benchmarks import report
from tests.benchmarks.ratio import Absent, Ratio, Servers


def main() -> int:
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    names = [name for _, name, _ in pkgutil.iter_modules(tests.benchmarks.__path__)]
    modules = [importlib.import_module(f"tests.benchmarks.{name}") for name in names if name != "__main__"]
    chosen = [
        m
        for m in modules
        if hasattr(m, "measure") and (not sys.argv[1:] or m.__name__.split(".")[-1] in sys.argv[1:])
    ]
    results: list[Ratio | Absent] = []
    with EmbeddedPostgres(_AS_IN_PRODUCTION) as postgres, EmbeddedValkey() as valkey:
        for module in chosen:
            with console.status(f"measuring {module.__name__.split('.')[-1]}"):
                results += asyncio.run(module.measure(Servers(postgres, valkey)))
        facts = asyncio.run(report.machine(postgres, valkey))
    console.print(report.table(results))
    report.write_measurements(results, facts)
    return 0 if all(r.holds for r in results if isinstance(r, Ratio)) else 1


# A commit waits for the disk, as it does on any server that keeps what it was told.
_AS_IN_PRODUCTION = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}


if __name__ == "__main__":
    sys.exit(main())
