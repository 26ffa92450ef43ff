"""Where the command begins. Without the extra `cli` it says so, in one line."""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["main"]


def main() -> None:
    """The command `oncely`."""
    missing = [name for name in ("rich", "typer") if importlib.util.find_spec(name) is None]
    if missing:
        lacks = " and ".join(missing)
        print(f"oncely: the command needs {lacks}: pip install 'oncely[cli]'", file=sys.stderr)
        raise SystemExit(1)
    from oncely.cli.app import app  # it imports what was looked for above

    app(prog_name="oncely")


if __name__ == "__main__":
    main()
