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
from oncely.check.location import located, name_of

__all__ = ["check_horizon"]


async def check_horizon(
    connection: AsyncConnection,
    outboxes: Iterable[Table],
    *,
    longer_than: timedelta = timedelta(minutes=1),
) -> list[Finding]:
    """Transactions, prepared transactions, replicas and slots that hold the horizon for `longer_than`.

    A slot has no age in time: it is named when it is a million transactions behind, or nobody uses it.
    When there is one, each outbox is named too, with what it carries along. How long transactions of other
    roles have been open is seen by members of pg_read_all_stats only.
    """
    holders = [
        *(_transaction(row) for row in await connection.execute(_TRANSACTIONS, {"age": longer_than})),
        *(_prepared(row) for row in await connection.execute(_PREPARED, {"age": longer_than})),
        *(_slot(row) for row in await connection.execute(_SLOTS, {"transactions": _FAR_BEHIND})),
    ]
    if not holders:
        return []
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


def _transaction(row: Row[tuple[object, ...]]) -> Finding:
    who = f"process {row.pid}"
    if row.application_name:
        who += f" ({row.application_name})"
    since = f"for {_length(row.age)}" if row.age is not None else "for a time that this role may not see"
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
        f"was prepared {_length(row.age)} ago by {row.owner} in database {row.database} and never ended; "
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


def _length(age: timedelta) -> str:
    return str(timedelta(seconds=round(age.total_seconds())))


# The horizon of a table is held by those in its own database and by replicas, the floor of a relay by
# every transaction that has written.
_TRANSACTIONS = text("""
SELECT pid, application_name, usename, state, datname, datname = current_database() AS here,
       clock_timestamp() - xact_start AS age, backend_xid IS NOT NULL AS writes
FROM pg_catalog.pg_stat_activity
WHERE pid <> pg_backend_pid()
  AND (backend_xid IS NOT NULL
       OR (backend_xmin IS NOT NULL AND (datname = current_database() OR backend_type = 'walsender')))
  AND backend_type <> 'autovacuum worker'
  AND (xact_start IS NULL OR xact_start < clock_timestamp() - CAST(:age AS interval))
  AND (xact_start IS NOT NULL OR state IS NULL)
ORDER BY xact_start
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
WHERE NOT active OR age(xmin) > CAST(:transactions AS int)
ORDER BY slot_name
""")

_CARRIED = text("""
SELECT n_dead_tup AS dead, n_live_tup AS live, pg_size_pretty(pg_total_relation_size(relid)) AS size
FROM pg_catalog.pg_stat_user_tables
WHERE relid = to_regclass(:name)
""")
