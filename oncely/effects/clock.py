"""The database's clock, as one expression that is right on PostgreSQL and on SQLite.

`func.now() - timedelta(…)` compiles on SQLite and is silently wrong there: it subtracts from the
year. `database_now(offset)` is compiled for each of the two, and for no other database. On both it
is the time at which the row is looked at, not the time at which the statement or the transaction
began: a statement that waited for a lock must not decide by an older clock.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import DateTime, Dialect, Interval, String, literal
from sqlalchemy.exc import CompileError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

__all__ = ["Offset", "UtcTime", "database_now"]


class UtcTime(TypeDecorator[datetime]):
    """Aware datetimes in and out, in UTC; on SQLite, text in UTC with six digits of a second.

    A type for statements, not for tables: a migration could not name it without importing oncely.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None or dialect.name != "sqlite":
            return value
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Offset(TypeDecorator[timedelta]):
    """A distance from now: an interval on PostgreSQL, a modifier of strftime on SQLite."""

    impl = Interval
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(String() if dialect.name == "sqlite" else Interval())

    def process_bind_param(self, value: timedelta | None, dialect: Dialect) -> Any:
        if value is None or dialect.name != "sqlite":
            return value
        return f"{value.total_seconds():+.3f} seconds"


class database_now(FunctionElement[datetime]):  # noqa: N801  written like the SQL functions it stands for
    """Now by the database's clock, or `offset` from it; NULL when the offset is NULL."""

    type = UtcTime()
    inherit_cache = True

    def __init__(self, offset: ColumnElement[timedelta] | timedelta | None = None) -> None:
        if isinstance(offset, timedelta):
            offset = literal(offset, Offset)
        super().__init__(*([] if offset is None else [offset]))


@compiles(database_now)
def _for_others(element: database_now, compiler: SQLCompiler, **options: Any) -> str:
    raise CompileError(f"effects run on PostgreSQL and SQLite, not on {compiler.dialect.name}")


@compiles(database_now, "postgresql")
def _for_postgresql(element: database_now, compiler: SQLCompiler, **options: Any) -> str:
    if not len(element.clauses):
        return "clock_timestamp()"
    return f"(clock_timestamp() + {compiler.process(element.clauses, **options)})"


@compiles(database_now, "sqlite")
def _for_sqlite(element: database_now, compiler: SQLCompiler, **options: Any) -> str:
    # Six digits although SQLite's clock has three: text of one length compares like the times.
    now = "strftime('%Y-%m-%d %H:%M:%f000', 'now'"
    if not len(element.clauses):
        return f"{now})"
    return f"{now}, {compiler.process(element.clauses, **options)})"
