"""What an application sees whose migrations have not run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from oncely import Event, IdempotencyKeys, Inbox, NewEvent, Outbox, Relay, TablesMissing
from oncely.event import uuid7
from oncely.testing import RecordingPublisher

keys, outbox, inbox = IdempotencyKeys(MetaData()), Outbox(MetaData()), Inbox(MetaData())


async def nothing() -> tuple[int, None]:
    return 204, None


USES: dict[str, tuple[str, Callable[[AsyncSession], Awaitable[object]]]] = {
    "run": (
        "idempotency_keys",
        lambda session: keys.run(session, scope="s", key="k", fingerprint=b"f", work=nothing),
    ),
    "emit": ("outbox", lambda session: outbox.emit(session, "t", 1)),
    "emit_many": ("outbox", lambda session: outbox.emit_many(session, [NewEvent("t", 1)])),
    "stats": ("outbox", outbox.stats),
    "lag_seconds": ("outbox", outbox.lag_seconds),
    "dead": ("outbox", outbox.dead),
    "replay": ("outbox", lambda session: outbox.replay(session, topic="t")),
    "prune": ("outbox", lambda session: outbox.prune(session, older_than=timedelta(days=1))),
    "keys.stats": ("idempotency_keys", keys.stats),
    "inbox.stats": ("inbox", inbox.stats),
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
