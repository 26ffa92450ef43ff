"""A webhook exists if and only if the caller's transaction was committed, and once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import InvalidKey, NoTransaction, is_retryable
from oncely.errors import RowsHidden, SealBroken, SealingKeyMissing, WebhookReused
from oncely.webhooks import Keyring, Webhooks
from tests.database import Database, both_drivers
from tests.outboxes import sent_sql
from tests.schemas import schemas_of_their_own
from tests.waiting import backend_waits
from tests.webhooks import KEY, Sessions, endpoint, enqueue, execute, make_webhooks, row_of, rows, worker

pytestmark = pytest.mark.in_schema

URL = "https://hooks.example.com/in"
GIVEN: dict[str, Any] = {
    "url": URL,
    "body": b"{}",
    "key": "k",
    "caller": "shop",
    "type": "order.paid",
    "account": "acme",
    "signing_scope": "scope",
    "headers": (("Content-Type", "application/json"),),
}


@both_drivers
async def test_it_is_there_when_the_caller_commits_and_only_then(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    async with sessions() as session:
        await webhooks.enqueue(session, **GIVEN)
        await session.rollback()
        assert await rows(engine) == []
        webhook_id = await webhooks.enqueue(session, **GIVEN)
        assert await rows(engine) == []
        await session.commit()
    row = await row_of(
        engine, "id, state, attempts, last_error, origin, caller, account, type, key, signing_scope"
    )
    assert row[:5] == (webhook_id, "pending", 0, None, "https://hooks.example.com")
    assert row[5:] == ("shop", "acme", "order.paid", "k", "scope")


async def test_it_is_tried_for_the_horizon_from_enqueue_by_the_databases_clock(
    engine: AsyncEngine, sessions: Sessions
) -> None:
    webhooks = await make_webhooks(engine, horizon=timedelta(days=2))
    async with sessions.begin() as session:
        began: datetime = (await session.execute(text("SELECT now()"))).scalar_one()
        await session.execute(text("SELECT pg_sleep(0.05)"))
        await webhooks.enqueue(session, **GIVEN)
    created, due, until = await row_of(engine, "created_at, due_at, retry_until")
    assert created == due
    assert until - created == timedelta(days=2)
    assert timedelta(seconds=0.05) <= created - began < timedelta(seconds=20)


@both_drivers
async def test_the_same_again_is_the_same_webhook(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    first = await enqueue(webhooks, sessions, **GIVEN)
    assert await enqueue(webhooks, sessions, **GIVEN) == first
    async with sessions.begin() as session:  # in one transaction too, and spelled otherwise
        again = GIVEN | {"url": "HTTPS://Hooks.Example.com:443/in", "headers": dict(GIVEN["headers"])}
        assert [await webhooks.enqueue(session, **again) for _ in range(2)] == [first, first]
    assert len(await rows(engine)) == 1


async def test_another_caller_account_address_type_or_key_is_another_webhook(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    others: list[dict[str, Any]] = [
        {},
        {"key": "k2"},
        {"caller": "shop2"},
        {"account": "acme2"},
        {"account": None},
        {"type": "order.paid2"},
        {"url": URL + "/"},
        {"url": URL + "?x"},
        {"caller": "shopacme", "account": None},
    ]
    made = {await enqueue(webhooks, sessions, **(GIVEN | other)) for other in others}
    assert len(made) == len(others)
    assert {row[0] for row in await rows(engine, "id")} == made


@both_drivers
async def test_the_same_key_with_other_content_is_refused_and_names_the_first(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    first = await enqueue(webhooks, sessions, **GIVEN)
    others: list[dict[str, Any]] = [
        {"body": b"{ }"},
        {"body": b""},
        {"headers": ()},
        {"headers": (("content-type", "application/json"),)},
        {"signing_scope": "scope2"},
        {"signing_scope": None},
    ]
    for other in others:
        async with sessions.begin() as session:
            with pytest.raises(WebhookReused) as refused:
                await webhooks.enqueue(session, **(GIVEN | other))
            assert (refused.value.webhook_id, refused.value.key) == (first, "k")
            await session.execute(text("SELECT 1"))  # the transaction goes on
    assert len(await rows(engine)) == 1


async def test_a_finished_webhook_is_still_recognised(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    async with endpoint() as server:
        given = GIVEN | {"url": server.url(), "signing_scope": None}
        first = await enqueue(webhooks, sessions, **given)
        await worker(webhooks, sessions, server).run_once()
        assert await enqueue(webhooks, sessions, **given) == first
        with pytest.raises(WebhookReused):
            await enqueue(webhooks, sessions, **(given | {"body": b"other"}))
        await worker(webhooks, sessions, server).run_once()
        assert len(server.requests) == 1


async def test_when_the_first_one_does_not_open_nobody_can_tell_and_it_says_so(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    await enqueue(webhooks, sessions, **GIVEN)
    elsewhere = Webhooks(MetaData(), keyring=Keyring({"two": KEY}, write="two"))
    with pytest.raises(SealingKeyMissing):
        await enqueue(elsewhere, sessions, **GIVEN)
    await execute(engine, "UPDATE webhooks SET origin = 'https://evil.example'")
    with pytest.raises(SealBroken):
        await enqueue(webhooks, sessions, **GIVEN)


@both_drivers
@pytest.mark.parametrize("first_commits", [True, False])
async def test_beside_an_open_first_one_the_second_waits(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine, first_commits: bool
) -> None:
    async with sessions() as session:
        first = await webhooks.enqueue(session, **GIVEN)
        second = asyncio.ensure_future(enqueue(webhooks, sessions, **GIVEN))
        await backend_waits(engine, "transactionid")
        await (session.commit() if first_commits else session.rollback())
    assert (await second == first) is first_commits
    assert len(await rows(engine)) == 1


async def test_of_twenty_at_once_one_is_written(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    for key in range(5):
        made = await asyncio.gather(
            *(enqueue(webhooks, sessions, **(GIVEN | {"key": str(key)})) for _ in range(20))
        )
        assert len(set(made)) == 1
    assert len(await rows(engine)) == 5


@both_drivers
async def test_above_read_committed_a_lost_race_is_retryable(
    webhooks: Webhooks, engines: Callable[..., AsyncEngine], sessions: Sessions, engine: AsyncEngine
) -> None:
    repeatable = async_sessionmaker(engines(isolation_level="REPEATABLE READ"))
    async with repeatable() as session:
        await session.execute(text("SELECT 1 FROM webhooks"))
        first = await enqueue(webhooks, sessions, **GIVEN)
        with pytest.raises(DBAPIError) as lost:
            await webhooks.enqueue(session, **GIVEN)
        assert is_retryable(lost.value)
        await session.rollback()
        assert await webhooks.enqueue(session, **GIVEN) == first


@both_drivers
async def test_autocommit_is_refused_before_any_sql(
    webhooks: Webhooks, engines: Callable[..., AsyncEngine]
) -> None:
    engine = engines(isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        with sent_sql(engine) as sent, pytest.raises(NoTransaction):
            await webhooks.enqueue(connection, **GIVEN)
        assert sent == []


async def test_a_connection_will_do(webhooks: Webhooks, engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        webhook_id = await webhooks.enqueue(connection, **GIVEN)
    assert await row_of(engine, "id") == (webhook_id,)


async def test_a_first_enqueue_is_one_statement(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    async with sessions.begin() as session:
        await session.connection()
        with sent_sql(engine) as sent:
            await webhooks.enqueue(session, **GIVEN)
        assert len(sent) == 1


async def test_what_cannot_be_sent_is_refused_before_any_sql(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"url": "http://hooks.example.com/"}, ValueError),
        ({"url": "https://user:hunter2@hooks.example.com/"}, ValueError),
        ({"headers": {"X": "hunter2\r\nb"}}, ValueError),
        ({"headers": {"webhook-id": "x"}}, ValueError),
        ({"body": "text"}, TypeError),
        ({"body": b"x" * 1_048_577}, ValueError),
        ({"key": "a\0b"}, InvalidKey),
        ({"key": ""}, InvalidKey),
        ({"key": "é" * 501}, InvalidKey),
        ({"caller": "\ud800"}, InvalidKey),
        ({"caller": ""}, InvalidKey),
        ({"type": ""}, InvalidKey),
        ({"account": ""}, InvalidKey),
        ({"account": 7}, InvalidKey),
        ({"signing_scope": ""}, InvalidKey),
    ]
    async with sessions.begin() as session:
        await session.connection()
        for given, error in wrong:
            with sent_sql(engine) as sent, pytest.raises(error) as refused:
                await webhooks.enqueue(session, **(GIVEN | given))
            assert sent == []
            assert "hunter2" not in str(refused.value)
        await webhooks.enqueue(session, **GIVEN)
    assert len(await rows(engine)) == 1


def test_a_horizon_is_one_to_seven_days() -> None:
    keyring = Keyring({"one": KEY}, write="one")
    for horizon in (timedelta(0), timedelta(hours=23), timedelta(days=7, seconds=1)):
        with pytest.raises(ValueError, match="horizon must be 1 to 7 days"):
            Webhooks(MetaData(), keyring=keyring, horizon=horizon)
    with pytest.raises(ValueError, match="max_body_bytes must be 1 or more"):
        Webhooks(MetaData(), keyring=keyring, max_body_bytes=0)


@both_drivers
async def test_every_statement_keeps_to_the_callers_schema(database: Database, engine: AsyncEngine) -> None:
    """A tenant's schema by translation; there is no table of that name anywhere else."""
    metadata = MetaData(schema="tenant")
    webhooks = Webhooks(metadata, keyring=Keyring({"one": KEY}, write="one"), table_name="Web hooks")
    with schemas_of_their_own(database, "Tenant") as [schema]:
        there = engine.execution_options(schema_translate_map={"tenant": schema})
        sessions = async_sessionmaker(there)
        async with there.begin() as connection:
            await connection.run_sync(metadata.create_all)
        async with endpoint() as server:
            given = GIVEN | {"url": server.url(), "signing_scope": None}
            first = await enqueue(webhooks, sessions, **given)
            assert await enqueue(webhooks, sessions, **given) == first
            one = worker(webhooks, sessions, server)
            server.answer.status = 500
            assert (await one.run_once()).retried == 1
            server.answer.status = 404
            async with there.begin() as connection:
                await connection.execute(webhooks.table.update().values(due_at=text("now()")))
            assert (await one.run_once()).rejected == 1
            assert [request.headers["webhook-id"] for request in server.requests] == [str(first)] * 2
        async with sessions.begin() as session:
            assert (await webhooks.stats(session)).rejected == 1
            assert [record.id for record in await webhooks.list(session)] == [first]
            assert await webhooks.retry(session) == 1
            assert await webhooks.release(session) == await webhooks.discard(session) == 0
            assert await webhooks.sealed_with(session) == {"one": 1}
            assert (await webhooks.reseal(session)).resealed == 0
            assert await webhooks.prune(session) == 0


async def test_a_row_that_the_database_hides_is_said_and_not_waited_for(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    """A trigger here, row level security elsewhere: neither written nor seen."""
    await execute(
        engine, "CREATE FUNCTION hide() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
    )
    await execute(
        engine, "CREATE TRIGGER hide BEFORE INSERT ON webhooks FOR EACH ROW EXECUTE FUNCTION hide()"
    )
    async with asyncio.timeout(5):
        with pytest.raises(RowsHidden):
            await enqueue(webhooks, sessions, "https://a.example.com/")
