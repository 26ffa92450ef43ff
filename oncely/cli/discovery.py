"""Discovery: oncely's tables in a database, told by their columns, as the objects an application would make.

What operators do needs none of an application's settings, so the objects have the defaults. A table that
lacks a column of this version's is not found: its migration has not run.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import Connection, MetaData, inspect, text

from oncely.cli.address import named
from oncely.cli.failure import Failure
from oncely.effects import Effects
from oncely.idempotency import IdempotencyKeys
from oncely.inbox import Inbox
from oncely.outbox import Outbox
from oncely.transaction import Sessionmaker

if TYPE_CHECKING:
    from oncely.webhooks import Webhooks

__all__ = ["Room", "discover"]

Room: TypeAlias = "Outbox | IdempotencyKeys | Inbox | Effects | Webhooks"


async def discover(sessionmaker: Sessionmaker, *, schema: str | None) -> list[Room]:
    """The rooms whose tables are in the schema, or the first one of the search path.

    Raises Failure when there are none.
    """
    async with sessionmaker() as session:
        connection = await session.connection()
        tables = await connection.run_sync(_tables, schema)
        where = named(connection.engine.url)
    if not tables:
        of_schema = f"schema {schema!r} of " if schema is not None else ""
        raise Failure(
            f"{of_schema}{where} has no tables of oncely's; run your migrations (alembic upgrade head), "
            "or name their --schema"
        )
    return [_made(kind, name, schema) for kind, name in tables]


def _tables(connection: Connection, schema: str | None) -> list[tuple[str, str]]:
    """Kind and name of each table of oncely's in the schema, told by its columns."""
    there: dict[str, set[str]] = {}
    if connection.dialect.name == "sqlite":
        reflected = inspect(connection).get_multi_columns(schema=schema)
        there = {name: {column["name"] for column in columns} for (_, name), columns in reflected.items()}
    else:
        for name, column in connection.execute(_COLUMNS, {"schema": schema}):
            there.setdefault(name, set()).add(column)
    kinds = {kind: set(_made(kind, kind, None).table.columns.keys()) for kind in _kinds()}
    return [
        (kind, name)
        for kind, columns in kinds.items()
        for name, found in sorted(there.items())
        if columns <= found
    ]


# Not by SQLAlchemy's inspection, which warns of every type in the schema that it does not know.
_COLUMNS = text(
    """
    SELECT relname, attname
    FROM pg_catalog.pg_class
    JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
    JOIN pg_catalog.pg_attribute ON attrelid = pg_class.oid
    WHERE nspname = coalesce(CAST(:schema AS text), current_schema())
      AND relkind IN ('r', 'p') AND NOT relispartition AND attnum > 0 AND NOT attisdropped
    """
)


def _kinds() -> list[str]:
    kinds = ["outbox", "idempotency_keys", "inbox", "effects"]
    try:
        import oncely.webhooks  # noqa: F401  whether its extra is there
    except ModuleNotFoundError:
        return kinds
    return [*kinds, "webhooks"]


def _made(kind: str, name: str, schema: str | None) -> Room:
    """The object for a table that was found. What operators do with it needs none of its settings."""
    table: dict[str, Any] = {"table_name": name, "schema": schema}
    metadata = MetaData()
    if kind == "webhooks":
        from oncely.webhooks import Keyring, Webhooks

        # A key that never seals and never opens: operators read what is not sealed.
        return Webhooks(metadata, keyring=Keyring({"none": bytes(32)}, write="none"), **table)
    if kind == "effects":
        return Effects(metadata, stale_after=timedelta(minutes=1), **table)
    makers: dict[str, type[Outbox | IdempotencyKeys | Inbox]] = {
        "outbox": Outbox,
        "idempotency_keys": IdempotencyKeys,
        "inbox": Inbox,
    }
    return makers[kind](metadata, **table)
