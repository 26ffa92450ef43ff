"""`make bench`: every measurement, one table; exit 1 when a promise does not hold.

Pictures are drawn of what was measured; the README's table is written when nothing was left out.
"""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import sys
from pathlib import Path

from rich.console import Console

import tests.benchmarks
from oncely.testing import EmbeddedPostgres, EmbeddedValkey
from tests.benchmarks import plots, report
from tests.benchmarks.ratio import Curve, Ratio, Servers

PICTURES = Path("docs/speed")


def main() -> int:
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    names = [name for _, name, _ in pkgutil.iter_modules(tests.benchmarks.__path__)]
    modules = [importlib.import_module(f"tests.benchmarks.{name}") for name in names if name != "__main__"]
    measuring = [module for module in modules if hasattr(module, "measure")]
    chosen = [m for m in measuring if not sys.argv[1:] or m.__name__.split(".")[-1] in sys.argv[1:]]
    results: list[report.Result] = []
    with EmbeddedPostgres(_AS_IN_PRODUCTION) as postgres, EmbeddedValkey() as valkey:
        for module in chosen:
            with console.status(f"measuring {module.__name__.split('.')[-1]}"):
                results += asyncio.run(module.measure(Servers(postgres, valkey)))
        facts = asyncio.run(report.machine(postgres, valkey))
    console.print(report.table(results))
    report.write_measurements(results, facts, Path("bench.csv"))
    ratios = [result for result in results if isinstance(result, Ratio)]
    if curves := [result for result in results if isinstance(result, Curve)]:
        plots.draw_growth(curves, PICTURES / "growth.svg")
    if drains := [ratio for ratio in ratios if ratio.name.startswith("draining") and ratio.against != "bare"]:
        plots.draw_peers(drains, PICTURES / "peers.svg")
    if chosen == measuring:
        readme = Path("README.md")
        readme.write_text(report.between_marks(readme.read_text(), report.markdown(results, facts)))
    return 0 if all(ratio.holds for ratio in ratios) else 1


# A commit waits for the disk, as it does on any server that keeps what it was told.
_AS_IN_PRODUCTION = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}


if __name__ == "__main__":
    sys.exit(main())
