"""Location: the tables where a connection finds them, and their names as SQL to paste."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import MetaData, Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

__all__ = ["PASTED", "located", "name_of"]

PASTED = postgresql.dialect(paramstyle="named")  # type: ignore[no-untyped-call]  # so in SQLAlchemy
"""Writes SQL for people: where parameters are `%s`, as in a driver's, a percent sign in a name is doubled."""


def located(connection: AsyncConnection, tables: Iterable[Table]) -> list[Table]:
    """Copies of these in the schemas to which the connection's `schema_translate_map` leads."""
    assert connection.sync_connection is not None  # noqa: S101  it is started
    copies = []
    for table in tables:
        metadata = MetaData(naming_convention=table.metadata.naming_convention)
        schema = connection.sync_connection.schema_for_object(table)
        copies.append(table.to_metadata(metadata, schema=schema))  # type: ignore[arg-type]  # None is taken
    return copies


def name_of(table: Table) -> str:
    """With its schema if it has one, and quoted where needed: what `to_regclass` takes, too."""
    return PASTED.identifier_preparer.format_table(table)
