"""Schema: the tables that are there against those of the code, as PostgreSQL itself describes both.

The code's table is made as a temporary one, described, and rolled back. So an expression is compared
with what PostgreSQL makes of the code's, and a difference in spelling is none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import BigInteger, Connection, MetaData, Table, bindparam, inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import AddConstraint, CreateColumn, CreateIndex

from oncely.check.finding import Finding
from oncely.check.location import PASTED, located, name_of
from oncely.transaction import sqlstates

__all__ = ["check_schema"]


async def check_schema(connection: AsyncConnection, tables: Iterable[Table]) -> list[Finding]:
    """How the tables that are there differ from these. The connection's transaction is rolled back.

    What a table has beyond the code's is the user's own, but for a column without which no row can be
    written. Needs the right to make temporary tables, which every role has by default, and a server that
    can be written to; without them a table is only known to be there. On SQLite the names of its columns
    are compared.
    """
    findings: list[Finding] = []
    check = _check if connection.dialect.name == "postgresql" else _check_names
    for table in located(connection, tables):
        findings += await connection.run_sync(check, table)
    await connection.rollback()
    return findings


@dataclass(frozen=True, slots=True)
class _Described:
    columns: Mapping[str, tuple[str, bool, str | None, str]]
    """Type with its collation, whether NOT NULL, default, and how it is generated."""
    constraints: Mapping[str, tuple[str, bool]]
    """Definition, and whether it holds for the old rows too."""
    indexes: Mapping[str, tuple[str, bool]]
    """Definition without names, and whether it is complete."""


def _check(connection: Connection, table: Table) -> list[Finding]:
    name = name_of(table)
    there = connection.scalar(_THERE, {"name": name})
    if there is None:
        return [_absent(name)]
    try:
        expected = _described_code(connection, table)
    except DBAPIError as error:
        if (finding := _uncompared(connection, name, sqlstates(error))) is None:
            raise
        return [finding]
    found = _described(connection, there)
    return [
        *_check_columns(name, table, expected, found),
        *_check_constraints(name, table, expected, found),
        *_check_indexes(name, table, expected, found),
    ]


def _check_names(connection: Connection, table: Table) -> list[Finding]:
    name, found = name_of(table), inspect(connection)
    if not found.has_table(table.name, schema=table.schema):
        return [_absent(name)]
    there = {column["name"] for column in found.get_columns(table.name, schema=table.schema)}
    return [
        Finding("wrong", name, f"has no column {column.name}", "alembic upgrade head")
        for column in table.columns
        if column.name not in there
    ]


def _absent(name: str) -> Finding:
    return Finding("wrong", name, "is not there", "alembic upgrade head")


def _uncompared(connection: Connection, name: str, states: Collection[str]) -> Finding | None:
    """What is said of a table when the code's may not be made beside it; None when that is not why."""
    message = "could not be compared with the code: "
    if "25006" in states:
        return Finding("advice", name, message + "this server, or this role, only reads; check the primary")
    if "42501" in states:
        database, role = connection.execute(text("SELECT current_database(), current_user")).one()
        remedy = f"GRANT TEMPORARY ON DATABASE {_quoted(database)} TO {_quoted(role)};"
        return Finding("advice", name, message + "this role may make no temporary tables", remedy)
    return None


def _described_code(connection: Connection, table: Table) -> _Described:
    metadata = MetaData(naming_convention=table.metadata.naming_convention)
    copy = table.to_metadata(metadata, schema="pg_temp")
    with connection.begin_nested() as savepoint:
        copy.create(connection, checkfirst=False)
        described = _described(connection, connection.scalar(_THERE, {"name": name_of(copy)}))
        savepoint.rollback()
    return described


def _described(connection: Connection, oid: int) -> _Described:
    parameters = {"oid": oid}
    return _Described(
        columns={
            row.name: (row.type, row.not_null, row.default, row.generated)
            for row in connection.execute(_COLUMNS, parameters)
        },
        constraints={
            row.name: (row.definition, row.validated) for row in connection.execute(_CONSTRAINTS, parameters)
        },
        indexes={row.name: (row.definition, row.valid) for row in connection.execute(_INDEXES, parameters)},
    )


def _check_columns(name: str, table: Table, expected: _Described, found: _Described) -> list[Finding]:
    findings = []
    for column, (type_, not_null, default, generated) in expected.columns.items():
        if column not in found.columns:
            added = CreateColumn(table.c[column]).compile(dialect=PASTED)
            findings.append(
                Finding("wrong", name, f"has no column {column}", f"ALTER TABLE {name} ADD COLUMN {added};")
            )
            continue
        there = found.columns[column]
        compared = (
            ("its type", there[0], type_, f"TYPE {type_}"),
            ("NULL", *map(_null, (there[1], not_null)), f"{'SET' if not_null else 'DROP'} NOT NULL"),
            ("its default", there[2], default, f"SET DEFAULT {default}" if default else "DROP DEFAULT"),
            ("its identity", there[3], generated, None),  # whose numbers would have to go on
        )
        for what, is_, expects, change in compared:
            if is_ != expects:
                message = f"column {column}: {what} is {is_ or 'missing'}, the code has {expects or 'none'}"
                altered = f"ALTER TABLE {name} ALTER COLUMN {_quoted(column)} {change};"
                findings.append(Finding("wrong", name, message, altered if change is not None else None))
    for column, (_, not_null, default, generated) in found.columns.items():
        if column not in expected.columns and not_null and default is None and not generated:
            findings.append(
                Finding(
                    "wrong",
                    name,
                    f"column {column} is not the code's, NOT NULL and without a default: "
                    "no row can be written",
                    f"ALTER TABLE {name} ALTER COLUMN {_quoted(column)} DROP NOT NULL;",
                )
            )
    return findings


