"""The gate of an idempotency key: who gets its answer, who gets the claim, and who has to wait.

A look at a key is one statement. It finds a live row, or it takes the key's advisory transaction
lock and writes the row, or it finds the lock held by another transaction. Only then does anybody
wait, in a savepoint, so that the caller's transaction comes out of it as it went in.

These functions are synchronous: they run inside `run_sync`, several statements in one switch.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import math
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Connection, LargeBinary, Table, Text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from oncely.answer import Outcome, read_answer
from oncely.claim import NAME, Claim, ClaimStatements
from oncely.errors import KeyInUse, KeyReused, KeyUnanswered
from oncely.savepoint import connection_of
from oncely.statement import Statement
from oncely.transaction import is_lock_timeout, require_transaction, says_what_is_missing

__all__ = ["Gate", "Miss", "Request", "fingerprint"]


@dataclass(frozen=True, slots=True)
class Request:
    """Who asks for which key, and what for."""

    caller: AsyncSession | AsyncConnection
    scope: str
    key: str
    fingerprint: bytes


class Miss(enum.Enum):
    """Why a look at the key gave neither an answer nor the claim."""

    BUSY = "another transaction holds its lock"
    STALE = "the lock was free, but the row has changed since the statement began, or is being deleted"
    TIMEOUT = "the lock did not become free in time"


class Gate:
    """The gate of the keys in one table."""

    def __init__(self, table: Table) -> None:
        tables = {"keys": table}
        self._table = table
        self._claims = ClaimStatements(table)
        self._claim = Statement(_CLAIM, tables, {**NAME, "fingerprint": LargeBinary, "lock": BigInteger})
        self._wait = Statement(_WAIT, tables, {"lock": BigInteger})
        self._wait_for = Statement(_WAIT_FOR, tables, {"lock": BigInteger, "milliseconds": Text})

    def enter(self, joined: Session | Connection, request: Request) -> Outcome | Claim | Miss:
        """Claim the key or read its answer, without waiting: one statement, and the savepoint."""
        if isinstance(joined, Session):
            joined.flush()
        connection = connection_of(joined, self._table)
        require_transaction(connection, self._table)
        with says_what_is_missing(self._table):
            found = self._ask(connection, request)
        return self._open(joined, connection, request) if found is None else found

    def enter_in_turn(
        self, joined: Session | Connection, request: Request, left: float
    ) -> Outcome | Claim | Miss:
        """Wait `left` seconds at most for the key's lock, then as `enter`.

        The lock is taken in a savepoint, which is undone as soon as there is an answer: a lock that
        is kept until the end of the transaction would make the waiters queue up behind each other.
        A wait that times out is undone too, so the transaction goes on with its own settings.
        """
        connection = connection_of(joined, self._table)
        lock = self._lock_id(connection, request)
        try:
            with connection.begin_nested() as turn:
                if left == math.inf:
                    connection.execute(self._wait, {"lock": lock})
                else:
                    milliseconds = min(math.ceil(left * 1000), _LONGEST_TIMEOUT)
                    connection.execute(self._wait_for, {"lock": lock, "milliseconds": str(milliseconds)})
                found = self._ask(connection, request)
                if found is not None:
                    turn.rollback()
        except DBAPIError as error:
            if is_lock_timeout(error):
                return Miss.TIMEOUT
            raise
        return self._open(joined, connection, request) if found is None else found

    def _ask(self, connection: Connection, request: Request) -> Outcome | Miss | None:
        """The answer of the key, why there is none, or None: the key is ours now."""
        parameters = {
            "scope": request.scope,
            "key": request.key,
            "fingerprint": request.fingerprint,
            "lock": self._lock_id(connection, request),
        }
        row = connection.execute(self._claim, parameters).one()
        locked, claimed, live, in_use, stored_fingerprint, status, *rest = row
        if claimed:
            return None
        if not live:
            return Miss.STALE if locked else Miss.BUSY
        if in_use:
            raise KeyInUse(request.scope, request.key)
        if stored_fingerprint != request.fingerprint:
            raise KeyReused(request.scope, request.key)
        if status is None:
            raise KeyUnanswered(request.scope, request.key)
        return read_answer(status, *rest)

    def _open(self, joined: Session | Connection, connection: Connection, request: Request) -> Claim:
        name = {"scope": request.scope, "key": request.key}
        try:
            return Claim(request.caller, joined, connection, self._claims, **name)
        except Exception:
            # A hook of the session has failed: whoever catches that and commits leaves no row behind.
            with contextlib.suppress(SQLAlchemyError):  # after an error of PostgreSQL it is gone anyway
                connection.execute(self._claims.delete, name)
            raise

    def _lock_id(self, connection: Connection, request: Request) -> int:
        """64 bits that stand for this key in this table, signed as PostgreSQL's advisory locks are."""
        translation: Any = connection.get_execution_options().get("schema_translate_map") or {}
        schema = translation.get(self._table.schema, self._table.schema)
        digest = fingerprint(schema or "", self._table.name, request.scope, request.key)
        return int.from_bytes(digest[:8], "big", signed=True)


