"""What `from oncely import …` promises."""

import ast
import importlib
import inspect
import subprocess
import sys
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
def test_a_window_holds_imports_and_what_they_need_and_nothing_else(name: str) -> None:
    source = Path(inspect.getfile(importlib.import_module(name))).read_text()
    docstring, *rest = ast.parse(source).body
    assert isinstance(docstring, ast.Expr)
    code = [node for node in rest if not isinstance(node, (ast.ImportFrom, ast.Assign, ast.AnnAssign))]
    assert [ast.unparse(node) for node in code if not ast.unparse(node).startswith("needs(")] == []


def test_the_core_imports_neither_drivers_nor_what_the_extras_bring() -> None:
    code = (
        "import sys, oncely, oncely.check, oncely.telemetry.logging, oncely.testing, oncely.worker\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    away = {"asyncpg", "psycopg", "redis", "fastapi", "starlette", "pydantic", "httpx", "h11", "cryptography"}
    away |= {"typer", "click", "rich", "prometheus_client", "opentelemetry", "http_message_signatures"}
    assert away & set(ast.literal_eval(ran.stdout)) == set()


def test_every_error_is_in_the_tree_drawn_on_top() -> None:
    tree = oncely.errors.__doc__
    assert tree is not None
    for name in oncely.errors.__all__:
        assert name in tree, name


def _constants_then_classes_then_functions(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)
