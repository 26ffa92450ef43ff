"""Webhooks: a call to a customer's endpoint exists if and only if the change it tells of was committed.

    enqueue ─▶ row ┃table┃ worker ─▶ address checked, signed ─▶ the endpoint

`enqueue` writes a row in the caller's transaction, sealed: the table shows where a webhook goes and whose
it is, not what it says. The same again is recognised by caller, account, address, type and key, until
seven days after the last time that it could be tried. `oncely.webhooks.worker` sends them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import MetaData, Table

from oncely.arguments import check_count, check_id, check_kind
from oncely.errors import InvalidKey
from oncely.event import uuid7
from oncely.storable import check_key
from oncely.tables import webhooks_table
from oncely.telemetry.commit import tell_when_committed
from oncely.telemetry.observer import Observer, guarded
from oncely.telemetry.records import WebhookEnqueued, WebhooksMeasured
from oncely.transaction import Caller, Sessionmaker, check_sessionmaker, join, says_what_is_missing
from oncely.webhooks.destination import Destination, HeadersLike, check_headers
from oncely.webhooks.leases import Lease, Leases
from oncely.webhooks.operations import Operations, Which
from oncely.webhooks.records import ENDED_BADLY, Resealed, State, WebhookRecord, WebhookStats
from oncely.webhooks.rows import Rows
from oncely.webhooks.sealing import Content, Keyring, Routing

__all__ = ["Webhooks"]

_DAY = timedelta(days=1)


class Webhooks:
    """The webhooks of one application: a table on its MetaData, and what is done with it.

    `keyring` seals and opens. `horizon`, 1 to 7 days from enqueue, is how long a webhook is tried. The
    `observer` is told what happens here and in the workers of this table.
    """

    table: Table

    def __init__(
        self,
        metadata: MetaData,
        *,
        keyring: Keyring,
        horizon: timedelta = timedelta(days=3),
        table_name: str = "webhooks",
        schema: str | None = None,
        max_body_bytes: int = 1_048_576,
        observer: Observer | None = None,
    ) -> None:
        check_kind(keyring, Keyring, "keyring")
        check_kind(horizon, timedelta, "horizon")
        if not _DAY <= horizon <= 7 * _DAY:
            raise ValueError(f"horizon must be 1 to 7 days, not {horizon}")
        check_count(max_body_bytes, "max_body_bytes")
        self.table = webhooks_table(metadata, table_name, schema)
        self.keyring = keyring
        self.horizon = horizon
        self.max_body_bytes = max_body_bytes
        self.observer = guarded(observer)
        self.leases = Leases(self.table)
        self._rows = Rows(self.table, keyring)
        self._operations = Operations(self.table)

    async def enqueue(
        self,
        session: Caller,
        url: str,
        body: bytes,
        *,
        key: str,
        caller: str,
        type: str,  # noqa: A002  as it is called everywhere
        account: str | None = None,
        signing_scope: str | None = None,
        headers: HeadersLike = (),
    ) -> UUID:
        """Write a webhook in the caller's transaction; it is sent if and only if that commits.

        `body` is sent as it is. `key` names what is told of; with the same `caller` (the part of the
        application that sends), `account` (the customer), `url` and `type` it is the same webhook: the
        first one's id comes back, as long as its row is kept. While the first is uncommitted, the
        second waits for it. `signing_scope` names the credentials, for a worker with a resolver.

        Raises, before any SQL: ValueError for an address, header or body that cannot be sent;
        InvalidKey for text that cannot be stored; NoTransaction in autocommit. Raises WebhookReused
        when the first one has another body, other headers or another signing scope; SealingKeyMissing
        or SealBroken when it does not open, so that nobody can tell.
        """
        destination = Destination.parse(url)
        if not isinstance(body, bytes):
            raise TypeError(f"body must be bytes, not {body.__class__.__name__}")
        if len(body) > self.max_body_bytes:
            raise ValueError(f"body has {len(body):,} bytes; at most {self.max_body_bytes:,} are sent")
        content = Content(destination.url, check_headers(headers), body)
        optional = {"account": account, "signing_scope": signing_scope}
        given = {name: value for name, value in optional.items() if value is not None}
        for name, value in ({"key": key, "caller": caller, "type": type} | given).items():
            check_key(value, name)
            if not value:
                raise InvalidKey(f"{name} is empty")
        row = Routing(
            table=self.table.name,
            id=uuid7(),
            origin=destination.origin,
            url_digest=destination.digest,
            caller=caller,
            account=account,
            type=type,
            signing_scope=signing_scope,
            key=key,
            dedup_digest=_dedup_digest(caller, account, destination.url, type),
        )
        connection = await join(session, self.table)
        with says_what_is_missing(self.table):
            webhook_id = await self._rows.write(connection, row, content, horizon=self.horizon)
        if self.observer is not None:
            record = WebhookEnqueued(webhooks=self.table.fullname, type=type, repeated=webhook_id != row.id)
            tell_when_committed(session, self.observer, record)
        return webhook_id

    async def prune(
        self,
        session: Caller,
        *,
        older_than: timedelta | datetime = timedelta(days=7),
        limit: int | None = None,
    ) -> int:
        """Delete finished webhooks whose last possible retry was before `older_than`; returns how many.

        `older_than` is an age or an aware time; what is younger than seven days is kept all the same, so
        that a late duplicate is recognised. Overdue ones are expired first. In batches of 1,000,
        skipping rows that somebody has locked, up to `limit`. Quarantined ones are kept: nobody has
        decided about them yet.
        """
        return await self._operations.prune(session, older_than=older_than, limit=limit)

    async def purge(self, session: Caller, *, limit: int | None = None) -> int:
        """`prune` as early as it may be."""
        return await self.prune(session, limit=limit)

    async def prunable(
        self,
        session: Caller,
        *,
        older_than: timedelta | datetime = timedelta(days=7),
        at_most: int = 100_000,
    ) -> int:
        """How many webhooks `prune` would delete, none counted beyond `at_most`."""
        check_count(at_most, "at_most")
        return await self._operations.prunable(session, older_than=older_than, at_most=at_most)

    async def stats(self, session: Caller, *, origins: int = 100) -> WebhookStats:
        """Counts of the table, and of the `origins` with the most pending webhooks."""
        check_count(origins, "origins", least=0)
        return await self._operations.stats(session, limit=origins)

    async def measure(self, sessionmaker: Sessionmaker) -> Sequence[WebhooksMeasured]:
        """One look, as `oncely.telemetry.Gauges` takes it."""
        check_sessionmaker(sessionmaker)
        async with sessionmaker() as session:
            with says_what_is_missing(self.table):
                stats = await self.stats(session, origins=1)
        return [
            WebhooksMeasured(
                webhooks=self.table.fullname,
                pending=stats.pending,
                failing=stats.failing,
                quarantined=stats.quarantined,
                oldest=timedelta(seconds=stats.oldest_seconds),
            )
        ]

    async def list(
        self,
        session: Caller,
        *,
        state: State | None = None,
        ids: Iterable[UUID] | None = None,
        origin: str | None = None,
        caller: str | None = None,
        limit: int = 100,
    ) -> Sequence[WebhookRecord]:
        """Webhooks that match all that is given, newest first, without what is sealed."""
        which = Which(ids=ids, origin=origin, caller=caller, limit=limit)
        return await self._operations.list(session, which, state=state)

    async def dead(
        self,
        session: Caller,
        *,
        states: Iterable[State] = ENDED_BADLY,
        ids: Iterable[UUID] | None = None,
        type: str | None = None,  # noqa: A002  as it is called everywhere
        error: str | None = None,
        origin: str | None = None,
        caller: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 100,
    ) -> Sequence[WebhookRecord]:
        """Webhooks that ended badly, in one of these states, and match all that is given; oldest first.

        `error` is what `last_error` says ("HTTP 410"); `since` and `until` bound when it ended so.
        """
        which = Which(ids=ids, error=error, origin=origin, caller=caller, limit=limit)
        return await self._operations.dead(
            session, which, states=states, type_=type, since=since, until=until
        )

    async def retry(
        self,
        session: Caller,
        *,
        ids: Iterable[UUID] | None = None,
        origin: str | None = None,
        caller: str | None = None,
        horizon: timedelta = _DAY,
        limit: int = 10_000,
    ) -> int:
        """Send expired and rejected webhooks again, with the id they had; how many.

        Those that match all that is given, or all. They have at least `horizon` from now.
        """
        which = Which(ids=ids, origin=origin, caller=caller, limit=limit)
        states = (State.EXPIRED, State.REJECTED)
        return await self._operations.reopen(session, which, states=states, horizon=_checked_horizon(horizon))

    async def release(
        self,
        session: Caller,
        *,
        ids: Iterable[UUID] | None = None,
        error: str | None = None,
        origin: str | None = None,
        caller: str | None = None,
        horizon: timedelta = _DAY,
        limit: int = 10_000,
    ) -> int:
        """Send quarantined webhooks after all, when what was wrong has been mended; how many.

        `error` is why they are there, such as "SealingKeyMissing" when the key is back. Those that
        match all that is given, or all. They have at least `horizon` from now.
        """
        which = Which(ids=ids, error=error, origin=origin, caller=caller, limit=limit)
        states = (State.QUARANTINED,)
        return await self._operations.reopen(session, which, states=states, horizon=_checked_horizon(horizon))

    async def discard(
        self,
        session: Caller,
        *,
        ids: Iterable[UUID] | None = None,
        error: str | None = None,
        origin: str | None = None,
        caller: str | None = None,
        limit: int = 10_000,
    ) -> int:
        """Give quarantined webhooks up: they become rejected, and are pruned in time; how many."""
        which = Which(ids=ids, error=error, origin=origin, caller=caller, limit=limit)
        return await self._operations.discard(session, which)

    async def reseal(self, session: Caller, *, after: UUID | None = None, limit: int = 1_000) -> Resealed:
        """Seal the next rows with the key that writes now, in the order of their ids, beginning `after`.

        For when a key may be known to others: call it, each time in a transaction of its own, with the
        `last_id` of the call before, until that is None. Rows that do not open are left as they are.
        """
        check_count(limit, "limit")
        if after is not None:
            check_id(after, "after")
        connection = await join(session, self.table)
        with says_what_is_missing(self.table):
            return await self._rows.reseal(connection, after=after, limit=limit)

    async def sealed_with(self, session: Caller) -> dict[str, int]:
        """How many rows are sealed with each key: one that has none left may go from the keyring."""
        return await self._operations.sealed_with(session)

    def open(self, lease: Lease) -> Content:
        """What a leased webhook says. Raises SealingKeyMissing and SealBroken."""
        return self.keyring.open(lease.sealed, lease.routing)


def _dedup_digest(caller: str, account: str | None, url: str, type_: str) -> bytes:
    """Of an array that tells a text from none, so that no two webhooks are taken for one."""
    return hashlib.sha256(json.dumps([caller, account, url, type_]).encode()).digest()


def _checked_horizon(horizon: timedelta) -> timedelta:
    check_kind(horizon, timedelta, "horizon")
    if not timedelta(0) < horizon <= 7 * _DAY:
        raise ValueError(f"horizon must be above 0 and at most 7 days, not {horizon}")
    return horizon
