"""Upkeep: what autovacuum was told about tables in which every row changes and most are deleted.

By default autovacuum comes when a fifth of a table is dead. A queue that keeps ten million published
events for a week would then carry two million dead ones, and a claims table of a hundred rows, each
written and deleted in seconds, is read through thousands of dead ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sqlalchemy import Table, text
from sqlalchemy.ext.asyncio import AsyncConnection

from oncely.check.finding import Finding
from oncely.check.location import located, name_of

__all__ = ["check_upkeep"]

_RECOMMENDED = {
    "outbox": {"autovacuum_vacuum_scale_factor": "0.01", "autovacuum_vacuum_insert_scale_factor": "0.05"},
    "outbox_claims": {"autovacuum_vacuum_scale_factor": "0", "autovacuum_vacuum_threshold": "1000"},
    "inbox": {"autovacuum_vacuum_scale_factor": "0.02"},
    "idempotency_keys": {"autovacuum_vacuum_scale_factor": "0.02"},
    "webhooks": {"autovacuum_vacuum_scale_factor": "0.01"},
}
"""By what `Table.info["oncely"]` says."""


async def check_upkeep(connection: AsyncConnection, tables: Iterable[Table]) -> list[Finding]:
    """Tables without settings of their own for autovacuum, autovacuum that is off, ids that are compressed.

    A setting that is there is the user's choice, whatever it says. Of a partitioned table each partition
    is looked at: it has no settings of its own.
    """
    findings = []
    if await connection.scalar(text("SELECT current_setting('autovacuum')")) == "off":
        findings.append(
            Finding(
                "wrong",
                "autovacuum",
                "is off for the whole server: nothing removes dead rows",
                "ALTER SYSTEM SET autovacuum = on;\nSELECT pg_reload_conf();",
            )
        )
    for table in located(connection, tables):
        recommended = _RECOMMENDED.get(table.info.get("oncely", ""))
        if recommended is None:
            continue
        for partition, options in await connection.execute(_OPTIONS, {"name": name_of(table)}):
            of_table = dict(option.split("=", 1) for option in options)
            findings += _check(partition or name_of(table), of_table, recommended)
        is_claims = table.info["oncely"] == "outbox_claims"
        if is_claims and await connection.scalar(_COMPRESSES_IDS, {"name": name_of(table)}):
            findings.append(
                Finding(
                    "advice",
                    name_of(table),
                    "each claim compresses the ids of its batch, which takes a tenth of its time for nothing",
                    f"ALTER TABLE {name_of(table)} ALTER COLUMN event_ids SET STORAGE EXTERNAL;",
                )
            )
    return findings


def _check(name: str, options: Mapping[str, str], recommended: Mapping[str, str]) -> list[Finding]:
    if options.get("autovacuum_enabled", "true").lower() in ("false", "off", "no", "0"):
        return [
            Finding(
                "wrong",
                name,
                "autovacuum is off for this table: nothing removes its dead rows",
                f"ALTER TABLE {name} RESET (autovacuum_enabled);",
            )
        ]
    missing = {setting: value for setting, value in recommended.items() if setting not in options}
    if not missing:
        return []
    settings = ", ".join(f"{setting} = {value}" for setting, value in missing.items())
    return [
        Finding(
            "advice",
            name,
            "autovacuum comes as late as for any table: " + ", ".join(missing),
            f"ALTER TABLE {name} SET ({settings});",
        )
    ]


_COMPRESSES_IDS = text("""
SELECT attstorage <> 'e' FROM pg_catalog.pg_attribute
WHERE attrelid = to_regclass(:name) AND attname = 'event_ids'
""")

_OPTIONS = text("""
SELECT CASE WHEN level > 0 THEN leaf.oid::regclass::text END AS partition,
       coalesce(leaf.reloptions, '{}') AS options
FROM pg_catalog.pg_class
CROSS JOIN LATERAL (
    SELECT pg_class.oid AS leaf_oid, 0 AS level WHERE relkind <> 'p'
    UNION ALL
    SELECT relid, level FROM pg_catalog.pg_partition_tree(pg_class.oid) WHERE relkind = 'p' AND isleaf
) AS leaves
JOIN pg_catalog.pg_class AS leaf ON leaf.oid = leaf_oid
WHERE pg_class.oid = to_regclass(:name)
ORDER BY partition
""")
