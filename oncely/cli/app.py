"""The commands, by name."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from oncely.cli.check import check
from oncely.cli.dead import dead
from oncely.cli.effects import effects
from oncely.cli.keys import keys
from oncely.cli.prune import prune
from oncely.cli.run import run
from oncely.cli.status import status

__all__ = ["app"]

app = typer.Typer(
    name="oncely",
    help="""Look after outboxes, streams, inboxes, keys, effects and webhooks.

    TARGET is an import string, package.module:attribute, of a Worker, of one of oncely's objects, or of
    a list of them. Without one, oncely's tables are found in --database-url or ONCELY_DATABASE_URL.

    Exit codes: 0 done; 1 something is wrong, not found or not confirmed; 2 wrong use of the command. Those
    of run are its own.
    """,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"oncely {version('oncely')}")
        raise typer.Exit


@app.callback()
def _commands(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """The options of the command itself; its help is the app's."""


app.command()(run)
app.command()(status)
app.command()(prune)
app.command()(check)
app.add_typer(dead, name="dead")
app.add_typer(effects, name="effects")
app.add_typer(keys, name="keys")
