"""SQL as prose that still knows its tables.

A `Statement` is a `text()` with its tables by name: `{outbox}` in the text becomes the table's
quoted name in its schema when the statement is compiled, so `schema=`, `MetaData(schema=…)` and
`schema_translate_map` hold for every statement that oncely sends. Statements are built once, when
the object that owns them is made; SQLAlchemy then finds the compiled form by the text alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Table, bindparam
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import TextClause
from sqlalchemy.types import TypeEngine

__all__ = ["Statement"]


class Statement(TextClause):
    """One SQL statement: `tables` gives the `{names}` in it, `types` the types of its `:parameters`.

    Every parameter needs a type: the driver's guess is not always PostgreSQL's.
    """

    # Table names are written into the text before SQLAlchemy sees it, so that the text alone
    # determines the SQL and may be the cache key.
    inherit_cache = True

    def __init__(
        self,
        text: str,
        tables: Mapping[str, Table],
        types: Mapping[str, TypeEngine[Any] | type[TypeEngine[Any]]] | None = None,
    ) -> None:
        for table in tables.values():
            if table.schema is None and table.name in _LOCAL_NAME.findall(text):
                raise ValueError(
                    f"a table named {table.name!r} would be hidden by a name inside oncely's own statements; "
                    "pass another table_name=, or a schema="
                )
        self.tables_by_place = {_place(table): table for table in tables.values()}
        super().__init__(_NAME.sub(lambda match: _place(tables[match[1]]), text))
        binds = [bindparam(name, type_=type_) for name, type_ in (types or {}).items()]
        untyped = self._bindparams.keys() - {bind.key for bind in binds}
        if untyped:
            raise ValueError(f"parameters without a type: {', '.join(sorted(untyped))}")
        self._bindparams.update({bind.key: bind for bind in binds})


_NAME = re.compile(r"\{(\w+)\}")
_LOCAL_NAME = re.compile(r"(?:\bWITH|,)\s+(\w+)\s+AS\s+(?:NOT\s+)?(?:MATERIALIZED\s+)?\(")
_PLACE = re.compile(r"('?)(\{table [0-9a-f]+\})")


def _place(table: Table) -> str:
    # In hexadecimal: SQLAlchemy, the drivers and the pattern above have their own ideas of %, : and }.
    return f"{{table {repr((table.schema, table.name)).encode().hex()}}}"


@compiles(Statement)
def _compile(statement: Statement, compiler: SQLCompiler, **options: Any) -> str:
    sql: str = compiler.visit_textclause(statement, **options)  # type: ignore[no-untyped-call]  # so in SQLAlchemy

    def name(match: re.Match[str]) -> str:
        quote, place = match.groups()
        name = compiler.preparer.format_table(statement.tables_by_place[place])
        return quote + (name.replace("'", "''") if quote else name)  # in a literal, as for regclass

    return _PLACE.sub(name, sql)
