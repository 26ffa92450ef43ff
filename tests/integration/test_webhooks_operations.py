"""What operators see of webhooks and do with them: stats, list, retry, release, discard, prune, reseal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from uuid import UUID

import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import Retention
from oncely.webhooks import Keyring, Resealed, State, WebhookRun, Webhooks
from tests.database import both_drivers
from tests.webhooks import (
    KEY,
    Answer,
    Endpoint,
    Sessions,
    enqueue,
    execute,
    pass_time,
    row_of,
    rows,
    sender,
    worker,
)

pytestmark = pytest.mark.in_schema

DAY = timedelta(days=1)
HOUR = timedelta(hours=1)
OLD, NEW = KEY, bytes(reversed(KEY))


async def put(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine, key: str, state: str, *, host: str = "a"
) -> UUID:
    """A webhook in this state."""
    webhook_id = await enqueue(webhooks, sessions, f"https://{host}.example.com/", key=key)
    errors = {"rejected": "HTTP 410", "quarantined": "SealBroken", "expired": "HTTP 500"}
    await execute(
        engine,
        "UPDATE webhooks SET state = :state, last_error = :error,"
        " finished_at = CASE WHEN :finished THEN statement_timestamp() END WHERE key = :key",
        state=state,
        error=errors.get(state),
        finished=state in ("delivered", "expired", "rejected"),
        key=key,
    )
    return webhook_id


@both_drivers
async def test_stats_count_what_waits_and_what_ended_badly(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    async with sessions() as session:
        empty = await webhooks.stats(session)
    assert (empty.pending, empty.oldest_seconds, empty.origins) == (0, 0.0, ())
    for key, state in enumerate(("delivered", "expired", "rejected", "rejected", "quarantined")):
        await put(webhooks, sessions, engine, str(key), state)
    for host, number in (("a", 3), ("b", 2), ("c", 1)):
        for key in range(number):
            await enqueue(webhooks, sessions, f"https://{host}.example.com/", key=f"{host}{key}")
    await execute(engine, "UPDATE webhooks SET last_error = 'HTTP 500' WHERE key IN ('a1', 'b1')")
    await execute(engine, "UPDATE webhooks SET created_at = created_at - interval '1 hour' WHERE key = 'b0'")
    await webhooks.leases.claim(
        sessions, limit=2, share=2, busy={}, duration=timedelta(seconds=30), after="https://b.example.com"
    )
    async with sessions() as session:
        stats = await webhooks.stats(session)
        first = await webhooks.stats(session, origins=1)
    assert (stats.pending, stats.in_flight, stats.failing) == (6, 2, 2)
    assert (stats.expired, stats.rejected, stats.quarantined) == (1, 2, 1)
    assert isinstance(stats.oldest_seconds, float)
    assert 3600 <= stats.oldest_seconds < 3660
    shown = [(each.origin, each.pending, each.failing, each.oldest_seconds > 3000) for each in stats.origins]
    assert shown == [
        ("https://a.example.com", 3, 1, False),
        ("https://b.example.com", 2, 1, True),
        ("https://c.example.com", 1, 0, False),
    ]
    async with sessions() as session:
        with pytest.raises(ValueError, match="origins must be 0 or more, not -1"):
            await webhooks.stats(session, origins=-1)
    assert [each.origin for each in first.origins] == ["https://a.example.com"]


@both_drivers
async def test_the_list_is_newest_first_and_chosen_by_all_that_is_given(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    made = {key: await put(webhooks, sessions, engine, key, "rejected", host=key) for key in "abc"}
    other = await enqueue(webhooks, sessions, "https://a.example.com/", caller="other", account="acme")
    async with sessions() as session:
        assert [record.id for record in await webhooks.list(session)] == [other, *reversed(made.values())]
        assert [record.key for record in await webhooks.list(session, state=State.REJECTED)] == [
            "c",
            "b",
            "a",
        ]
        by_origin = await webhooks.list(session, origin="https://a.example.com")
        assert [record.id for record in by_origin] == [other, made["a"]]
        both = await webhooks.list(session, origin="https://a.example.com", caller="shop", ids=made.values())
        assert [record.id for record in both] == [made["a"]]
        assert await webhooks.list(session, ids=[]) == []
        assert len(await webhooks.list(session, limit=2)) == 2
        [record] = await webhooks.list(session, ids=[other])
        with pytest.raises(ValueError, match="limit must be 0 or more, not -1"):
            await webhooks.list(session, limit=-1)
    assert (record.state, record.caller, record.account, record.type) == (
        State.PENDING,
        "other",
        "acme",
        "order.paid",
    )
    assert (record.attempts, record.last_error, record.finished_at, record.key_id) == (0, None, None, "one")
    assert record.retry_until - record.created_at == timedelta(days=3)


@both_drivers
async def test_retry_sends_again_what_expired_or_was_rejected_with_time_to_do_so(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    server.answer = Answer(410)
    webhook_id = await enqueue(webhooks, sessions, server.url())
    one = worker(webhooks, sessions, server)
    assert await one.run_once() == WebhookRun(rejected=1)
    await pass_time(engine, timedelta(days=5))
    server.answer = Answer(200)
    async with sessions.begin() as session:
        assert await webhooks.retry(session, horizon=2 * HOUR) == 1
    [left] = await row_of(engine, "retry_until - statement_timestamp()")
    assert timedelta(hours=1.9) < left <= 2 * HOUR
    assert await one.run_once() == WebhookRun(delivered=1)
    assert await row_of(engine, "id, state, attempts") == (webhook_id, "delivered", 1)
    assert [request.headers["webhook-id"] for request in server.requests] == [str(webhook_id)] * 2


async def test_each_of_retry_release_and_discard_touches_its_own_states(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    states = ("pending", "delivered", "expired", "rejected", "quarantined")

    async def after(do: str) -> dict[str, str]:
        await execute(engine, "DELETE FROM webhooks")
        for state in states:
            await put(webhooks, sessions, engine, state, state)
        async with sessions.begin() as session:
            done = await getattr(webhooks, do)(session)
        became = dict(await rows(engine, "key, state"))
        changed = {key: state for key, state in became.items() if key != state}
        assert done == len(changed)
        return changed

    assert await after("retry") == {"expired": "pending", "rejected": "pending"}
    assert await after("release") == {"quarantined": "pending"}
    assert await after("discard") == {"quarantined": "rejected"}


async def test_they_are_chosen_by_all_that_is_given_and_limited(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    made = {key: await put(webhooks, sessions, engine, key, "quarantined", host=key) for key in "abcdef"}
    await execute(engine, "UPDATE webhooks SET last_error = 'SealingKeyMissing' WHERE key IN ('a', 'b')")
    async with sessions.begin() as session:
        assert await webhooks.release(session, error="HTTP 500") == 0
        assert await webhooks.release(session, ids=[]) == 0
        assert await webhooks.release(session, error="SealingKeyMissing", origin="https://a.example.com") == 1
        assert await webhooks.discard(session, ids=[made["c"], made["d"]], limit=1) == 1
        assert await webhooks.discard(session, caller="nobody") == 0
        for horizon in (timedelta(0), timedelta(days=8)):
            with pytest.raises(ValueError, match="horizon"):
                await webhooks.release(session, horizon=horizon)
    found = dict(await rows(engine, "key, state"))
    assert found == {"a": "pending", "c": "rejected", **dict.fromkeys("bdef", "quarantined")}


@both_drivers
async def test_when_the_key_is_back_what_was_quarantined_can_be_released(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    new = Keyring({"new": NEW}, write="new")
    poor = Webhooks(MetaData(), keyring=new)
    rich = Webhooks(MetaData(), keyring=Keyring({"one": OLD, "new": NEW}, write="new"))
    await enqueue(webhooks, sessions, server.url("/old"), key="old")
    await enqueue(poor, sessions, server.url("/new"), key="new")
    assert await worker(poor, sessions, server).run_once() == WebhookRun(delivered=1, quarantined=1)
    assert [request.target for request in server.requests] == ["/new"]
    await pass_time(engine, timedelta(days=30))
    async with sessions.begin() as session:
        assert await rich.prune(session) == 1  # the delivered one: nobody has decided about the other
        assert await rich.release(session, error="SealingKeyMissing") == 1
    assert await worker(rich, sessions, server).run_once() == WebhookRun(delivered=1)
    assert [request.target for request in server.requests] == ["/new", "/old"]


@both_drivers
async def test_prune_deletes_what_is_finished_seven_days_after_its_last_retry(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    for state in ("delivered", "expired", "rejected", "quarantined"):
        await put(webhooks, sessions, engine, state, state)
    async with sessions.begin() as session:
        await pass_time(engine, timedelta(days=10) - HOUR)
        assert await webhooks.prune(session) == 0
    # A late duplicate is recognised until then.
    first = await enqueue(webhooks, sessions, "https://a.example.com/", key="delivered")
    assert (first,) in await rows(engine, "id")
    await pass_time(engine, 2 * HOUR)
    async with sessions.begin() as session:
        assert await webhooks.prune(session) == 3
    assert await rows(engine, "key") == [("quarantined",)]


async def test_prune_expires_what_is_overdue_and_keeps_what_waits(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    for key in ("overdue", "waits"):
        await enqueue(webhooks, sessions, "https://a.example.com/", key=key)
    overdue = "UPDATE webhooks SET retry_until = statement_timestamp() WHERE key = 'overdue'"
    await execute(engine, overdue)
    async with sessions.begin() as session:
        assert await webhooks.prune(session) == 0
    assert await rows(engine, "key, state") == [("overdue", "expired"), ("waits", "pending")]


async def test_prune_is_bounded_and_passes_over_locked_rows(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    for key in range(6):
        await put(webhooks, sessions, engine, str(key), "delivered")
    await pass_time(engine, timedelta(days=11))
    async with sessions() as locking:
        await locking.execute(text("SELECT 1 FROM webhooks WHERE key = '0' FOR UPDATE"))

        async def prune(limit: int | None) -> int:
            async with sessions.begin() as session:
                await session.execute(text("SET LOCAL lock_timeout = '300ms'"))
                return await webhooks.prune(session, limit=limit)

        assert await prune(2) == 2
        assert sum(await asyncio.gather(prune(None), prune(None))) == 3
    assert await rows(engine, "key") == [("0",)]


async def test_retention_keeps_house_for_webhooks_but_never_before_seven_days(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    await put(webhooks, sessions, engine, "k", "delivered")
    deleted = []
    for age, days in ((timedelta(0), 9), (timedelta(days=9), 2), (timedelta(0), 0)):
        await pass_time(engine, timedelta(days=days))
        deleted.append(await Retention(sessions, {webhooks: age}).run_once())
    assert deleted == [{"webhooks": 0}, {"webhooks": 0}, {"webhooks": 1}]


async def test_it_is_purged_too_as_early_as_it_may_be(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    for key in ("a", "b"):
        await put(webhooks, sessions, engine, key, "delivered")
    await pass_time(engine, timedelta(days=10) + HOUR)
    async with sessions.begin() as session:
        assert await webhooks.purge(session, limit=1) == 1
        assert await webhooks.purge(session) == 1


async def test_more_than_a_batch_is_expired_and_pruned(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    await enqueue(webhooks, sessions, server.url())
    columns = (
        "caller, account, type, origin, url_digest, signing_scope, key_id, nonce, sealed, due_at, retry_until"
    )
    await execute(
        engine,
        f"INSERT INTO webhooks (id, dedup_digest, key, {columns}) SELECT gen_random_uuid(), dedup_digest,"
        f" number::text, {columns} FROM webhooks, generate_series(1, 2499) AS number",
    )
    await pass_time(engine, timedelta(days=3))
    one = worker(webhooks, sessions, server)
    assert [(await one.run_once()).overdue for _ in range(4)] == [1000, 1000, 500, 0]
    await pass_time(engine, timedelta(days=8))
    async with sessions.begin() as session:
        assert await webhooks.prune(session) == 2500


@both_drivers
async def test_reseal_leaves_no_row_that_the_old_key_opens(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    for key in range(5):
        await enqueue(webhooks, sessions, server.url(f"/{key}"), key=str(key), headers={"X-Key": str(key)})
    await put(webhooks, sessions, engine, "done", "delivered")
    await execute(engine, "UPDATE webhooks SET caller = 'thief' WHERE key = '2'")
    both = Webhooks(MetaData(), keyring=Keyring({"one": OLD, "new": NEW}, write="new"))
    before = dict(await rows(engine, "key, sealed"))
    done: list[Resealed] = []
    after: UUID | None = None
    while not done or after is not None:
        async with sessions.begin() as session:
            done.append(await both.reseal(session, after=after, limit=4))
        after = done[-1].last_id
    assert [(each.resealed, each.unopened) for each in done] == [(3, 1), (2, 0)]
    async with sessions() as session:
        assert await both.sealed_with(session) == {"new": 5, "one": 1}
    now = dict(await rows(engine, "key, sealed"))
    assert [key for key in before if before[key] == now[key]] == ["2"]
    new_only = Webhooks(MetaData(), keyring=Keyring({"new": NEW}, write="new"))
    run = await worker(new_only, sessions, server).run_once()
    assert (run.delivered, run.quarantined) == (3, 1)
    shown = sorted((request.target, request.headers["x-key"]) for request in server.requests)
    assert set(shown) < {(f"/{key}", str(key)) for key in "0134"}
    async with sessions.begin() as session:
        with pytest.raises(ValueError, match="limit must be 1 or more"):
            await both.reseal(session, limit=0)


async def test_a_webhook_resealed_in_flight_is_delivered_all_the_same(
    webhooks: Webhooks, sessions: Sessions, server: Endpoint, engine: AsyncEngine
) -> None:
    both = Webhooks(MetaData(), keyring=Keyring({"one": OLD, "new": NEW}, write="new"))

    async def script(received: object, writer: object) -> Answer:
        async with sessions.begin() as session:
            assert await both.reseal(session) == Resealed(1, 0, None)
        return Answer(200)

    server.script = script
    await enqueue(webhooks, sessions, server.url())
    assert await worker(webhooks, sessions, server).run_once() == WebhookRun(delivered=1)
    assert await row_of(engine, "state, key_id") == ("delivered", "new")


async def test_the_table_refuses_what_cannot_be(
    webhooks: Webhooks, sessions: Sessions, engine: AsyncEngine
) -> None:
    await enqueue(webhooks, sessions, "https://a.example.com/")
    for change, constraint in (
        ("state = 'sent'", "webhooks_state_check"),
        ("state = 'delivered'", "webhooks_finished_check"),
        ("finished_at = now()", "webhooks_finished_check"),
        ("state = 'delivered', finished_at = now(), last_error = 'x'", "webhooks_error_check"),
        ("state = 'rejected', finished_at = now()", "webhooks_error_check"),
        ("state = 'quarantined'", "webhooks_error_check"),
        ("state = 'delivered', finished_at = now(), token = gen_random_uuid()", "webhooks_lease_check"),
        ("attempts = -1", "webhooks_attempts_check"),
        ("nonce = 'short'", "webhooks_lengths_check"),
        ("url_digest = 'short'", "webhooks_lengths_check"),
    ):
        with pytest.raises(IntegrityError) as refused:
            await execute(engine, f"UPDATE webhooks SET {change}")
        assert refused.value.orig is not None
        assert getattr(refused.value.orig.__cause__, "constraint_name", None) == constraint


PLANS = {
    "due": "SELECT min(origin) FROM webhooks WHERE state = 'pending' AND origin > 'https://a'",
    "origin": "SELECT id FROM webhooks WHERE state = 'pending' AND origin = 'https://a' AND due_at <= now()"
    " ORDER BY due_at LIMIT 4",
    "overdue": "SELECT id FROM webhooks WHERE state = 'pending' AND retry_until <= now()"
    " ORDER BY retry_until LIMIT 9",
    "prune": "SELECT id FROM webhooks WHERE state IN ('delivered', 'expired', 'rejected')"
    " AND retry_until < now() ORDER BY retry_until LIMIT 9",
}


async def test_what_the_worker_asks_for_is_found_by_an_index(
    webhooks: Webhooks, server: Endpoint, engines: Callable[..., AsyncEngine]
) -> None:
    """100,000 delivered ones, 20,000 that wait for one origin, 200 for others: a claim reads few rows."""
    # One connection does it all: others would report what they have read whenever they like.
    engine = engines(pool_size=1, max_overflow=0)
    sessions = async_sessionmaker(engine)
    await enqueue(webhooks, sessions, server.url())
    same = "caller, type, url_digest, key_id, nonce, sealed, retry_until, due_at"
    fill = (
        f"INSERT INTO webhooks (id, dedup_digest, key, {same}, state, finished_at, origin)"
        f" SELECT gen_random_uuid(), dedup_digest, '{{key}} ' || number, {same}, {{state}}, {{finished}},"
        " {origin} FROM webhooks, generate_series(1, {count}) AS number WHERE key = 'k'"
    )
    for key, state, finished, origin, count in (
        ("done", "'delivered'", "now()", "origin", 100_000),
        ("one", "'pending'", "NULL", "'https://m.example.com'", 20_000),
        ("many", "'pending'", "NULL", "'https://' || number || '.example.com'", 200),
    ):
        sql = fill.format(key=key, state=state, finished=finished, origin=origin, count=count)
        await execute(engine, sql)
    await execute(engine, "ANALYZE webhooks")
    async with engine.connect() as connection:
        for name, sql in PLANS.items():
            plan = (await connection.exec_driver_sql(f"EXPLAIN {sql}")).scalars().all()
            assert any("Index" in line for line in plan), (name, plan)
            assert not any("Seq Scan" in line for line in plan), (name, plan)

    async def read() -> int:
        async with engine.connect() as connection:
            await connection.execute(text("SELECT pg_stat_force_next_flush()"))
            await connection.commit()
            counts = "idx_tup_fetch + seq_tup_read FROM pg_stat_user_tables"
            sql = f"SELECT {counts} WHERE relid = 'webhooks'::regclass"
            return int((await connection.execute(text(sql))).scalar_one())

    before = await read()
    one = worker(webhooks, sessions, server, sender=sender(server))
    claimed = await one._claim(32, busy={"https://m.example.com": 4})
    assert len(claimed.leases) == 32
    assert await read() - before < 1_000