def fingerprint(*parts: str | bytes) -> bytes:
    """SHA-256 over the parts, each with its length before it, so that parts cannot run together."""
    pieces: list[bytes] = []
    for index, part in enumerate(parts):
        if not isinstance(part, (str, bytes)):
            raise TypeError(f"fingerprint takes str and bytes; part {index} is {type(part).__name__}")
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        pieces += (len(data).to_bytes(8, "big"), data)
    return hashlib.sha256(b"".join(pieces)).digest()


_LONGEST_TIMEOUT = 2**31 - 1  # milliseconds, in PostgreSQL's settings

# Who gets the lock of a key without a live row may write its row. The statement's snapshot is older
# than the lock, so a row that was committed in between is met by DO NOTHING, and one asks again. A row
# that is locked (being deleted) is passed over: nobody who came without waiting may hang here.
_CLAIM = """
WITH found AS MATERIALIZED (
    SELECT request_hash, response_code, CAST(response_headers AS text) AS response_headers,
           response_body, response_bytes,
           expires_at IS NULL OR expires_at > statement_timestamp() AS live,
           response_code IS NULL AND created_at = now() AS in_use
    FROM {keys} WHERE scope = :scope AND key = :key
), gate AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock(:lock) AS locked
    WHERE NOT EXISTS (SELECT FROM found WHERE live)
), expired AS MATERIALIZED (
    SELECT FROM {keys}
    WHERE scope = :scope AND key = :key AND expires_at <= statement_timestamp()
      AND (SELECT locked FROM gate) AND EXISTS (SELECT FROM found)
    FOR UPDATE SKIP LOCKED
), reopened AS (
    UPDATE {keys}
    SET request_hash = :fingerprint, response_code = NULL, response_headers = NULL,
        response_body = NULL, response_bytes = NULL, created_at = now(), expires_at = NULL
    WHERE scope = :scope AND key = :key AND EXISTS (SELECT FROM expired)
    RETURNING true
), inserted AS (
    INSERT INTO {keys} (scope, key, request_hash)
    SELECT :scope, :key, :fingerprint FROM gate WHERE locked AND NOT EXISTS (SELECT FROM found)
    ON CONFLICT (scope, key) DO NOTHING
    RETURNING true
)
SELECT (SELECT locked FROM gate), EXISTS (SELECT FROM inserted) OR EXISTS (SELECT FROM reopened),
       live, in_use, request_hash, response_code, response_headers, response_body, response_bytes
FROM (SELECT) AS nothing LEFT JOIN found ON true
"""

_WAIT = "SELECT pg_advisory_xact_lock(:lock)"

# The time limit stands for this one lock: the caller's own is back before the statement ends.
_WAIT_FOR = """
WITH caller AS MATERIALIZED (SELECT current_setting('lock_timeout') AS lock_timeout),
bounded AS MATERIALIZED (
    SELECT lock_timeout, set_config('lock_timeout', :milliseconds, true) FROM caller
),
locked AS MATERIALIZED (SELECT lock_timeout, pg_advisory_xact_lock(:lock) FROM bounded)
SELECT set_config('lock_timeout', lock_timeout, true) FROM locked
"""