def _check_constraints(name: str, table: Table, expected: _Described, found: _Described) -> list[Finding]:
    findings = []
    by_definition = _by_definition(found.constraints)
    for constraint, (definition, _) in expected.constraints.items():
        if definition in by_definition:  # under whatever name
            other, is_valid = by_definition[definition]
            if not is_valid:
                findings.append(
                    Finding(
                        "wrong",
                        name,
                        f"constraint {other} was not validated: old rows may break it",
                        f"ALTER TABLE {name} VALIDATE CONSTRAINT {_quoted(other)};",
                    )
                )
            continue
        there = found.constraints.get(constraint)
        message = f"constraint {constraint} is missing"
        drop = ""
        if there is not None:
            message = f"constraint {constraint} is {there[0]}, the code has {definition}"
            drop = f"ALTER TABLE {name} DROP CONSTRAINT {_quoted(constraint)};\n"
        added = [
            f"{drop}{AddConstraint(item).compile(dialect=PASTED)};"
            for item in table.constraints
            if (item is table.primary_key if definition.startswith("PRIMARY") else item.name == constraint)
        ]
        findings.append(Finding("wrong", name, message, next(iter(added), None)))
    return findings


def _check_indexes(name: str, table: Table, expected: _Described, found: _Described) -> list[Finding]:
    findings = []
    schema = f"{_quoted(table.schema)}." if table.schema is not None else ""
    by_definition = _by_definition(found.indexes)
    for index, (definition, _) in expected.indexes.items():
        if definition in by_definition:
            other, is_valid = by_definition[definition]
            if not is_valid:
                findings.append(
                    Finding(
                        "wrong",
                        name,
                        f"index {other} is not complete: CREATE INDEX CONCURRENTLY was broken off",
                        f"REINDEX INDEX CONCURRENTLY {schema}{_quoted(other)};",
                    )
                )
            continue
        there = found.indexes.get(index)
        message = f"index {index} is missing: {definition}"
        statements = []
        if there is not None:
            message = f"index {index} is {there[0]}, the code has {definition}"
            statements.append(f"DROP INDEX CONCURRENTLY {schema}{_quoted(index)};")
        for item in table.indexes:
            if item.name == index:
                made = str(CreateIndex(item).compile(dialect=PASTED))
                statements.append(made.replace("INDEX ", "INDEX CONCURRENTLY ", 1) + ";")
        findings.append(Finding("wrong", name, message, "\n".join(statements)))
    return findings


def _by_definition(found: Mapping[str, tuple[str, bool]]) -> dict[str, tuple[str, bool]]:
    """Name and validity by the definition; of several alike a valid one."""
    alike = sorted(found.items(), key=lambda item: item[1][1])
    return {definition: (name, is_valid) for name, (definition, is_valid) in alike}


def _null(refused: bool) -> str:
    return "refused" if refused else "allowed"


def _quoted(name: str) -> str:
    return PASTED.identifier_preparer.quote(name)


_THERE = text("SELECT to_regclass(:name)::oid::int8")

_OID = bindparam("oid", type_=BigInteger)

_COLUMNS = text("""
SELECT attname AS name,
       format_type(atttypid, atttypmod)
           || CASE WHEN attcollation <> typcollation THEN ' COLLATE ' || quote_ident(collname) ELSE '' END
           AS type,
       attnotnull AS not_null,
       CASE WHEN attidentity = '' AND attgenerated = '' THEN pg_get_expr(adbin, adrelid) END AS default,
       CASE attidentity WHEN 'a' THEN 'ALWAYS' WHEN 'd' THEN 'BY DEFAULT' ELSE '' END AS generated
FROM pg_catalog.pg_attribute
JOIN pg_catalog.pg_type ON pg_type.oid = atttypid
LEFT JOIN pg_catalog.pg_collation ON pg_collation.oid = attcollation
LEFT JOIN pg_catalog.pg_attrdef ON adrelid = attrelid AND adnum = attnum
WHERE attrelid = CAST(:oid AS oid) AND attnum > 0 AND NOT attisdropped
ORDER BY attnum
""").bindparams(_OID)

_CONSTRAINTS = text("""
SELECT conname AS name, regexp_replace(pg_get_constraintdef(oid), ' NOT VALID$', '') AS definition,
       convalidated AS validated
FROM pg_catalog.pg_constraint
WHERE conrelid = CAST(:oid AS oid) AND contype IN ('c', 'p', 'u')
ORDER BY conname
""").bindparams(_OID)

_INDEXES = text("""
SELECT relname AS name,
       CASE WHEN indisunique THEN 'UNIQUE ' ELSE '' END
           || regexp_replace(pg_get_indexdef(indexrelid), '^.*? USING ', '') AS definition,
       indisvalid AS valid
FROM pg_catalog.pg_index
JOIN pg_catalog.pg_class ON pg_class.oid = indexrelid
WHERE indrelid = CAST(:oid AS oid) AND NOT indisprimary
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_constraint WHERE conindid = indexrelid)
ORDER BY relname
""").bindparams(_OID)
