"""Failures: a line or two on stderr and an exit code; the traceback only for those who ask.

0  done, also when there was nothing to do
1  something is wrong: not found, not reachable, refused by the library, not confirmed
2  the command was not understood: an option, an import string, no terminal to ask on
"""

from __future__ import annotations

import errno
import functools
import inspect
import traceback
from collections.abc import Callable, Container
from typing import Annotated, ParamSpec

import typer
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from oncely.errors import OncelyError
from oncely.transaction import is_unavailable, sqlstates

__all__ = ["WRONG", "WRONG_USE", "Failure", "add_parameters", "explain", "printable", "reported"]

_P = ParamSpec("_P")

WRONG = 1
WRONG_USE = 2


class Failure(Exception):
    """What a command says when it cannot go on, and the code that it exits with."""

    def __init__(self, message: str, *, exit_code: int = WRONG) -> None:
        super().__init__(message)
        self.exit_code = exit_code


Verbose = Annotated[bool, typer.Option("--verbose", envvar="ONCELY_DEBUG", help="Show an error's traceback.")]


def reported(command: Callable[_P, None]) -> Callable[..., None]:
    """The command with an option `--verbose`, and its errors as lines on stderr."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        verbose = kwargs.pop("verbose", False)
        try:
            command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise  # typer's own; a reader that has seen enough
        except Exception as error:  # noqa: BLE001  every error is reported, here and nowhere else
            if verbose:
                traceback.print_exception(error)
            typer.echo(f"oncely: {printable(explain(error))}", err=True)
            raise typer.Exit(error.exit_code if isinstance(error, Failure) else WRONG) from None

    parameters = add_parameters(command, {"verbose": (Verbose, False)})
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def add_parameters(
    command: Callable[..., None],
    added: dict[str, tuple[object, object]],
    *,
    instead_of: Container[str | None] = (),
) -> list[inspect.Parameter]:
    """The command's parameters for typer, with more of them: annotation and default by name."""
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.name not in instead_of
    ]
    for name, (annotation, default) in added.items():
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
    return parameters


def explain(error: BaseException) -> str:
    """What is wrong, in a line or two, without SQL, parameters or addresses that hold a password."""
    if isinstance(error, (Failure, OncelyError)):
        return str(error)
    if isinstance(error, DBAPIError):
        # SQLAlchemy 2.0 puts a class before what asyncpg says, which is the cause.
        cause = error.orig.__cause__ if error.orig is not None else None
        said = _first_line(cause if getattr(cause, "sqlstate", None) else error.orig)
        if is_unavailable(error):
            return f"the database cannot be reached: {said}"
        code = next(iter(sqlstates(error)), None)
        return f"the database says: {said}" + (f" ({code})" if code else "")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"nothing more can be written: {_first_line(error)}"
    if type(error).__module__.startswith("redis."):
        return _explain_redis(error)
    if is_unavailable(error):
        return f"the database cannot be reached: {_first_line(error)}"
    if isinstance(error, SQLAlchemyError):
        return f"{type(error).__name__}: {_first_line(error)}"
    if isinstance(error, ValueError):
        return _first_line(error)
    return f"{type(error).__name__}: {_first_line(error)} (--verbose shows where)"


def _explain_redis(error: BaseException) -> str:
    from oncely.streams.faults import is_outage  # it imports redis, which is there: its error is

    return f"Redis {'cannot be reached' if is_outage(error) else 'says'}: {_first_line(error)}"


def printable(text: str) -> str:
    """The text without what a terminal would obey: an error's message may be a stranger's."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else f"\\x{ord(letter):02x}" for letter in text
    )


def _first_line(error: BaseException | None) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
