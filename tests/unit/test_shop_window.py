"""What `from oncely import …` promises."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import oncely

WINDOWS = [
    "oncely",
    "oncely.effects",
    "oncely.fastapi",
    "oncely.streams",
    "oncely.telemetry",
    "oncely.testing",
    "oncely.webhooks",
]


@pytest.mark.parametrize("name", WINDOWS)
def test_all_is_sorted_and_complete(name: str) -> None:
    window = importlib.import_module(name)
    assert window.__all__ == sorted(window.__all__, key=_constants_then_classes_then_functions)
    for exported in window.__all__:
        assert hasattr(window, exported), exported


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_holds_imports_and_nothing_else(name: str) -> None:
    source = Path(inspect.getfile(importlib.import_module(name))).read_text()
    docstring, *rest = ast.parse(source).body
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, (ast.ImportFrom, ast.Assign, ast.AnnAssign)) for node in rest)


def test_every_error_is_in_the_tree_drawn_on_top() -> None:
    tree = oncely.errors.__doc__
    assert tree is not None
    for name in oncely.errors.__all__:
        assert name in tree, name


def _constants_then_classes_then_functions(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)
