"""An Alembic project in a temporary folder, driven through Alembic's own commands."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Any

import alembic
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, MetaData

__all__ = ["CHECKS_TOO", "Project"]

CHECKS_TOO = {"autogenerate_plugins": ["alembic.autogenerate.*", "alembic.ext.checkconstraint_byname"]}
"""What makes autogenerate compare CHECK constraints, which it does not by itself."""

_ENV = """
from alembic import context

given = context.config.attributes
with given["engine"].connect() as connection:
    context.configure(connection=connection, target_metadata=given["metadata"], **given["options"])
    with context.begin_transaction():
        context.run_migrations()
"""


class Project:
    """Migrations of the database that `engine` reaches. `options` are those of `context.configure`.

    Types and server defaults are always compared.
    """

    def __init__(self, folder: Path, engine: Engine, **options: Any) -> None:
        self.versions = folder / "versions"
        self.versions.mkdir(parents=True)
        (folder / "env.py").write_text(_ENV)
        template = Path(alembic.__file__).parent / "templates" / "generic" / "script.py.mako"
        shutil.copy(template, folder)
        self._config = Config()
        self._config.set_main_option("script_location", str(folder))
        self._config.set_main_option("path_separator", "os")
        self._config.attributes["engine"] = engine
        self._options = {"compare_type": True, "compare_server_default": True} | options

    def revision(self, metadata: MetaData, **options: Any) -> Path:
        """The file that `alembic revision --autogenerate` writes."""
        self._give(metadata, options)
        script = command.revision(self._config, autogenerate=True)
        assert not isinstance(script, list)
        assert script is not None
        return Path(script.path)

    def upgrade(self) -> None:
        """Runs the files alone: the project's MetaData is not given."""
        self._give(None, {})
        command.upgrade(self._config, "head")

    def downgrade(self, to: str = "base") -> None:
        self._give(None, {})
        command.downgrade(self._config, to)

    def difference(self, metadata: MetaData, **options: Any) -> list[str]:
        """The lines of a further revision's upgrade; the file is removed again."""
        file = self.revision(metadata, **options)
        lines = operations(file)
        file.unlink()
        return lines

    def _give(self, metadata: MetaData | None, options: dict[str, Any]) -> None:
        self._config.attributes["metadata"] = metadata
        self._config.attributes["options"] = self._options | options


def operations(file: Path) -> list[str]:
    """What a revision's `upgrade` does, one statement each."""
    [upgrade] = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "upgrade"
    ]
    is_nothing = (ast.Pass, ast.Constant)
    return [
        ast.unparse(node)
        for node in upgrade.body
        if not isinstance(node.value if isinstance(node, ast.Expr) else node, is_nothing)
    ]
