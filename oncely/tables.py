"""Every table, index and named constraint that oncely keeps in the user's database.

The tables are attached to the user's own MetaData, so Alembic's autogenerate sees them. Asking
twice for the same table gives the same table. Invariants are CHECK constraints with a name, so the
database refuses a half state. Every time is the database's clock. Columns that version 0.1.0 did
not have are nullable or have a server default, so that its tables upgrade with their rows kept.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.event import listen
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import ExecutableDDLElement, SchemaItem, conv
from sqlalchemy.sql.compiler import DDLCompiler

from oncely.errors import TableNameTaken

__all__ = ["effects_table", "idempotency_table", "inbox_table", "outbox_tables", "webhooks_table"]

_LONGEST_NAME = 63
"""In bytes of UTF-8. PostgreSQL cuts a longer name short without an error."""


def idempotency_table(metadata: MetaData, name: str, schema: str | None) -> Table:
    """One row per key that was used: whose it is, what was asked, and the answer when there is one."""

    def items() -> list[SchemaItem]:
        return [
            Column("scope", Text, primary_key=True),
            Column("key", Text, primary_key=True),
            Column("request_hash", LargeBinary, nullable=False),
            Column("response_code", Integer),
            Column("response_headers", JSONB(none_as_null=True)),
            Column("response_body", Text),
            Column("response_bytes", LargeBinary),
            Column("created_at", _TIME, nullable=False, server_default=func.now()),
            Column("expires_at", _TIME),
            _check("response_body IS NULL OR response_bytes IS NULL", f"{name}_one_body_check"),
            _check(
                "response_code IS NOT NULL OR (response_headers IS NULL AND "
                "response_body IS NULL AND response_bytes IS NULL)",
                f"{name}_answer_check",
            ),
            # Two indexes, so that pruning never walks over keys whose ttl goes on for long.
            Index(f"{name}_created_at_idx", "created_at", postgresql_where=text("expires_at IS NULL")),
            Index(f"{name}_expires_at_idx", "expires_at", postgresql_where=text("expires_at IS NOT NULL")),
        ]

    return _attach(metadata, name, schema, "idempotency_keys", items)


def outbox_tables(metadata: MetaData, name: str, schema: str | None) -> tuple[Table, Table]:
    """The events, and the claims: one row per batch that is in flight.

    States of an event: ready (`due_at` null), deferred (`due_at` set), published, dead. It is
    *tried* when `attempts` > 0. It is in flight as long as a claim lists its id.
    """

    def event_items() -> list[SchemaItem]:
        open_ = "published_at IS NULL AND dead_at IS NULL"
        return [
            Column("id", Uuid, primary_key=True),
            Column("position", BigInteger, Identity(always=True), nullable=False),
            Column("topic", Text, nullable=False),
            Column("key", Text),
            Column("payload", JSONB, nullable=False),
            Column("headers", JSONB(none_as_null=True)),
            Column("dedup_key", Text),
            Column("created_at", _TIME, nullable=False, server_default=func.now()),
            Column("due_at", _TIME),
            Column("attempts", Integer, nullable=False, server_default=text("0")),
            Column("last_error", Text),
            Column("published_at", _TIME),
            Column("dead_at", _TIME),
            _check("attempts >= 0", f"{name}_attempts_check"),
            _check(
                "published_at IS NULL OR (dead_at IS NULL AND due_at IS NULL)",
                f"{name}_published_check",
            ),
            _check("dead_at IS NULL OR due_at IS NULL", f"{name}_dead_check"),
            _check(
                "attempts = 0 OR due_at IS NOT NULL OR published_at IS NOT NULL OR dead_at IS NOT NULL",
                f"{name}_tried_check",
            ),
            Index(
                f"{name}_pending_idx",
                "position",
                postgresql_where=text(f"{open_} AND due_at IS NULL"),
            ),
            Index(
                f"{name}_deferred_idx",
                "due_at",
                "position",
                postgresql_where=text(f"{open_} AND due_at IS NOT NULL AND attempts = 0"),
            ),
            Index(
                f"{name}_tried_idx",
                "key",
                "position",
                postgresql_where=text(f"{open_} AND attempts > 0"),
            ),
            Index(f"{name}_dead_idx", "dead_at", postgresql_where=text("dead_at IS NOT NULL")),
            Index(
                f"{name}_dedup_idx",
                "topic",
                "dedup_key",
                unique=True,
                postgresql_where=text("dedup_key IS NOT NULL"),
            ),
        ]

    def claim_items() -> list[SchemaItem]:
        return [
            Column("number", BigInteger, Identity(always=True), primary_key=True),
            Column("token", Uuid, nullable=False),
            Column("claimed_by", Text, nullable=False),
            Column("expires_at", _TIME, nullable=False),
            Column("event_ids", ARRAY(Uuid), nullable=False),
            Column("keys", ARRAY(Text), nullable=False),
            Column("low", BigInteger),
            _check("cardinality(event_ids) > 0", f"{name}_claims_events_check"),
        ]

    claims = f"{name}_claims"
    # before one of the two is attached
    is_new = _present(metadata, claims, schema, "outbox_claims", claim_items) is None
    events_table = _attach(metadata, name, schema, "outbox", event_items)
    claims_table = _attach(metadata, claims, schema, "outbox_claims", claim_items)
    if is_new:
        store = _StoreUncompressed(claims_table).execute_if(dialect="postgresql")
        listen(claims_table, "after_create", store)
    return events_table, claims_table


def inbox_table(metadata: MetaData, name: str, schema: str | None) -> Table:
    """One row per consumer and event that was handled."""

    def items() -> list[SchemaItem]:
        return [
            Column("consumer", Text, primary_key=True),
            Column("event_id", Uuid, primary_key=True),
            Column("handled_at", _TIME, nullable=False, server_default=func.now()),
            Index(f"{name}_handled_at_idx", "handled_at"),
        ]

    return _attach(metadata, name, schema, "inbox", items)


def effects_table(metadata: MetaData, name: str, schema: str | None) -> Table:
    """One row per call to the outside: who makes it, what was asked, and how it ended.

    States: pending (somebody holds `token` until `expires_at`), done, failed, unknown. A pending
    row whose `expires_at` has passed counts as unknown. Done and failed rows are free again after
    their `expires_at`, if they have one. Works on PostgreSQL and on SQLite, where times are text
    in UTC with six digits of a second.
    """

    def items() -> list[SchemaItem]:
        open_ = text("status IN ('pending', 'unknown')")
        return [
            Column("key", Text, primary_key=True),
            Column("args_hash", LargeBinary, nullable=False),
            Column("status", Text, nullable=False),
            Column("result", Text),
            Column("error", Text),
            Column("token", Text, nullable=False),
            Column("provider_token", Text, nullable=False),
            Column("attempts", Integer, nullable=False),
            Column("created_at", _TIME, nullable=False),
            Column("updated_at", _TIME, nullable=False),
            Column("expires_at", _TIME),
            _check("status IN ('pending', 'done', 'failed', 'unknown')", f"{name}_status_check"),
            _check("(status = 'done') = (result IS NOT NULL)", f"{name}_result_check"),
            _check(
                "CASE status WHEN 'failed' THEN error IS NOT NULL "
                "WHEN 'unknown' THEN true ELSE error IS NULL END",
                f"{name}_error_check",
            ),
            _check(
                "CASE status WHEN 'pending' THEN expires_at IS NOT NULL "
                "WHEN 'unknown' THEN expires_at IS NULL ELSE true END",
                f"{name}_expiry_check",
            ),
            _check("attempts > 0", f"{name}_attempts_check"),
            Index(f"{name}_created_at_idx", "created_at"),
            Index(f"{name}_open_idx", "created_at", postgresql_where=open_, sqlite_where=open_),
        ]

    return _attach(metadata, name, schema, "effects", items)


def webhooks_table(metadata: MetaData, name: str, schema: str | None) -> Table:
    """One row per webhook: whose it is and where it goes, what it says (sealed), and how far it is.

    States: pending, delivered (an endpoint said 2xx), rejected (it said what no retry can mend), expired
    (nobody is known to have accepted it in time), quarantined (kept until somebody decides). A pending
    row with a `token` is leased: its attempt is being made until `due_at`. Without one, `due_at` is when
    the next attempt may begin. No attempt begins after `retry_until`.
    """

    def items() -> list[SchemaItem]:
        finished = "state IN ('delivered', 'expired', 'rejected')"
        return [
            Column("id", Uuid, primary_key=True),
            Column("dedup_digest", LargeBinary, nullable=False),
            Column("key", Text, nullable=False),
            Column("caller", Text, nullable=False),
            Column("account", Text),
            Column("type", Text, nullable=False),
            Column("origin", Text(collation="C"), nullable=False),  # in the order that Python has too
            Column("url_digest", LargeBinary, nullable=False),
            Column("signing_scope", Text),
            Column("key_id", Text, nullable=False),
            Column("nonce", LargeBinary, nullable=False),
            Column("sealed", LargeBinary, nullable=False),
            Column("state", Text, nullable=False, server_default=text("'pending'")),
            Column("attempts", Integer, nullable=False, server_default=text("0")),
            Column("last_error", Text),
            Column("token", Uuid),
            Column("created_at", _TIME, nullable=False, server_default=func.now()),
            Column("due_at", _TIME, nullable=False),
            Column("retry_until", _TIME, nullable=False),
            Column("finished_at", _TIME),
            _check(
                "state IN ('pending', 'delivered', 'expired', 'rejected', 'quarantined')",
                f"{name}_state_check",
            ),
            _check(f"({finished}) = (finished_at IS NOT NULL)", f"{name}_finished_check"),
            _check("token IS NULL OR state = 'pending'", f"{name}_lease_check"),
            _check(
                "CASE state WHEN 'delivered' THEN last_error IS NULL "
                "WHEN 'rejected' THEN last_error IS NOT NULL "
                "WHEN 'quarantined' THEN last_error IS NOT NULL ELSE true END",
                f"{name}_error_check",
            ),
            _check("attempts >= 0", f"{name}_attempts_check"),
            _check(
                "octet_length(dedup_digest) = 32 AND octet_length(url_digest) = 32 "
                "AND octet_length(nonce) = 12",
                f"{name}_lengths_check",
            ),
            Index(f"{name}_dedup_idx", "dedup_digest", "key", unique=True),
            Index(f"{name}_pending_idx", "origin", "due_at", postgresql_where=text("state = 'pending'")),
            Index(f"{name}_overdue_idx", "retry_until", postgresql_where=text("state = 'pending'")),
            Index(f"{name}_finished_idx", "retry_until", postgresql_where=text(finished)),
            Index(
                f"{name}_failed_idx",
                "state",
                "id",
                postgresql_where=text("state IN ('expired', 'rejected', 'quarantined')"),
            ),
        ]

    return _attach(metadata, name, schema, "webhooks", items)


_TIME = DateTime(timezone=True)


class _StoreUncompressed(ExecutableDDLElement):
    """Of a claims table, once it is made: to compress a batch's ids takes a tenth of a claim's time.

    Alembic does not know of it; `oncely check` gives the statement to those who use that.
    """

    def __init__(self, table: Table) -> None:
        self.table = table


@compiles(_StoreUncompressed)
def _compile(element: _StoreUncompressed, compiler: DDLCompiler, **_: object) -> str:
    name = compiler.preparer.format_table(element.table)
    return f"ALTER TABLE {name} ALTER COLUMN event_ids SET STORAGE EXTERNAL"


def _check(condition: str, name: str) -> CheckConstraint:
    """A constraint that bears this very name, like the indexes, whatever the naming convention."""
    return CheckConstraint(condition, name=conv(name))


def _attach(
    metadata: MetaData,
    name: str,
    schema: str | None,
    kind: str,
    items: Callable[[], list[SchemaItem]],
) -> Table:
    """The table of this name on the MetaData: the one that is there if it is ours, else a new one."""
    present = _present(metadata, name, schema, kind, items)
    if present is not None:
        return present
    return Table(name, metadata, *items(), schema=schema, info={"oncely": kind})


def _present(
    metadata: MetaData,
    name: str,
    schema: str | None,
    kind: str,
    items: Callable[[], list[SchemaItem]],
) -> Table | None:
    """The table of this name if it is there and ours.

    Raises TableNameTaken for another one, and ValueError for a name that PostgreSQL would cut short,
    or those of its indexes and constraints.
    """
    if not isinstance(metadata, MetaData):
        raise TypeError(f"metadata must be a MetaData (Base.metadata, say), not {metadata!r}")
    if not isinstance(name, str):
        raise TypeError(f"table_name must be a str, not {type(name).__name__}")
    if not name:
        raise ValueError("table_name is empty")
    if schema is not None and not isinstance(schema, str):
        raise TypeError(f"schema must be a str, not {type(schema).__name__}")
    names = [name, *(str(item.name) for item in items() if isinstance(item, (CheckConstraint, Index)))]
    longest = max(names, key=lambda each: len(each.encode()))
    if len(longest.encode()) > _LONGEST_NAME:
        raise ValueError(
            f"table name {name!r} is too long: {longest!r} has {len(longest.encode())} bytes, "
            f"and PostgreSQL keeps {_LONGEST_NAME}"
        )
    schema = schema if schema is not None else metadata.schema
    present = metadata.tables.get(name if schema is None else f"{schema}.{name}")
    if present is not None and present.info.get("oncely") != kind:
        raise TableNameTaken(present.fullname)
    return present
