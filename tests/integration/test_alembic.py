"""Alembic sees oncely's tables on the user's MetaData, makes them, and then has nothing more to do."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import (
    Column,
    Engine,
    ForeignKey,
    Integer,
    MetaData,
    Table,
    Text,
    create_engine,
    inspect,
    make_url,
    text,
)

import oncely.tables
from tests.database import Database
from tests.migrations import CHECKS_TOO, Project, operations
from tests.schemas import schemas_of_their_own

MAKERS = {name.rsplit("_", 1)[0]: getattr(oncely.tables, name) for name in oncely.tables.__all__}
"""What makes the tables of each kind: (metadata, name, schema) -> its table or tables."""

CONVENTION = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


@dataclass(frozen=True)
class House:
    """How an application sets up its MetaData: patterns of the tables' names, conventions, schemas."""

    names: tuple[str, ...] = ("{}",)
    longest_names: bool = False
    convention: Mapping[str, str] | None = None
    on_metadata: str | None = None
    on_tables: str | None = None

    @property
    def schemas(self) -> list[str]:
        return [name for name in (self.on_metadata, self.on_tables) if name is not None]

    def metadata(self, schemas: Mapping[str | None, str]) -> MetaData:
        """Every table that oncely has, and two of the application's own. `schemas` gives their real names."""
        metadata = MetaData(schema=schemas.get(self.on_metadata), naming_convention=self.convention)
        for pattern in self.names:
            for kind in MAKERS:
                name = longest_name(kind) if self.longest_names else pattern.format(kind)
                MAKERS[kind](metadata, name, schemas.get(self.on_tables))
        customers = Table(
            "customers", metadata, Column("id", Integer, primary_key=True), Column("name", Text, unique=True)
        )
        Table(
            "orders",
            metadata,
            Column("id", Integer, primary_key=True),
            Column("customer_id", ForeignKey(customers.c.id), index=True),
        )
        return metadata


HOUSES = {
    "plain": House(),
    "naming_convention": House(convention=CONVENTION),
    "schema_of_the_tables": House(on_tables="tenant"),
    "schema_of_the_metadata": House(on_metadata="Tenant One", convention=CONVENTION),
    "two_schemas": House(on_metadata="shop", on_tables="oncely"),
    "two_of_each": House(names=("first_{}", "second_{}")),
    "mixed_case": House(names=("Shop {}",), convention=CONVENTION),
    "longest_names": House(longest_names=True, convention=CONVENTION),
}


def longest_name(kind: str) -> str:
    """The longest name that a table of this kind may have."""
    for length in range(63, 0, -1):
        name = (kind * 63)[:length]
        try:
            MAKERS[kind](MetaData(), name, None)
        except ValueError:
            continue
        return name
    raise AssertionError(f"no name is short enough for {kind}")


@pytest.fixture
def sync_engine(database: Database) -> Iterator[Engine]:
    engine = create_engine(make_url(database.dsn()).set(drivername="postgresql+psycopg"))
    yield engine
    engine.dispose()


def tables_in(engine: Engine, metadata: MetaData) -> set[str]:
    """The MetaData's tables that are there, by their full names."""
    inspector = inspect(engine)
    return {
        table.fullname
        for table in metadata.tables.values()
        if inspector.has_table(table.name, schema=table.schema)
    }


@pytest.mark.parametrize("house", HOUSES.values(), ids=HOUSES)
def test_autogenerate_makes_every_table_and_then_has_nothing_to_do(
    house: House, database: Database, sync_engine: Engine, tmp_path: Path
) -> None:
    with schemas_of_their_own(database, *house.schemas) as made:
        metadata = house.metadata(dict(zip(house.schemas, made, strict=True)))
        options: dict[str, Any] = {}
        if made:
            options = {
                "include_schemas": True,
                "include_name": lambda name, kind, _: kind != "schema" or name in (None, *made),
            }
        project = Project(tmp_path / "migrations", sync_engine, **options)
        everything = {table.fullname for table in metadata.tables.values()}

        project.revision(metadata)
        project.upgrade()
        assert tables_in(sync_engine, metadata) == everything
        assert project.difference(metadata) == []
        assert project.difference(metadata, **CHECKS_TOO) == []

        project.downgrade()
        assert tables_in(sync_engine, metadata) == set()

        metadata.create_all(sync_engine)
        fresh = Project(tmp_path / "fresh", sync_engine, **options)
        assert fresh.difference(metadata, **CHECKS_TOO) == []


def test_what_is_missing_is_made_again(sync_engine: Engine, tmp_path: Path) -> None:
    metadata = House().metadata({})
    metadata.create_all(sync_engine)
    with sync_engine.begin() as connection:
        for damage in (
            "ALTER TABLE outbox DROP CONSTRAINT outbox_tried_check",
            "ALTER TABLE outbox ALTER COLUMN attempts DROP DEFAULT",
            "ALTER TABLE outbox_claims ALTER COLUMN keys TYPE varchar[]",
            "DROP INDEX inbox_handled_at_idx",
        ):
            connection.execute(text(damage))
    project = Project(tmp_path / "migrations", sync_engine)
    assert len(project.difference(metadata, **CHECKS_TOO)) == 4
    project.revision(metadata, **CHECKS_TOO)
    project.upgrade()
    assert project.difference(metadata, **CHECKS_TOO) == []


def test_a_revision_imports_nothing_but_alembic_and_sqlalchemy(sync_engine: Engine, tmp_path: Path) -> None:
    file = Project(tmp_path / "migrations", sync_engine).revision(House().metadata({}))
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(file.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported == {"alembic", "sqlalchemy", "typing"}


MODELS = """
from sqlalchemy import MetaData

from oncely import Outbox
from oncely.idempotency import IdempotencyKeys

metadata = MetaData()
keys = IdempotencyKeys(metadata)
outbox = Outbox(metadata)
"""


def test_the_alembic_command_makes_the_tables_through_an_async_engine(
    database: Database, tmp_path: Path
) -> None:
    if database.schema is not None:
        pytest.skip("Alembic's own async template knows no search_path")

    def alembic(*arguments: str) -> str:
        command = [sys.executable, "-m", "alembic", *arguments]
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    alembic("init", "--template", "async", "migrations")
    (tmp_path / "models.py").write_text(MODELS)
    environment = tmp_path / "migrations" / "env.py"
    environment.write_text(
        environment.read_text().replace(
            "target_metadata = None", "from models import metadata as target_metadata"
        )
    )
    settings = tmp_path / "alembic.ini"
    lines = settings.read_text().splitlines()
    settings.write_text(
        "\n".join(
            f"sqlalchemy.url = {database.url}" if line.startswith("sqlalchemy.url") else line
            for line in lines
        )
    )
    alembic("revision", "--autogenerate", "-m", "the first")
    [file] = (tmp_path / "migrations" / "versions").glob("*.py")
    made = [line.split("'")[1] for line in operations(file) if line.startswith("op.create_table")]
    assert sorted(made) == ["idempotency_keys", "outbox", "outbox_claims"]
    alembic("upgrade", "head")
    assert "No new upgrade operations" in alembic("check")
