"""Rows: a webhook is written once, and recognised when it comes again.

What a row says openly is its routing, everything else is sealed. Whether a webhook that comes again is
the same can only be told by opening the first one; there is no hash of what it says, since a short text
could be guessed from it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Integer, Interval, LargeBinary, RowMapping, Table, Text, Uuid
from sqlalchemy.ext.asyncio import AsyncConnection

from oncely.errors import RowsHidden, SealBroken, SealingKeyMissing, WebhookReused
from oncely.statement import Statement
from oncely.webhooks.records import Resealed
from oncely.webhooks.sealing import Content, Keyring, Routing, Sealed

__all__ = ["ROUTING_AND_SEALED", "Rows", "routing", "sealed"]


class Rows:
    """The rows of one table, sealed and opened with `keyring`."""

    def __init__(self, table: Table, keyring: Keyring) -> None:
        self._table = table
        self._keyring = keyring
        tables = {"webhooks": table}
        self._insert = Statement(
            _INSERT,
            tables,
            {
                "id": Uuid,
                "dedup_digest": LargeBinary,
                "key": Text,
                "caller": Text,
                "account": Text,
                "type": Text,
                "origin": Text,
                "url_digest": LargeBinary,
                "signing_scope": Text,
                "key_id": Text,
                "nonce": LargeBinary,
                "sealed": LargeBinary,
                "horizon": Interval,
            },
        )
        self._find = Statement(_FIND, tables, {"dedup_digest": LargeBinary, "key": Text})
        self._stale = Statement(_STALE, tables, {"key_id": Text, "after": Uuid, "limit": Integer})
        self._reseal = Statement(
            _RESEAL, tables, {"id": Uuid, "key_id": Text, "nonce": LargeBinary, "sealed": LargeBinary}
        )

    async def write(
        self, connection: AsyncConnection, row: Routing, content: Content, *, horizon: timedelta
    ) -> UUID:
        """Write it, if it is new; the id of the first one. Raises WebhookReused and what opening raises."""
        values = {
            "id": row.id,
            "dedup_digest": row.dedup_digest,
            "key": row.key,
            "caller": row.caller,
            "account": row.account,
            "type": row.type,
            "origin": row.origin,
            "url_digest": row.url_digest,
            "signing_scope": row.signing_scope,
            "horizon": horizon,
            **_stored(self._keyring.seal(content, row)),
        }
        for _ in range(_MOST_TRIES):
            if (await connection.execute(self._insert, values)).rowcount:
                return row.id
            same = {"dedup_digest": row.dedup_digest, "key": row.key}
            found = (await connection.execute(self._find, same)).mappings().one_or_none()
            if found is None:
                continue  # pruned in this very moment: the key is free
            first = routing(self._table, found)
            if (
                first.signing_scope != row.signing_scope
                or self._keyring.open(sealed(found), first) != content
            ):
                raise WebhookReused(row.key, first.id)
            return first.id
        raise RowsHidden(self._table.fullname)

    async def reseal(self, connection: AsyncConnection, *, after: UUID | None, limit: int) -> Resealed:
        """Seal the next rows with the key that writes; those that do not open are left as they are."""
        parameters = {"key_id": self._keyring.write, "after": after or UUID(int=0), "limit": limit}
        rows = (await connection.execute(self._stale, parameters)).mappings().all()
        renewed: list[dict[str, Any]] = []
        for row in rows:
            place = routing(self._table, row)
            try:
                content = self._keyring.open(sealed(row), place)
            except (SealBroken, SealingKeyMissing):
                continue
            renewed.append({"id": place.id, **_stored(self._keyring.seal(content, place))})
        if renewed:
            await connection.execute(self._reseal, renewed)
        last_id = rows[-1]["id"] if len(rows) == limit else None
        return Resealed(len(renewed), len(rows) - len(renewed), last_id)


def routing(table: Table, row: RowMapping) -> Routing:
    """What a row says openly. The drivers give bytes in kinds of their own."""
    return Routing(
        table=table.name,
        id=row["id"],
        origin=row["origin"],
        url_digest=bytes(row["url_digest"]),
        caller=row["caller"],
        account=row["account"],
        type=row["type"],
        signing_scope=row["signing_scope"],
        key=row["key"],
        dedup_digest=bytes(row["dedup_digest"]),
    )


def sealed(row: RowMapping) -> Sealed:
    """What a row hides."""
    return Sealed(row["key_id"], bytes(row["nonce"]), bytes(row["sealed"]))


ROUTING_AND_SEALED = """
id, origin, url_digest, caller, account, type, signing_scope, key, dedup_digest, key_id, nonce, sealed
"""


_MOST_TRIES = 10


def _stored(sealing: Sealed) -> dict[str, object]:
    return {"key_id": sealing.key_id, "nonce": sealing.nonce, "sealed": sealing.ciphertext}


# DO NOTHING waits for an open insert of the same webhook.
_INSERT = """
INSERT INTO {webhooks} (id, dedup_digest, key, caller, account, type, origin, url_digest, signing_scope,
                        key_id, nonce, sealed, created_at, due_at, retry_until)
VALUES (:id, :dedup_digest, :key, :caller, :account, :type, :origin, :url_digest, :signing_scope,
        :key_id, :nonce, :sealed,
        statement_timestamp(), statement_timestamp(), statement_timestamp() + :horizon)
ON CONFLICT (dedup_digest, key) DO NOTHING
"""

_FIND = f"""
SELECT {ROUTING_AND_SEALED} FROM {{webhooks}} WHERE dedup_digest = :dedup_digest AND key = :key
"""  # noqa: S608  a constant

# It waits for rows that are locked: a row left out would keep the old key needed.
_STALE = f"""
SELECT {ROUTING_AND_SEALED} FROM {{webhooks}}
WHERE key_id <> :key_id AND id > :after
ORDER BY id LIMIT :limit
FOR UPDATE
"""  # noqa: S608  a constant

_RESEAL = """
UPDATE {webhooks} SET key_id = :key_id, nonce = :nonce, sealed = :sealed WHERE id = :id
"""
