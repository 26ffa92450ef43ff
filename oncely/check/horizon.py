"""Horizon: who keeps PostgreSQL from cleaning up behind a queue.

PostgreSQL removes a dead row only when no transaction could still see it. A queue leaves one behind for
every event that is published, so a transaction that stays open for long, a prepared one that nobody
ends, or a replica that asks for old rows makes its tables and indexes grow. Relays do not read again what
lies behind them, unless the transaction has written: then an event of it may still come before.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from sqlalchemy import Row, Table, text
from sqlalchemy.ext.asyncio import AsyncConnection

from oncely.check.finding import Finding
from oncely.check.length import spell
from oncely.check.location import PASTED, located, name_of

__all__ = ["check_horizon"]


async def check_horizon(
    connection: AsyncConnection,
    outboxes: Iterable[Table],
    *,
    longer_than: timedelta = timedelta(minutes=1),
) -> list[Finding]:
    """Transactions, prepared transactions, replicas and slots that hold the horizon for `longer_than`.

    Of replicas and slots no time is known, nor of other roles' transactions to those who are no members of
    pg_read_all_stats: they are named when they are a million transactions behind, and a slot when nobody
    uses it. When something holds it, each outbox is named too, with what it carries along.
    """
    hidden = await connection.scalar(_HIDDEN)
    limits = {"age": longer_than, "transactions": _FAR_BEHIND}
    holders = [
        *([_unseen(hidden)] if hidden is not None else ()),
        *(_transaction(row) for row in await connection.execute(_TRANSACTIONS, limits)),
        *(_prepared(row) for row in await connection.execute(_PREPARED, {"age": longer_than})),
        *(_slot(row) for row in await connection.execute(_SLOTS, {"transactions": _FAR_BEHIND})),
    ]
    if all(finding.severity == "advice" for finding in holders):
        return holders
    carried = []
    for table in located(connection, outboxes):
        name = name_of(table)
        row = (await connection.execute(_CARRIED, {"name": name})).one_or_none()
        if row is not None:
            carried.append(
                Finding(
                    "advice",
                    name,
                    f"meanwhile carries {row.dead:,} dead rows that cannot be removed beside {row.live:,} "
                    f"live ones (by the statistics), in {row.size} with its indexes",
                )
            )
    return [*holders, *carried]


_FAR_BEHIND = 1_000_000


def _unseen(role: str) -> Finding:
    return Finding(
        "advice",
        f"role {role}",
        "does not see how long the transactions of other roles have been open",
        f"GRANT pg_read_all_stats TO {PASTED.identifier_preparer.quote(role)};",
    )


def _transaction(row: Row[tuple[object, ...]]) -> Finding:
    who = f"process {row.pid}"
    if row.application_name:
        who += f" ({row.application_name})"
    if row.age is None and row.backend_type == "walsender":
        message = f"serves a replica whose queries hold the horizon back by {row.held:,} transactions"
        return Finding("wrong", who, message)
    since = f"for {spell(row.age)}" if row.age is not None else f"since {row.held:,} transactions ago"
    state = row.state or "state unknown"
    effect = "has written: relays read again what was published since" if row.writes else "holds the horizon"
    where = "" if row.here else f" in database {row.datname}"
    return Finding(
        "wrong",
        who,
        f"has had a transaction open{where} {since} as {row.usename}, {state}; it {effect}",
        f"SELECT pg_terminate_backend({row.pid});",
    )


def _prepared(row: Row[tuple[object, ...]]) -> Finding:
    return Finding(
        "wrong",
        f"prepared transaction {row.gid}",
        f"was prepared {spell(row.age)} ago by {row.owner} in database {row.database} and never ended; "
        "it holds the horizon and its locks",
        f"ROLLBACK PREPARED '{row.gid.replace(chr(39), chr(39) * 2)}';",
    )


def _slot(row: Row[tuple[object, ...]]) -> Finding:
    if row.held is None:
        return Finding(
            "wrong",
            f"replication slot {row.slot_name}",
            "is used by nobody: it keeps all of the write-ahead log since, until the disk is full",
            f"SELECT pg_drop_replication_slot('{row.slot_name}');",
        )
    use = "" if row.active else ", and nobody uses it"
    return Finding(
        "wrong",
        f"replication slot {row.slot_name}",
        f"holds the horizon back by {row.held:,} transactions{use}",
        None if row.active else f"SELECT pg_drop_replication_slot('{row.slot_name}');",
    )


# The horizon of a table is held by those in its own database and by replicas, the floor of a relay by
# every transaction that has written.
_TRANSACTIONS = text("""
SELECT pid, application_name, usename, state, datname, datname = current_database() AS here, backend_type,
       clock_timestamp() - xact_start AS age, backend_xid IS NOT NULL AS writes,
       greatest(age(backend_xid), age(backend_xmin)) AS held
FROM pg_catalog.pg_stat_activity AS activity
WHERE pid <> pg_backend_pid()
  AND (backend_xid IS NOT NULL
       OR (backend_xmin IS NOT NULL AND (datname = current_database() OR backend_type = 'walsender')))
  AND CASE WHEN xact_start IS NOT NULL THEN xact_start < clock_timestamp() - CAST(:age AS interval)
           ELSE greatest(age(backend_xid), age(backend_xmin)) > CAST(:transactions AS int) END
  AND backend_type IS DISTINCT FROM 'autovacuum worker' AND backend_type IS DISTINCT FROM 'parallel worker'
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_stat_progress_vacuum AS vacuum WHERE vacuum.pid = activity.pid)
ORDER BY xact_start
""")

_HIDDEN = text("""
SELECT current_user FROM pg_catalog.pg_stat_activity
WHERE backend_type IS NULL AND datname IS NOT NULL AND usename IS NOT NULL
LIMIT 1
""")

_PREPARED = text("""
SELECT gid, owner, database, clock_timestamp() - prepared AS age
FROM pg_catalog.pg_prepared_xacts
WHERE prepared < clock_timestamp() - CAST(:age AS interval)
ORDER BY prepared
""")

_SLOTS = text("""
SELECT slot_name, active, age(xmin) AS held
FROM pg_catalog.pg_replication_slots
WHERE (NOT active AND restart_lsn IS NOT NULL) OR age(xmin) > CAST(:transactions AS int)
ORDER BY slot_name
""")

_CARRIED = text("""
SELECT n_dead_tup AS dead, n_live_tup AS live, pg_size_pretty(pg_total_relation_size(relid)) AS size
FROM pg_catalog.pg_stat_user_tables
WHERE relid = to_regclass(:name)
""")
