"""Alembic makes the effects table on SQLite too, from a file that needs no oncely, and is then content."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import MetaData, create_engine, inspect

from oncely import Effects
from tests.effects import HOUR
from tests.migrations import CHECKS_TOO, Project, operations


def test_a_second_revision_is_empty_on_sqlite(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'test.db'}")
    project = Project(tmp_path / "migrations", engine)
    metadata = MetaData()
    Effects(metadata, stale_after=HOUR)
    first = project.revision(metadata)
    assert "import oncely" not in first.read_text()
    assert "oncely." not in first.read_text()
    project.upgrade()
    assert inspect(engine).get_table_names() == ["alembic_version", "effects"]
    assert {index["name"] for index in inspect(engine).get_indexes("effects")} == {
        "effects_created_at_idx",
        "effects_open_idx",
    }
    assert operations(project.revision(metadata, **CHECKS_TOO)) == []
    engine.dispose()
