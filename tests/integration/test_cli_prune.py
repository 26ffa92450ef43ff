"""`oncely prune`: what is finished and old goes, in bounded batches, after saying how much it is."""

from __future__ import annotations

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely.event import uuid7
from tests.command import Ran, Shop, oncely, place
from tests.database import Database
from tests.outboxes import emit, execute, locked, rows
from tests.webhooks import enqueue

pytestmark = pytest.mark.in_schema


@pytest.fixture
async def old(shop: Shop, engine: AsyncEngine) -> None:
    """In every room finished rows that are ten days old, and others that may not go."""
    await emit(shop.outbox, shop.sessions, 1, 2, 3, "not published")
    async with shop.sessions.begin() as session:
        for key in ("k-1", "k-2"):
            await shop.keys.run(session, scope="7", key=key, fingerprint=b"1" * 32, work=_made)
        await shop.inbox.run(session, uuid7(), _nothing, consumer="billing")
    await shop.effects.run("done", _done)
    with pytest.raises(RuntimeError):
        await shop.effects.run("unknown", _fails)
    for key in ("delivered", "quarantined"):
        await enqueue(shop.webhooks, shop.sessions, "https://hooks.example.com/", key=key)
    ago = "statement_timestamp() - interval '10 days'"
    for sql in (
        # Ids begin with their time, and prune goes by that first.
        (
            f"UPDATE outbox SET published_at = {ago}, id = overlay(id::text PLACING "
            "'00000000-0000' FROM 1 FOR 13)::uuid WHERE payload <> '\"not published\"'"
        ),
        f"UPDATE idempotency_keys SET created_at = {ago} WHERE key = 'k-1'",
        f"UPDATE inbox SET handled_at = {ago}",
        f"UPDATE effects SET created_at = {ago}, updated_at = {ago}",
        (
            f"UPDATE webhooks SET retry_until = {ago}, state = key, last_error = nullif(key, 'delivered'), "
            f"finished_at = CASE key WHEN 'delivered' THEN {ago} END"
        ),
    ):
        await execute(engine, sql)


async def _made() -> tuple[int, str]:
    return 201, "made"


async def _nothing() -> None: ...


async def _done(provider_token: str) -> object:
    return "done"


async def _fails(provider_token: str) -> object:
    raise RuntimeError("no answer")


async def left(engine: AsyncEngine) -> list[int]:
    """How many rows each table has: outbox, keys, inbox, webhooks, effects."""
    tables = ("outbox", "idempotency_keys", "inbox", "webhooks", "effects")
    counts = ", ".join(f"(SELECT count(*) FROM {table})" for table in tables)
    [row] = await rows(engine, f"SELECT {counts}")
    return list(row)


async def test_everything_that_is_finished_and_old_goes(shop: Shop, old: None, engine: AsyncEngine) -> None:
    ran = await oncely("prune", shop.target(), "--older-than", "7d", "--yes")
    assert ran == Ran(
        0,
        "outbox: 3 deleted, older than 7d\nidempotency_keys: 1 deleted, older than 7d\n"
        "inbox: 1 deleted, older than 7d\nwebhooks: 1 deleted, older than 7d\n"
        "effects: 1 deleted, older than 7d\n",
        "oncely: 7 rows will be deleted (outbox 3, idempotency_keys 1, inbox 1, webhooks 1, effects 1).\n",
    )
    assert await left(engine) == [1, 1, 0, 1, 1]


async def test_each_kind_has_an_age_of_its_own(shop: Shop, old: None, engine: AsyncEngine) -> None:
    ages = ["--older-than", "30d", "--older-than", "outbox=1w", "--older-than", "effects=90s"]
    ran = await oncely("prune", shop.target(), *ages, "--yes", "--json")
    done = {each["where"]: (each["older_than_seconds"], each["done"]) for each in ran.json["by"]}
    assert done == {
        "outbox": (604_800, 3),
        "idempotency_keys": (2_592_000, 0),
        "inbox": (2_592_000, 0),
        "webhooks": (2_592_000, 0),
        "effects": (90, 1),
    }
    assert (ran.json["asked"], ran.json["done"]) == (4, 4)
    assert await left(engine) == [1, 2, 1, 2, 1]


async def test_without_an_age_a_retention_says_it(shop: Shop, old: None, engine: AsyncEngine) -> None:
    ran = await oncely("prune", shop.target("worker"), "--yes")
    assert (ran.exit_code, ran.stdout) == (
        0,
        "outbox: 3 deleted, older than 7d\nidempotency_keys: 1 deleted, older than 1d\n",
    )
    assert await left(engine) == [1, 1, 1, 2, 2]


async def test_a_retention_says_also_how_long_effects_are_kept(shop: Shop, old: None) -> None:
    ran = await oncely("prune", shop.target("careful"), "--yes")
    assert (ran.exit_code, ran.stdout) == (0, "effects: 1 deleted, older than 7d\n")


async def test_it_works_in_batches_and_deletes_no_more_than_the_limit(
    shop: Shop, old: None, engine: AsyncEngine, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncely.cli.prune.BATCH", 1)
    name = f"{database.schema}.outbox" if database.schema else "outbox"
    words = [*place(database), "--table", "outbox", "--older-than", "7d"]
    ran = await oncely("prune", *words, "--limit", "2", "--yes")
    assert ran.stdout == f"{name}: 2 deleted, older than 7d\n"
    ran = await oncely("prune", *words, "--yes")
    assert ran.stdout == f"{name}: 1 deleted, older than 7d\n"
    assert (await left(engine))[0] == 1


async def test_what_was_deleted_may_be_less_than_what_was_said(
    shop: Shop, old: None, engine: AsyncEngine
) -> None:
    async with locked(engine, 2):
        ran = await oncely("prune", shop.target("relay"), "--older-than", "7d", "--yes", "--json")
    assert (ran.json["asked"], ran.json["done"]) == (3, 2)


async def test_a_large_count_says_that_there_may_be_more(
    shop: Shop, old: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncely.cli.prune._COUNTED", 2)
    ran = await oncely("prune", shop.target("relay"), "--older-than", "7d")
    assert ran == Ran(
        2,
        "",
        "oncely: 2 or more rows will be deleted (outbox 2 or more). "
        "There is no terminal to ask on: say --yes\n",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say how old: --older-than 7d, or --older-than outbox=7d"),
        (["--older-than", "soon"], "--older-than: 'soon' is no age; write 90s, 15m, 12h, 7d or 2w"),
        (["--older-than", "-7d"], "--older-than: '-7d' is no age"),
        (["--older-than", "orders=7d"], "--older-than: 'orders' is not one of outbox, keys, inbox, webhooks"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    shop: Shop, old: None, engine: AsyncEngine, options: list[str], message: str
) -> None:
    ran = await oncely("prune", shop.target("relay"), *options, "--yes")
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert ran.stderr.startswith(f"oncely: {message}")
    assert await left(engine) == [4, 2, 1, 2, 2]
