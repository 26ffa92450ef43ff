"""Of a report by `coverage json`, on stdin: how many branches were taken. Fails when that is too few.

coverage's own figure, and the `fail_under` that it goes by, counts lines and branches together, so that
many lines make up for few branches. Here the same limit holds for branches alone.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

__all__ = ["main"]

_PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def main() -> None:
    """Print the figure; exit with 1 when it is under the limit."""
    totals = json.load(sys.stdin)["totals"]
    taken, known = totals["covered_branches"], totals["num_branches"]
    least = tomllib.loads(_PYPROJECT.read_text())["tool"]["coverage"]["report"]["fail_under"]
    enough = taken * 100 >= least * known
    print(f"Branches: {taken:,} of {known:,} taken, {taken / known:.2%}; {least}% are asked for")
    if not enough and sys.version_info < (3, 12):
        print("Python 3.11 does not trace a coroutine after an error was thrown into it: take a newer one")
    sys.exit(not enough)


if __name__ == "__main__":
    main()
