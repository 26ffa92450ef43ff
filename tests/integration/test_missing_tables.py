"""What an application sees whose migrations have not run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import pytest
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from oncely import Event, IdempotencyKeys, Inbox, NewEvent, Outbox, Relay, TablesMissing
from oncely.event import uuid7
from oncely.testing import RecordingPublisher
from oncely.webhooks import Keyring, Webhooks

keys, outbox, inbox = IdempotencyKeys(MetaData()), Outbox(MetaData()), Inbox(MetaData())
webhooks = Webhooks(MetaData(), keyring=Keyring({"a": Keyring.new_key()}, write="a"))
NOW = datetime.now(UTC)


async def nothing() -> tuple[int, None]:
    return 204, None


USES: dict[str, tuple[str, Callable[[AsyncSession], Awaitable[object]]]] = {
    "run": (
        "idempotency_keys",
        lambda session: keys.run(session, scope="s", key="k", fingerprint=b"f", work=nothing),
    ),
    "emit": ("outbox", lambda session: outbox.emit(session, "t", 1)),
    "emit_many": ("outbox", lambda session: outbox.emit_many(session, [NewEvent("t", 1)])),
    "emit, dedup_key": ("outbox", lambda session: outbox.emit(session, "t", 1, dedup_key="d")),
    "emit_many, dedup_key": (
        "outbox",
        lambda session: outbox.emit_many(session, [NewEvent("t", 1, dedup_key="d")]),
    ),
    "cancel": ("outbox", lambda session: outbox.cancel(session, uuid7())),
    "outbox stats": ("outbox", lambda session: outbox.stats(session)),
    "lag": ("outbox", lambda session: outbox.lag_seconds(session)),
    "dead": ("outbox", lambda session: outbox.dead(session)),
    "replay": ("outbox", lambda session: outbox.replay(session)),
    "republish": ("outbox", lambda session: outbox.republish(session, since=NOW)),
    "prune": ("outbox", lambda session: outbox.prune(session, older_than=NOW)),
    "get": ("idempotency_keys", lambda session: keys.get(session, scope="s", key="k")),
    "record": ("idempotency_keys", lambda session: keys.record(session, scope="s", key="k")),
    "forget": ("idempotency_keys", lambda session: keys.forget(session, scope="s", key="k")),
    "forget scope": ("idempotency_keys", lambda session: keys.forget(session, scope="s")),
    "key stats": ("idempotency_keys", lambda session: keys.stats(session)),
    "enqueue": (
        "webhooks",
        lambda session: webhooks.enqueue(session, "https://example.com", b"b", key="k", caller="c", type="t"),
    ),
    "reseal": ("webhooks", lambda session: webhooks.reseal(session)),
    "webhook stats": ("webhooks", lambda session: webhooks.stats(session)),
    "inbox stats": ("inbox", lambda session: inbox.stats(session)),
    "inbox": ("inbox", lambda session: inbox.run(session, uuid7(), nothing, consumer="c")),
}


@pytest.mark.parametrize("use", USES)
async def test_a_table_that_is_not_there_is_named(
    sessions: async_sessionmaker[AsyncSession], driver: str, use: str
) -> None:
    name, call = USES[use]
    async with sessions() as session:
        with pytest.raises(TablesMissing, match="run your migrations") as raised:
            await call(session)
    assert raised.value.name == name


async def test_a_relay_ends_with_the_missing_tables_name(sessions: async_sessionmaker[AsyncSession]) -> None:
    with pytest.raises(TablesMissing, match="'outbox'"):
        await Relay(outbox, sessions, RecordingPublisher(), listen=False).run()


async def test_an_inbox_handler_names_the_missing_table(sessions: async_sessionmaker[AsyncSession]) -> None:
    async def handle(session: AsyncSession, event: Event) -> None:
        raise AssertionError

    with pytest.raises(TablesMissing, match="'inbox'"):
        await inbox.handler(sessions, handle, consumer="c")(Event(uuid7(), "t", 1))
