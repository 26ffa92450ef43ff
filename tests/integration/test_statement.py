"""Statements know their tables: schema, quoting and translation hold for text too."""

from __future__ import annotations

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, Text
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import Outbox
from oncely.statement import Statement


def table(schema: str | None = None, name: str = "Thing") -> Table:
    return Table(name, MetaData(), Column("id", Integer), Column("name", Text), schema=schema)


def test_the_tables_name_is_quoted_with_its_schema(engine: AsyncEngine) -> None:
    statement = Statement(
        "SELECT id FROM {things} WHERE name = :name", {"things": table("Tenant")}, {"name": Text}
    )
    sql = str(statement.compile(engine.sync_engine))
    assert sql == 'SELECT id FROM "Tenant"."Thing" WHERE name = $1::VARCHAR'


def test_a_parameter_without_a_type_is_refused() -> None:
    with pytest.raises(ValueError, match="without a type: id, name"):
        Statement("SELECT :name, :id", {}, {})


def test_two_tables_of_one_text_do_not_share_a_compiled_form() -> None:
    first = Statement("SELECT id FROM {things}", {"things": table("a")})
    second = Statement("SELECT id FROM {things}", {"things": table("b")})
    assert first._generate_cache_key() != second._generate_cache_key()
    again = Statement("SELECT id FROM {things}", {"things": table("a")})
    assert first._generate_cache_key() == again._generate_cache_key()


async def test_schema_translate_map_reaches_the_table(engine: AsyncEngine, driver: str) -> None:
    things = table("written")
    statement = Statement(
        "SELECT name FROM {things} WHERE name LIKE '%n%' AND id = :id", {"things": things}, {"id": Integer}
    )
    async with engine.connect() as connection:
        for schema in ("one", "two"):
            await connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
            there = await connection.execution_options(schema_translate_map={"written": schema})
            await there.run_sync(things.metadata.create_all)
            await there.execute(things.insert().values(id=1, name=f"in {schema}"))
        for schema in ("one", "two"):
            there = await connection.execution_options(schema_translate_map={"written": schema})
            assert (await there.execute(statement, {"id": 1})).scalar_one() == f"in {schema}"


@pytest.mark.parametrize("name", ["ready", "held", "alone", "due", "tried"])
def test_a_table_that_a_statements_own_name_would_hide_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Outbox(MetaData(), table_name=name)
    Outbox(MetaData(), table_name=name, schema="app")
    Outbox(MetaData(), table_name=name.title())
