"""Output: tables for people, JSON for machines, and the question before anything is deleted or sent.

A table goes to a terminal as wide as that is; what does not fit is written row by row, name and value,
as psql does. Into a pipe or a file it goes in its natural width, one line for each row, so that nothing
is cut and `grep` finds whole rows. Nothing but what was asked for goes to stdout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated
from uuid import UUID

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from oncely.check.length import spell
from oncely.cli.failure import WRONG, WRONG_USE, Failure, printable

__all__ = [
    "Json",
    "Yes",
    "confirm",
    "print_facts",
    "print_json",
    "print_line",
    "print_table",
    "print_warning",
    "shown",
]

Json = Annotated[bool, typer.Option("--json", help="One JSON document, for machines.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; needed where there is no terminal.")]

_WIDE = 10_000  # characters; a pipe has no width


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """One table, or the rows one by one where it does not fit."""
    console = _console()
    words = [[shown(value) for value in row] for row in rows]
    width = sum(
        2 + max([len(name), *(_longest_line(row[at]) for row in words)]) for at, name in enumerate(columns)
    )
    if width > console.width:
        for row in words:
            for at, (name, word) in enumerate(zip(columns, row, strict=True)):
                lead = "" if at == 0 else "  "
                console.print(Text(f"{lead}{name}: {word}", style="bold" if at == 0 else ""), soft_wrap=True)
        return
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for at, name in enumerate(columns):
        are_numbers = rows and all(isinstance(row[at], (int, float)) for row in rows)
        table.add_column(name, justify="right" if are_numbers else "left", no_wrap=True)
    for row in words:
        table.add_row(*(Text(word) for word in row))
    with console.capture() as drawn:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in drawn.get().splitlines()))


def print_line(text: str = "") -> None:
    """One line on stdout, not wrapped."""
    _console().print(Text(text), soft_wrap=True)


def print_facts(facts: Mapping[str, object]) -> None:
    """What is known of one thing, a name and a value on each line, and an empty line."""
    width = max(map(len, facts))
    for name, value in facts.items():
        print_line(f"{name.replace('_', ' '):<{width}}  {shown(value)}")
    print_line()


def print_warning(text: str) -> None:
    """One line on stderr."""
    typer.echo(f"oncely: {printable(text)}", err=True)


def print_json(document: object, *, on_one_line: bool = False) -> None:
    """One JSON document on stdout: dataclasses as objects, times in ISO 8601, ages in seconds."""
    typer.echo(json.dumps(document, default=_plain, indent=None if on_one_line else 2))


def confirm(question: str, *, yes: bool) -> None:
    """Ask, and go on only after a yes. Failure when the answer is no, or nobody is there to answer."""
    if yes:
        print_warning(question)
        return
    if not sys.stdin.isatty():
        raise Failure(f"{question} There is no terminal to ask on: say --yes", exit_code=WRONG_USE)
    if not typer.confirm(f"{question} Go on?", err=True):
        raise Failure("nothing was done", exit_code=WRONG)


def shown(value: object) -> str:
    """A value as a person reads it; "-" for what is not there."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return spell(timedelta(seconds=value))
    if isinstance(value, timedelta):
        return spell(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    return printable(str(value))


def _console() -> Console:
    """Where tables go: as wide as the terminal, or as wide as they are."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(width=_WIDE, highlight=False)


def _longest_line(word: str) -> int:
    return max((Text(line).cell_len for line in word.splitlines()), default=0)


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
