"""The matrix tests what pyproject.toml promises."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = tomllib.loads(Path("pyproject.toml").read_text())


def test_the_lowest_environment_has_every_lower_bound_of_what_users_install() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    promised = [
        Requirement(line)
        for name in (None, "redis", "fastapi", "webhooks", "cli", "prometheus", "opentelemetry")
        for line in (extras[name] if name else PROJECT["project"]["dependencies"])
    ]
    bounds = {each.name: _versions(each, ">=") for each in promised}
    pinned = {each.name: _versions(each, "==") for each in _pins()}
    assert {name: pinned.get(name) for name in bounds} == bounds


def test_the_readme_has_every_environment() -> None:
    _, versions = Path("README.md").read_text().split("\n## Versions\n")
    rows = re.findall(r"^\| `([\w-]+)` \|", versions.partition("\n## ")[0], re.MULTILINE)
    assert sorted(rows) == sorted(PROJECT["tool"]["tox"]["env_list"])


def _pins() -> list[Requirement]:
    run = PROJECT["tool"]["tox"]["env_run_base"]
    return [
        Requirement(line) for entry in run["deps"] if "lowest" in entry["condition"] for line in entry["then"]
    ]


def _versions(requirement: Requirement, operator: str) -> list[tuple[int, ...]]:
    """The versions that it compares so, as numbers: 0.115 is 0.115.0."""
    found = [each.version for each in requirement.specifier if each.operator == operator]
    return [tuple(int(part) for part in f"{version}.0.0".split(".")[:3]) for version in found]
