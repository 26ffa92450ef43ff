"""The target of a command: what an import string names, as uvicorn has them.

shop.worker:worker        an attribute of a module
shop.worker:app.worker    an attribute of that
shop.worker:make_worker   a function is called without arguments, and its result is the target
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from pathlib import Path

from oncely.cli.failure import WRONG_USE, Failure

__all__ = ["load"]


def load(import_string: str, *, app_dir: Path = Path()) -> object:
    """What the import string names; modules are looked for in `app_dir` first.

    Raises Failure, in a line: for text that is no import string, a module or attribute that is not
    there, and whatever the module raises when it is imported.
    """
    module_name, _, path = import_string.partition(":")
    if not module_name or not path:
        raise Failure(
            f'{import_string!r} is no import string; it has the form "package.module:attribute"',
            exit_code=WRONG_USE,
        )
    folder = str(app_dir.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    found = _module(module_name, folder)
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise Failure(
                f"{import_string!r}: {module_name} has no attribute {name!r}", exit_code=WRONG_USE
            ) from None
    return _made(found, import_string) if inspect.isroutine(found) else found


def _module(name: str, folder: str) -> object:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise Failure(
                f"there is no module {error.name!r} (looked in {folder} and on sys.path; see --app-dir)",
                exit_code=WRONG_USE,
            ) from None
        raise Failure(_raised(f"{name} cannot be imported", error)) from error
    except (Exception, SystemExit) as error:
        raise Failure(_raised(f"{name} cannot be imported", error)) from error


def _made(factory: object, import_string: str) -> object:
    if inspect.iscoroutinefunction(factory):
        raise Failure(f"{import_string!r} is an async function; name a plain one", exit_code=WRONG_USE)
    try:
        return factory()  # type: ignore[operator]  # a routine
    except (Exception, SystemExit) as error:
        raise Failure(_raised(f"{import_string} cannot be called", error)) from error


def _raised(what: str, error: BaseException) -> str:
    """The error, and the line outside of Python's own machinery that raised it."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and "importlib" not in frame.filename
    ]
    at = frames[-1] if frames else None
    place = f" ({os.path.relpath(at.filename)}:{at.lineno})" if at is not None else ""
    text = str(error).strip().partition("\n")[0]
    return f"{what}: {type(error).__name__}{': ' if text else ''}{text}{place}"
