"""The statements of the effects table, the same for PostgreSQL and SQLite.

What differs between the databases: how their time is said (see clock.py), ON CONFLICT, which each
dialect spells by a construct of its own, and what keeps a purge to its limit. `for_…` parameters
say which row is meant, `new_…` ones what it becomes; `lease` and `ttl` are distances from now.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import (
    Delete,
    Executable,
    ScalarSelect,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    case,
    delete,
    false,
    func,
    literal,
    not_,
    null,
    or_,
    select,
    type_coerce,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.elements import ColumnElement

from oncely.effects.clock import Offset, UtcTime, database_now
from oncely.effects.record import Status
from oncely.effects.store import FINISHED, OPEN

__all__ = [
    "claim",
    "extend",
    "finish",
    "forget",
    "give_back",
    "purge",
    "purgeable",
    "read",
    "records",
    "renew",
    "stats",
    "take",
]


def claim(table: Table) -> Mapping[str, Executable]:
    """Insert a pending record, by dialect; no row comes back when the key has one."""
    values = {
        "key": bindparam("for_key"),
        "args_hash": bindparam("new_hash"),
        "status": Status.PENDING.value,
        "token": bindparam("new_token"),
        "provider_token": bindparam("new_provider_token"),
        "attempts": 1,
        "created_at": database_now(),
        "updated_at": database_now(),
        "expires_at": _from_now("lease"),
    }
    on_postgresql = postgresql.insert(table).values(values).on_conflict_do_nothing(index_elements=["key"])
    on_sqlite = sqlite.insert(table).values(values).on_conflict_do_nothing(index_elements=["key"])
    return {
        "postgresql": on_postgresql.returning(table.c.key),
        "sqlite": on_sqlite.returning(table.c.key),
    }


def extend(table: Table) -> Executable:
    """Push a live claim's end forward; the row says whether that end is still to come.

    It may be over: a statement that waited for the row's lock wrote the time from before it.
    """
    return (
        update(table)
        .where(*_is_owned(table), table.c.expires_at > database_now())
        .values(updated_at=database_now(), expires_at=_from_now("lease"))
        .returning(table.c.expires_at > database_now())
    )


def finish(table: Table) -> Executable:
    """Record how the owner's call ended, also after its time, as long as nobody took the record."""
    return update(table).where(*_is_owned(table)).values(_end()).returning(table.c.key)


def take(table: Table) -> Executable:
    """Decide about an unknown record, if it is as it was read."""
    more_attempts = table.c.attempts + bindparam("more_attempts")
    return (
        update(table)
        .where(*_is_as_read(table), or_(table.c.status == Status.UNKNOWN.value, _is_stale(table)))
        .values(_end() | {"token": bindparam("new_token"), "attempts": more_attempts})
        .returning(table.c.key)
    )


def renew(table: Table) -> Executable:
    """Open a finished record whose ttl has run out, if it is as it was read."""
    return (
        update(table)
        .where(
            *_is_as_read(table),
            table.c.status.in_([status.value for status in FINISHED]),
            table.c.expires_at <= database_now(),
        )
        .values(
            args_hash=bindparam("new_hash"),
            status=Status.PENDING.value,
            result=null(),
            error=null(),
            token=bindparam("new_token"),
            provider_token=bindparam("new_provider_token"),
            attempts=1,
            created_at=database_now(),
            updated_at=database_now(),
            expires_at=_from_now("lease"),
        )
        .returning(table.c.key)
    )


def read(table: Table) -> Select[Any]:
    """One record, with whether its `expires_at` has passed."""
    return _select(table).where(table.c.key == bindparam("for_key"))


def records(table: Table, statuses: Collection[Status], limit: int | None) -> Select[Any]:
    """Records that have one of the statuses now, newest first."""
    status_now = case((_is_stale(table), Status.UNKNOWN.value), else_=table.c.status)
    found = (
        _select(table)
        .where(status_now.in_([status.value for status in statuses]))
        .order_by(table.c.created_at.desc(), table.c.key)
        .limit(limit)
    )
    if OPEN.issuperset(statuses):
        # Said a second time, as the index on open records has it.
        found = found.where(table.c.status.in_([status.value for status in OPEN]))
    return found


