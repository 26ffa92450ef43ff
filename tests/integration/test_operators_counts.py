"""What operators are told beforehand is what is then done, on both drivers; and what the rooms count."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import IdempotencyKeys, Inbox, Outbox
from oncely.event import uuid7
from oncely.idempotency import KeyRecord, KeyStats
from oncely.inbox import InboxStats
from oncely.webhooks import State, Webhooks
from tests.database import both_drivers
from tests.outboxes import Sessions, emit, execute, fail, rows
from tests.webhooks import enqueue, make_webhooks

pytestmark = [pytest.mark.in_schema, both_drivers]

NOW = timedelta(0)
DAY = timedelta(days=1)


@pytest.fixture
async def keys(engine: AsyncEngine) -> IdempotencyKeys:
    keys = IdempotencyKeys(metadata := MetaData())
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    return keys


@pytest.fixture
async def inbox(engine: AsyncEngine) -> Inbox:
    inbox = Inbox(metadata := MetaData())
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    return inbox


async def _made() -> tuple[int, str]:
    return 201, "made"


async def _nothing() -> None: ...


async def store(keys: IdempotencyKeys, sessions: Sessions, key: str, ttl: timedelta | None = None) -> None:
    async with sessions.begin() as session:
        await keys.run(session, scope="7", key=key, fingerprint=b"1" * 32, work=_made, ttl=ttl)


async def test_the_ids_of_dead_events_are_those_that_a_replay_takes(
    outbox: Outbox, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1, 2, 3)
    await fail(outbox, sessions, 1, 2, 3, delay=None)
    [other] = await emit(outbox, sessions, 4, topic="other")
    await fail(outbox, sessions, 4, error="KeyError: 4", delay=None)
    async with sessions.begin() as session:
        first, second = await outbox.dead_ids(session, topic="t", limit=2)
        assert await outbox.dead_ids(session, error="KeyError") == [other]
        assert [event.payload_json for event in await outbox.dead(session, ids=[second, first])] == ["1", "2"]
        assert await outbox.replay(session, ids=[first, second], topic="t") == 2
        assert len(await outbox.dead_ids(session)) == 2


async def test_as_many_events_as_are_prunable_are_pruned(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    await emit(outbox, sessions, 1, 2, 3, "open")
    await execute(
        engine, "UPDATE outbox SET published_at = now() - interval '1 hour' WHERE payload <> '\"open\"'"
    )
    async with sessions.begin() as session:
        assert await outbox.prunable(session, older_than=DAY) == 0
        assert await outbox.prunable(session, older_than=NOW, at_most=2) == 2
        now: datetime = (await rows(engine, "SELECT now()"))[0][0]
        assert await outbox.prunable(session, older_than=now) == 3
        assert await outbox.prunable(session, older_than=NOW) == 3
        assert await outbox.prune(session, older_than=NOW) == 3


async def test_as_many_keys_as_are_prunable_are_pruned(
    keys: IdempotencyKeys, engine: AsyncEngine, sessions: Sessions
) -> None:
    await store(keys, sessions, "old")
    await store(keys, sessions, "expired", ttl=DAY)
    await execute(engine, "UPDATE idempotency_keys SET expires_at = now() WHERE key = 'expired'")
    await store(keys, sessions, "kept", ttl=DAY)
    async with sessions.begin() as session:
        assert await keys.prunable(session, older_than=DAY) == 1
        assert await keys.prunable(session, older_than=NOW, at_most=1) == 1
        assert await keys.prunable(session, older_than=NOW) == 2
        assert await keys.prune(session, older_than=NOW) == 2


async def test_as_many_messages_as_are_prunable_are_pruned(inbox: Inbox, sessions: Sessions) -> None:
    async with sessions.begin() as session:
        assert await inbox.stats(session) == InboxStats(0, None, None)
        for _ in range(3):
            await inbox.run(session, uuid7(), _nothing, consumer="billing")
    async with sessions.begin() as session:
        stats = await inbox.stats(session, at_most=2)
        assert (stats.handled, stats.oldest_at) == (2, stats.newest_at)
        assert await inbox.prunable(session, older_than=DAY) == 0
        assert await inbox.prunable(session, older_than=NOW, at_most=2) == 2
        assert await inbox.prunable(session, older_than=NOW) == 3
        assert await inbox.prune(session, older_than=NOW) == 3


async def test_as_many_webhooks_as_are_prunable_are_pruned(engine: AsyncEngine, sessions: Sessions) -> None:
    webhooks = await make_webhooks(engine)
    for key in ("old", "quarantined", "young"):
        await enqueue(webhooks, sessions, "https://hooks.example.com/", key=key)
    await end(engine, "old", "delivered", None)
    await end(engine, "young", "delivered", None)
    await end(engine, "quarantined", "quarantined", "SealBroken")
    await execute(engine, "UPDATE webhooks SET retry_until = now() - interval '8 days' WHERE key <> 'young'")
    async with sessions.begin() as session:
        assert await webhooks.prunable(session, older_than=9 * DAY) == 0
        assert await webhooks.prunable(session, older_than=NOW) == 1
        assert await webhooks.prunable(session) == 1
        assert await webhooks.prune(session) == 1


async def end(engine: AsyncEngine, key: str, state: str, error: str | None) -> None:
    """Let the webhook of this key have ended so."""
    await execute(
        engine,
        "UPDATE webhooks SET state = CAST(:state AS text), last_error = CAST(:error AS text), "
        "finished_at = CASE WHEN :state <> 'quarantined' THEN now() END WHERE key = :key",
        key=key,
        state=state,
        error=error,
    )


@pytest.fixture
async def ended(engine: AsyncEngine, sessions: Sessions) -> Webhooks:
    """Four webhooks, of which three ended badly, oldest first."""
    webhooks = await make_webhooks(engine)
    for key, type_ in (("expired", "a"), ("rejected", "b"), ("quarantined", "b"), ("pending", "b")):
        await enqueue(webhooks, sessions, "https://hooks.example.com/", key=key, type=type_)
    await end(engine, "expired", "expired", None)
    await end(engine, "rejected", "rejected", "HTTP 410")
    await end(engine, "quarantined", "quarantined", "SealBroken")
    return webhooks


async def test_dead_webhooks_are_chosen_by_all_that_is_given(
    ended: Webhooks, engine: AsyncEngine, sessions: Sessions
) -> None:
    [(now,)] = await rows(engine, "SELECT now()")
    async with sessions() as session:
        all_three = await ended.dead(session)
        expired, rejected, quarantined = all_three
        assert [record.key for record in all_three] == ["expired", "rejected", "quarantined"]
        assert await ended.dead(session, type="b") == [rejected, quarantined]
        assert await ended.dead(session, error="HTTP 410") == [rejected]
        assert await ended.dead(session, states=[State.EXPIRED, State.QUARANTINED]) == [expired, quarantined]
        assert await ended.dead(session, states=[State.PENDING]) == []
        assert await ended.dead(session, ids=[expired.id, quarantined.id], limit=1) == [expired]
        assert await ended.dead(session, since=now - DAY, until=now + DAY) == all_three
        assert await ended.dead(session, until=now - DAY) == []
        assert await ended.dead(session, origin="https://elsewhere.example.com") == []


async def test_keys_are_counted_and_shown_as_they_are_stored(
    keys: IdempotencyKeys, engine: AsyncEngine, sessions: Sessions
) -> None:
    async with sessions() as session:
        assert await keys.stats(session) == KeyStats(0, 0, None)
        assert await keys.record(session, scope="7", key="answered") is None
    await store(keys, sessions, "answered", ttl=DAY)
    await store(keys, sessions, "unanswered")
    await execute(
        engine,
        "UPDATE idempotency_keys SET response_code = NULL, response_body = NULL WHERE key = 'unanswered'",
    )
    await execute(engine, "UPDATE idempotency_keys SET expires_at = now() WHERE key = 'answered'")
    [(created_at, expires_at)] = await rows(
        engine, "SELECT created_at, expires_at FROM idempotency_keys WHERE key = 'answered'"
    )
    async with sessions() as session:
        assert await keys.stats(session) == KeyStats(2, 1, created_at)
        assert (await keys.stats(session, at_most=1)).stored == 1
        found = await keys.record(session, scope="7", key="answered")
        assert found is not None
        assert found.answer is not None
        assert (found.answer.status, found.answer.body) == (201, "made")
        assert found == KeyRecord("7", "answered", found.answer, created_at, expires_at, True)
        assert await keys.get(session, scope="7", key="answered") is None  # it has expired
        unanswered = await keys.record(session, scope="7", key="unanswered")
        assert unanswered is not None
        assert (unanswered.answer, unanswered.expired) == (None, False)
