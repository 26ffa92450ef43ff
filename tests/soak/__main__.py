"""`python -m tests.soak [--minutes 2] [--seed …]`: ends with a table, and with 1 when anything is wrong."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from datetime import timedelta

from rich.console import Console
from rich.table import Table

from tests.soak.soak import Report, soak


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.soak")
    arguments.add_argument("--minutes", type=float, default=2.0)
    arguments.add_argument("--seed", type=int, default=None)
    arguments.add_argument("--rate", type=float, default=40.0, help="transactions a second of each emitter")
    given = arguments.parse_args()
    seed = given.seed if given.seed is not None else random.randrange(10**6)
    console = Console()
    console.print(f"{given.minutes:g} minutes of faults, seed {seed} …")
    report = asyncio.run(soak(timedelta(minutes=given.minutes), seed=seed, rate=given.rate))
    console.print(_table(report))
    mistakes = report.mistakes()
    for mistake in mistakes:
        console.print(f"Wrong: {mistake}", style="red")
    console.print("Everything adds up." if not mistakes else "It does not add up.")
    return 1 if mistakes else 0


def _table(report: Report) -> Table:
    balance, order = report.balance, report.order
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for what, number, due in (
        ("seconds", f"{report.seconds:.0f}", ""),
        ("events committed", f"{balance.committed:,}", ""),
        ("  published, kept in the outbox", f"{balance.published:,}", ""),
        ("  published, pruned", f"{balance.pruned:,}", ""),
        ("  pending", f"{balance.pending:,}", "0"),
        ("  dead", f"{balance.dead:,}", f"{balance.refused_by_publisher:,}"),
        ("arrived in the stream", f"{order.arrived:,}", ""),
        ("  again", f"{order.repeated:,}", ""),
        ("  out of order", f"{order.out_of_order:,}", "0"),
        ("handled in the inbox's transaction", f"{balance.handled:,}", ""),
        ("  twice", f"{balance.handled_twice:,}", "0"),
        ("  never", f"{balance.never_handled:,}", "0"),
        ("dead letters", f"{balance.dead_letters:,}", f"{balance.refused_by_handler:,}"),
        ("longest pause between two that were handled", f"{balance.longest_pause:.1f} s", ""),
    ):
        table.add_row(what, number, due)
    table.add_section()
    for kind, count in sorted(report.faults.items()):
        table.add_row(kind, str(count), "")
    table.add_row("workers that ended by themselves", str(report.ended_by_themselves), "0")
    table.add_section()
    for trend in report.trends:
        before, after = trend.peaks()
        table.add_row(f"{trend.what}: peak, then in the last third", f"{before:,.0f}", f"{after:,.0f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