def stats(table: Table, at_most: int) -> Executable:
    """How many records are pending, unknown, failed and done now, none counted beyond `at_most`."""
    # That the record is open is said apart, as the index on open records has it.
    is_open = table.c.status.in_([status.value for status in OPEN])
    is_owned = and_(table.c.status == Status.PENDING.value, not_(_is_stale(table)))

    def count(name: str, *conditions: ColumnElement[bool]) -> ScalarSelect[int]:
        some = select(literal(1)).select_from(table).where(*conditions).limit(at_most).subquery(name)
        return select(func.count()).select_from(some).scalar_subquery()

    return select(
        count("pending", is_open, is_owned).label("pending"),
        count("unknown", is_open, not_(is_owned)).label("unknown"),
        count("failed", table.c.status == Status.FAILED.value).label("failed"),
        count("done", table.c.status == Status.DONE.value).label("done"),
    )


def purge(
    table: Table, age: timedelta, statuses: Collection[Status], limit: int | None
) -> Mapping[str, Delete]:
    """Delete finished records that are older than `age` and whose ttl, if any, has run out; by dialect."""
    # Locked where rows have locks, so that two purges do not wait for each other.
    old = _old(table, age, statuses).limit(limit).with_for_update(skip_locked=True)
    return {
        # A CTE is evaluated once: a subquery may be again for every row, and then its limit is none.
        "postgresql": delete(table).where(table.c.key.in_(select(old.cte("old").c.key))),
        # Python's sqlite3 counts no rows of a statement that begins with WITH.
        "sqlite": delete(table).where(table.c.key.in_(old)),
    }


def purgeable(table: Table, age: timedelta, statuses: Collection[Status], at_most: int) -> Executable:
    """How many records `purge` would delete, none counted beyond `at_most`."""
    return select(func.count()).select_from(_old(table, age, statuses).limit(at_most).subquery())


def forget(table: Table) -> Delete:
    """Delete the record, whatever it says."""
    return delete(table).where(table.c.key == bindparam("for_key"))


def give_back(table: Table) -> Delete:
    """Delete the record of an owner that has not made its call."""
    return delete(table).where(*_is_owned(table))


def _old(table: Table, age: timedelta, statuses: Collection[Status]) -> Select[Any]:
    """The keys of finished records that are older than `age` and whose ttl, if any, has run out."""
    until = select(database_now(-age)).scalar_subquery()  # evaluated once, so that the index serves
    return select(table.c.key).where(
        table.c.status.in_([status.value for status in statuses]),
        table.c.created_at <= until,  # no later than updated_at, and indexed
        table.c.updated_at <= until,
        or_(table.c.expires_at.is_(None), table.c.expires_at <= database_now()),
    )


def _from_now(parameter: str) -> database_now:
    return database_now(bindparam(parameter, type_=Offset))


def _end() -> dict[str, ColumnElement[Any]]:
    """What a record becomes; `ttl` is the lease where it becomes pending, and NULL for: no end."""
    return {
        "status": bindparam("new_status", type_=Text),
        "result": bindparam("new_result", type_=Text),
        "error": bindparam("new_error", type_=Text),
        "updated_at": database_now(),
        "expires_at": _from_now("ttl"),
    }


def _is_owned(table: Table) -> list[ColumnElement[bool]]:
    return [
        table.c.key == bindparam("for_key"),
        table.c.token == bindparam("for_token"),
        table.c.status == Status.PENDING.value,
    ]


def _is_as_read(table: Table) -> list[ColumnElement[bool]]:
    return [
        table.c.key == bindparam("for_key"),
        table.c.token == bindparam("for_token"),
        type_coerce(table.c.updated_at, UtcTime) == bindparam("for_updated_at", type_=UtcTime),
    ]


def _is_stale(table: Table) -> ColumnElement[bool]:
    return and_(table.c.status == Status.PENDING.value, table.c.expires_at <= database_now())


def _select(table: Table) -> Select[Any]:
    columns: list[ColumnElement[Any]] = [
        table.c.key,
        table.c.args_hash,
        table.c.status,
        table.c.result,
        table.c.error,
        table.c.token,
        table.c.provider_token,
        table.c.attempts,
        type_coerce(table.c.created_at, UtcTime).label("created_at"),
        type_coerce(table.c.updated_at, UtcTime).label("updated_at"),
        type_coerce(table.c.expires_at, UtcTime).label("expires_at"),
        func.coalesce(table.c.expires_at <= database_now(), false()).label("expired"),
    ]
    return select(*columns)
