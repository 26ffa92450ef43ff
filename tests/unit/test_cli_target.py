"""Import strings: what they name, and a line that says why one names nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncely.cli.failure import Failure
from oncely.cli.target import load

MODULE = """
class App:
    class state:
        worker = "the worker"

app = App()

def make():
    return "made"

async def make_later():
    return "made"

def broken():
    raise LookupError("no configuration")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "shop_of_target.py").write_text(MODULE)
    (tmp_path / "raises_of_target.py").write_text('x = 1\nraise RuntimeError("no\\nsettings")\n')
    (tmp_path / "exits_of_target.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "needs_of_target.py").write_text("import not_installed_of_target\n")
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in [name for name in sys.modules if name.endswith("_of_target")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("import_string", "found"),
    [
        ("shop_of_target:app.state.worker", "the worker"),
        ("shop_of_target:make", "made"),
    ],
)
def test_an_import_string_names_an_attribute_or_what_a_function_makes(
    folder: Path, import_string: str, found: object
) -> None:
    assert load(import_string, app_dir=folder) == found


@pytest.mark.parametrize(
    ("import_string", "message", "exit_code"),
    [
        ("shop", "'shop' is no import string; it has the form \"package.module:attribute\"", 2),
        (":x", "':x' is no import string; it has the form \"package.module:attribute\"", 2),
        ("shop_of_target:", "'shop_of_target:' is no import string; it has the form", 2),
        (
            "absent_of_target:x",
            "there is no module 'absent_of_target' (looked in {folder} and on sys.path",
            2,
        ),
        ("shop_of_target.inner:x", "there is no module 'shop_of_target.inner' (looked in", 2),
        (
            "shop_of_target:app.state.x",
            "'shop_of_target:app.state.x': shop_of_target has no attribute 'x'",
            2,
        ),
        (
            "shop_of_target:make_later",
            "'shop_of_target:make_later' is an async function; name a plain one",
            2,
        ),
        (
            "shop_of_target:broken",
            "shop_of_target:broken cannot be called: LookupError: no configuration (",
            1,
        ),
        ("raises_of_target:x", "raises_of_target cannot be imported: RuntimeError: no (", 1),
        ("exits_of_target:x", "exits_of_target cannot be imported: SystemExit: 3 (", 1),
        ("needs_of_target:x", "needs_of_target cannot be imported: ModuleNotFoundError: No module named", 1),
    ],
)
def test_an_import_string_that_names_nothing_is_refused_in_one_line(
    folder: Path, import_string: str, message: str, exit_code: int
) -> None:
    with pytest.raises(Failure) as refused:
        load(import_string, app_dir=folder)
    assert str(refused.value).startswith(message.format(folder=folder))
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == exit_code


def test_the_line_that_raised_is_named(folder: Path) -> None:
    with pytest.raises(Failure, match=r"raises_of_target\.py:2\)$"):
        load("raises_of_target:x", app_dir=folder)
