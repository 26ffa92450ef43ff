"""The store level on a table, in PostgreSQL or SQLite.

Each function is one statement in a short transaction of its own: see `short_transaction`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any, Self, TypeAlias, TypeVar

from sqlalchemy import CursorResult, Executable, RowMapping, Table
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker

from oncely.arguments import LONGEST, check_count, check_duration, check_kind
from oncely.effects import statements
from oncely.effects.record import EffectRecord, EffectStats, Status
from oncely.effects.short_transaction import in_short_transaction
from oncely.effects.store import FINISHED, OPEN, Store, new_token
from oncely.storable import check_key, encode_json
from oncely.transaction import Sessionmaker, check_sessionmaker, says_what_is_missing

__all__ = ["TableStore"]

LONGEST_ERROR = 1_000
"""How many characters of an error are stored."""

_T = TypeVar("_T")

_AnyDialect: TypeAlias = Executable | Mapping[str, Executable]
"""A statement for all dialects, or one for each by its name."""


class TableStore(Store):
    """A Store in `table`, reached through a sessionmaker or an engine. A claim lasts `stale_after`.

    What each function does and promises is said in `Store`.
    """

    def __init__(
        self, table: Table, sessionmaker: Sessionmaker | AsyncEngine | None, *, stale_after: timedelta
    ) -> None:
        check_duration(stale_after, "stale_after", longest=LONGEST)
        self.table = table
        self.stale_after = stale_after
        self.sessionmaker = _sessionmaker(sessionmaker)
        self._claim = statements.claim(table)
        self._extend = statements.extend(table)
        self._finish = statements.finish(table)
        self._take = statements.take(table)
        self._renew = statements.renew(table)
        self._read = statements.read(table)
        self._forget = statements.forget(table)
        self._give_back = statements.give_back(table)

    def bind(self, sessionmaker: Sessionmaker | AsyncEngine) -> Self:
        """The same on the same table in another database."""
        bound = copy.copy(self)
        bound.sessionmaker = _sessionmaker(sessionmaker)
        return bound

    async def claim(self, key: str, args_hash: bytes, *, provider_token: str | None = None) -> str | None:
        check_key(key, "key")
        check_kind(args_hash, bytes, "args_hash")
        if provider_token is not None:
            check_key(provider_token, "provider_token")
        token = new_token()
        won = await self._execute(
            self._claim,
            _has_rows,
            for_key=key,
            new_hash=args_hash,
            new_token=token,
            new_provider_token=provider_token or new_token(),
            lease=self.stale_after,
        )
        return token if won else None

    async def extend(self, key: str, token: str, lease: timedelta) -> bool:
        check_key(key, "key")
        check_key(token, "token")
        check_duration(lease, "lease", longest=LONGEST)
        return await self._execute(self._extend, _is_true, for_key=key, for_token=token, lease=lease)

    async def finish(
        self,
        key: str,
        token: str,
        status: Status,
        *,
        result: object = None,
        error: str | None = None,
        ttl: timedelta | None = None,
    ) -> bool:
        check_key(key, "key")
        check_key(token, "token")
        status = Status(status)
        if status is Status.PENDING:
            raise ValueError("a call does not end as pending")
        end = _end(status, result, error, ttl)
        return await self._execute(self._finish, _has_rows, for_key=key, for_token=token, **end)

    async def take(
        self,
        record: EffectRecord,
        status: Status,
        *,
        result: object = None,
        error: str | None = None,
        ttl: timedelta | None = None,
    ) -> str | None:
        status = Status(status)
        calls_again = status is Status.PENDING
        end = _end(status, result, error, ttl)
        token = new_token()
        won = await self._execute(
            self._take,
            _has_rows,
            **_as_read(record),
            **(end | {"ttl": self.stale_after} if calls_again else end),
            new_token=token,
            more_attempts=int(calls_again),
        )
        return token if won else None

    async def renew(
        self, record: EffectRecord, args_hash: bytes, *, provider_token: str | None = None
    ) -> str | None:
        check_kind(args_hash, bytes, "args_hash")
        if provider_token is not None:
            check_key(provider_token, "provider_token")
        token = new_token()
        won = await self._execute(
            self._renew,
            _has_rows,
            **_as_read(record),
            new_hash=args_hash,
            new_token=token,
            new_provider_token=provider_token or new_token(),
            lease=self.stale_after,
        )
        return token if won else None

    async def get(self, key: str) -> EffectRecord | None:
        check_key(key, "key")
        found = await self._execute(self._read, _records, for_key=key)
        return found[0] if found else None

    async def records(
        self, statuses: Collection[Status] | None = None, limit: int | None = None
    ) -> list[EffectRecord]:
        wanted = OPEN if statuses is None else _statuses(statuses)
        if limit is not None:
            check_count(limit, "limit", least=0)
        found = await self._execute(statements.records(self.table, wanted, limit), _records)
        # The clock goes on within the statement: one may have turned unknown since it was chosen.
        return [record for record in found if record.status in wanted]

    async def stats(self, *, at_most: int = 100_000) -> EffectStats:
        """How many records are in each state, by one statement; no count goes beyond `at_most`."""
        check_count(at_most, "at_most")

        def read(result: CursorResult[Any]) -> EffectStats:
            return EffectStats(**result.mappings().one())

        return await self._execute(statements.stats(self.table, at_most), read)

    async def purge(
        self,
        older_than: timedelta | float,
        statuses: Collection[Status] = FINISHED,
        *,
        limit: int | None = None,
    ) -> int:
        age, wanted = _old(older_than, statuses)
        if limit is not None:
            check_count(limit, "limit", least=0)
        return await self._execute(statements.purge(self.table, age, wanted, limit), _count)

    async def prune(
        self, session: AsyncSession, *, older_than: timedelta | float, limit: int | None = None
    ) -> int:
        """`purge` of all that is finished, in the transaction of `session`: so Retention does it."""
        age, wanted = _old(older_than, FINISHED)
        if limit is not None:
            check_count(limit, "limit", least=0)
        connection = await session.connection(bind_arguments={"clause": self.table})
        statement = statements.purge(self.table, age, wanted, limit)
        with says_what_is_missing(self.table):
            return _count(await connection.execute(_spelt_for(connection, statement)))

    async def purgeable(
        self,
        older_than: timedelta | float,
        statuses: Collection[Status] = FINISHED,
        *,
        at_most: int = 100_000,
    ) -> int:
        """How many records `purge` would remove, none counted beyond `at_most`."""
        check_count(at_most, "at_most")
        age, wanted = _old(older_than, statuses)

        def read(result: CursorResult[Any]) -> int:
            return int(result.scalar_one())

        return await self._execute(statements.purgeable(self.table, age, wanted, at_most), read)

    async def delete(self, key: str, *, token: str | None = None) -> bool:
        check_key(key, "key")
        if token is None:
            return await self._execute(self._forget, _count, for_key=key) > 0
        check_key(token, "token")
        return await self._execute(self._give_back, _count, for_key=key, for_token=token) > 0

    async def _execute(
        self, statement: _AnyDialect, read: Callable[[CursorResult[Any]], _T], **parameters: object
    ) -> _T:
        if self.sessionmaker is None:
            raise RuntimeError(f"{self.table.name} is on no database: pass sessionmaker=, or use bind()")

        async def work(connection: AsyncConnection) -> _T:
            return read(await connection.execute(_spelt_for(connection, statement), parameters))

        return await in_short_transaction(self.sessionmaker, self.table, work)


def _spelt_for(connection: AsyncConnection, statement: _AnyDialect) -> Executable:
    return statement[connection.dialect.name] if isinstance(statement, Mapping) else statement


def _old(older_than: timedelta | float, statuses: Collection[Status]) -> tuple[timedelta, frozenset[Status]]:
    """What is to be purged, checked."""
    if not isinstance(older_than, (timedelta, int, float)):
        raise TypeError(f"older_than must be a timedelta, or seconds, not {type(older_than).__name__}")
    age = older_than if isinstance(older_than, timedelta) else timedelta(seconds=older_than)
    if not timedelta(0) <= age <= LONGEST:
        raise ValueError(f"older_than must be from 0 to {LONGEST.days:,} days, not {older_than!r}")
    wanted = _statuses(statuses)
    if not wanted <= FINISHED:
        raise ValueError(f"only finished records are purged, not {', '.join(sorted(wanted - FINISHED))}")
    return age, wanted


def _statuses(given: Collection[Status]) -> frozenset[Status]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"statuses must be a collection of them, not {type(given).__name__}")
    return frozenset(map(Status, given))


def _sessionmaker(given: Sessionmaker | AsyncEngine | None) -> Sessionmaker | None:
    if isinstance(given, AsyncEngine):
        return async_sessionmaker(given)
    if given is not None:
        check_sessionmaker(given)
    return given


def _end(status: Status, result: object, error: str | None, ttl: timedelta | None) -> dict[str, object]:
    """The parameters that say what a record becomes, checked."""
    if ttl is not None:
        check_duration(ttl, "ttl", longest=LONGEST)
        if status not in FINISHED:
            raise ValueError(f"a ttl frees finished records, not {status} ones")
    if result is not None and status is not Status.DONE:
        raise ValueError(f"a record that is {status} has no result")
    if error is not None and status in (Status.PENDING, Status.DONE):
        raise ValueError(f"a record that is {status} has no error")
    if status is Status.FAILED and error is None:
        error = ""
    return {
        "new_status": status.value,
        "new_result": encode_json(result, what="result") if status is Status.DONE else None,
        "new_error": None if error is None else _storable(error),
        "ttl": ttl,
    }


def _storable(error: str) -> str:
    """The text without what a database refuses, and not too long."""
    return error[:LONGEST_ERROR].replace("\0", "\ufffd").encode(errors="replace").decode()


def _as_read(record: EffectRecord) -> dict[str, object]:
    check_kind(record, EffectRecord, "record")
    return {"for_key": record.key, "for_token": record.token, "for_updated_at": record.updated_at}


def _has_rows(result: CursorResult[Any]) -> bool:
    return result.first() is not None


def _is_true(result: CursorResult[Any]) -> bool:
    return bool(result.scalar())


def _count(result: CursorResult[Any]) -> int:
    return result.rowcount


def _records(result: CursorResult[Any]) -> list[EffectRecord]:
    return [_record(row) for row in result.mappings()]


def _record(row: RowMapping) -> EffectRecord:
    stored = Status(row["status"])
    return EffectRecord(
        key=row["key"],
        args_hash=bytes(row["args_hash"]),
        status=Status.UNKNOWN if stored is Status.PENDING and row["expired"] else stored,
        result_json=row["result"],
        error=row["error"],
        token=row["token"],
        provider_token=row["provider_token"],
        attempts=row["attempts"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        expires_at=row["expires_at"],
        expired=row["expired"],
    )
