"""`oncely status`: one look at everything, on an application's objects or on a database alone."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely.event import uuid7
from oncely.streams import stream_publisher
from tests.command import Ran, Shop, oncely, place
from tests.database import Database
from tests.outboxes import emit, execute, fail
from tests.streams import deliver, events
from tests.webhooks import enqueue

pytestmark = pytest.mark.in_schema


async def fill(shop: Shop) -> None:
    """Something in every room, in more than one state."""
    await emit(shop.outbox, shop.sessions, "bad", "late", key="k")
    await fail(shop.outbox, shop.sessions, "bad", delay=None)
    await emit(shop.outbox, shop.sessions, "good", "better")
    await stream_publisher(shop.redis, shop.stream)(events("a", "b", "c"))
    await deliver(shop.redis, shop.stream, "worker", group="billing", count=1)
    async with shop.sessions.begin() as session:
        await shop.inbox.run(session, uuid7(), _nothing, consumer="billing")
        await shop.keys.run(session, scope="7", key="k-1", fingerprint=b"1" * 32, work=_made)
    with pytest.raises(RuntimeError):
        await shop.effects.run("charge:1", _fails)
    await shop.effects.run("charge:2", _succeeds)
    await enqueue(shop.webhooks, shop.sessions, "https://hooks.example.com/secret")


async def _nothing() -> None: ...


async def _made() -> tuple[int, str]:
    return 201, "secret"


async def _fails(provider_token: str) -> object:
    raise RuntimeError("no answer")


async def _succeeds(provider_token: str) -> object:
    return {"id": 1}


def facts(document: dict[str, Any], shop: Shop) -> dict[str, Any]:
    """The document without what changes from run to run."""
    text = json.dumps(document).replace(shop.stream, "STREAM").replace('"oncely_test.', '"')
    found: dict[str, Any] = json.loads(text)
    del found["at"]
    for room in ("outboxes", "streams", "inboxes", "keys", "webhooks"):
        for each in found[room]:
            for name in [name for name in each if name.endswith(("_at", "_seconds"))]:
                each[name] = "SOME TIME" if each[name] is not None else None
            for inner in (*each.get("groups", ()), *each.get("origins", ())):
                for name in [name for name in inner if name.endswith("_seconds")]:
                    inner[name] = "SOME TIME" if inner[name] is not None else None
    return found


EVERYTHING = {
    "at_most": 100_000,
    "outboxes": [
        {
            "name": "outbox",
            "ready": 3,
            "deferred": 0,
            "in_flight": 0,
            "retrying": 0,
            "dead": 1,
            "lag_seconds": "SOME TIME",
        }
    ],
    "streams": [
        {
            "name": "STREAM",
            "dead_letters": 0,
            "groups": [
                {"group": "billing", "unread": 2, "pending": 1, "oldest_pending_seconds": "SOME TIME"}
            ],
        }
    ],
    "inboxes": [{"name": "inbox", "handled": 1, "oldest_at": "SOME TIME", "newest_at": "SOME TIME"}],
    "keys": [{"name": "idempotency_keys", "stored": 1, "unanswered": 0, "oldest_at": "SOME TIME"}],
    "effects": [{"name": "effects", "pending": 0, "unknown": 1, "failed": 0, "done": 1}],
    "webhooks": [
        {
            "name": "webhooks",
            "pending": 1,
            "in_flight": 0,
            "failing": 0,
            "oldest_seconds": "SOME TIME",
            "expired": 0,
            "rejected": 0,
            "quarantined": 0,
            "origins": [
                {
                    "origin": "https://hooks.example.com",
                    "pending": 1,
                    "failing": 0,
                    "oldest_seconds": "SOME TIME",
                }
            ],
        }
    ],
    "errors": [],
}


async def test_everything_that_a_target_has_is_looked_at(shop: Shop) -> None:
    await fill(shop)
    ran = await oncely("status", shop.target(), "--json")
    assert (ran.exit_code, ran.stderr) == (0, "")
    assert facts(ran.json, shop) == EVERYTHING


async def test_the_same_is_found_in_a_database_by_the_columns_of_its_tables(
    shop: Shop, database: Database, redis_url: str
) -> None:
    await fill(shop)
    ran = await oncely("status", "--json", *place(database), *tables(shop))
    assert (ran.exit_code, ran.stderr) == (0, "")
    assert facts(ran.json, shop) == EVERYTHING | {"streams": []}
    ran = await oncely("status", "--json", "--redis-url", redis_url, "--stream", shop.stream)
    assert facts(ran.json, shop)["streams"] == EVERYTHING["streams"]


def tables(shop: Shop) -> list[str]:
    """Options that choose all of the shop's tables, by name."""
    rooms = (shop.outbox, shop.keys, shop.inbox, shop.effects, shop.webhooks)
    return [word for room in rooms for word in ("--table", room.table.name)]


@pytest.mark.parametrize("attribute", ["relay", "outbox", "outboxes", "make", "worker"])
async def test_a_target_is_a_worker_a_service_a_room_a_list_or_what_a_function_makes(
    shop: Shop, database: Database, attribute: str
) -> None:
    await emit(shop.outbox, shop.sessions, 1)
    ran = await oncely("status", shop.target(attribute), "--table", "outbox", "--json")
    if attribute == "outbox":
        assert (ran.exit_code, ran.stdout) == (2, "")
        assert ran.stderr == (
            "oncely: outbox has no sessionmaker of its own: give --database-url or "
            "ONCELY_DATABASE_URL, or name a list with a sessionmaker in it\n"
        )
        if database.schema is not None:
            return  # an outbox of no schema is in the database's own
        ran = await oncely(
            "status", shop.target(attribute), "--json", env={"ONCELY_DATABASE_URL": database.url}
        )
    assert (ran.exit_code, ran.json["outboxes"][0]["ready"]) == (0, 1)


async def test_a_list_with_an_engine_serves_the_rooms_that_have_none(shop: Shop) -> None:
    await emit(shop.outbox, shop.sessions, 1)
    ran = await oncely("status", shop.target("of_engine"), "--json")
    assert (ran.exit_code, ran.json["outboxes"][0]["ready"]) == (0, 1)


async def test_what_a_list_has_of_the_users_own_is_passed_over(shop: Shop) -> None:
    ran = await oncely("status", shop.target("mixed"), "--json")
    assert (ran.exit_code, [len(ran.json[kind]) for kind in ("outboxes", "inboxes")]) == (0, [1, 0])


async def test_a_list_without_anything_is_an_error(shop: Shop) -> None:
    ran = await oncely("status", shop.target("nothing"))
    assert ran == Ran(1, "", "oncely: there is nothing of oncely's here\n")


async def test_the_webhooks_of_a_worker_are_seen(shop: Shop) -> None:
    await enqueue(shop.webhooks, shop.sessions, "https://hooks.example.com/secret")
    ran = await oncely("status", shop.target("webhook_worker"), "--json")
    assert (ran.exit_code, ran.json["webhooks"][0]["pending"]) == (0, 1)


async def test_a_stream_of_two_consumers_is_seen_once(shop: Shop) -> None:
    ran = await oncely("status", shop.target("two_consumers"), "--json")
    assert (ran.exit_code, [stream["name"] for stream in ran.json["streams"]]) == (0, [shop.stream])


async def test_without_a_target_tables_and_streams_may_both_be_named(
    shop: Shop, database: Database, redis_url: str
) -> None:
    await emit(shop.outbox, shop.sessions, 1)
    words = ["--table", "outbox", "--stream", shop.stream, "--redis-url", redis_url]
    ran = await oncely("status", "--json", *place(database), *words)
    assert ran.exit_code == 0
    assert [len(ran.json[kind]) for kind in ("outboxes", "streams", "inboxes", "keys")] == [1, 1, 0, 0]


async def test_without_redis_a_stream_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    ran = await oncely("status", "--stream", "shop", "--redis-url", "redis://host")
    assert ran == Ran(1, "", "oncely: streams need redis: pip install 'oncely[redis]'\n")


async def test_without_the_extra_for_webhooks_the_other_tables_are_found(
    shop: Shop, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "oncely.webhooks", None)
    ran = await oncely("status", "--json", *place(database))
    assert ran.exit_code == 0
    assert [len(ran.json[kind]) for kind in ("outboxes", "inboxes", "keys", "webhooks")] == [1, 1, 1, 0]


async def test_a_table_that_somebody_has_locked_does_not_hide_the_others(
    shop: Shop, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncely.cli.status._PATIENCE", 0.5)
    async with engine.begin() as connection:
        await connection.execute(text("LOCK TABLE inbox"))
        ran = await oncely("status", shop.target(), "--json")
    assert ran.exit_code == 1
    assert ran.json["errors"] == [{"name": "inbox", "error": "no answer within 0.5 s"}]
    assert [len(ran.json[kind]) for kind in ("outboxes", "inboxes", "keys")] == [1, 0, 1]


async def test_a_list_with_a_sessionmaker_serves_the_rooms_that_have_none(shop: Shop) -> None:
    await fill(shop)
    ran = await oncely("status", shop.target("rooms"), "--json")
    assert facts(ran.json, shop) == EVERYTHING | {"streams": []}


async def test_a_person_reads_tables_without_a_payload_a_key_or_a_secret(shop: Shop) -> None:
    await fill(shop)
    ran = await oncely("status", shop.target())
    assert ran.exit_code == 0
    lines = [" ".join(line.split()) for line in ran.stdout.replace(shop.stream, "STREAM").splitlines()]
    assert "outbox ready deferred in flight retrying dead lag" in lines
    assert [line for line in lines if line.startswith("outbox 3 0 0 0 1 ")] != []
    assert "stream group unread pending oldest pending dead letters" in lines
    assert [line for line in lines if line.startswith("STREAM billing 2 1 ")] != []
    assert "effects 0 1 0 1" in lines
    assert [word for word in ("secret", "k-1", "charge:", "order.paid") if word in ran.stdout] == []
    ran = await oncely("status", shop.target("rooms"))
    assert max(map(len, ran.stdout.splitlines())) <= 80


async def test_the_dead_letters_of_a_stream_are_said_once_however_many_groups_it_has(
    shop: Shop, redis: Redis
) -> None:
    await fill(shop)
    await redis.xgroup_create(shop.stream, "second", id="$")
    ran = await oncely("status", shop.target("consumer"))
    lines = [line.split() for line in ran.stdout.splitlines() if line.startswith(shop.stream)]
    assert [(line[1], line[-1]) for line in lines] == [("billing", "0"), ("second", "-")]


async def test_a_group_is_chosen_and_one_that_is_not_there_is_an_error(shop: Shop) -> None:
    await fill(shop)
    ran = await oncely("status", shop.target("consumer"), "--group", "billing", "--json")
    assert facts(ran.json, shop)["streams"] == EVERYTHING["streams"]
    ran = await oncely("status", shop.target("consumer"), "--group", "nobody")
    assert ran.exit_code == 1
    assert ran.stderr == f"oncely: {shop.stream}: stream {shop.stream!r} has no group 'nobody'\n"


async def test_counts_stop_at_a_hundred_thousand_and_say_so(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncely.cli.status._AT_MOST", 2)
    await emit(shop.outbox, shop.sessions, 1, 2, 3)
    ran = await oncely("status", shop.target("relay"))
    assert "2+" in ran.stdout.splitlines()[2].split()
    ran = await oncely("status", shop.target("relay"), "--json")
    assert (ran.json["at_most"], ran.json["outboxes"][0]["ready"]) == (2, 2)


async def test_tables_that_are_not_there_are_an_error_and_do_not_hide_the_others(
    shop: Shop, engine: AsyncEngine
) -> None:
    await execute(engine, "DROP TABLE inbox")
    ran = await oncely("status", shop.target(), "--json")
    assert ran.exit_code == 1
    assert ran.json["errors"] == [
        {
            "name": "inbox",
            "error": "table 'inbox', or one that belongs to it, does not exist in this database; "
            "run your migrations (alembic upgrade head)",
        }
    ]
    assert [len(ran.json[kind]) for kind in ("outboxes", "inboxes", "keys", "effects")] == [1, 0, 1, 1]
    ran = await oncely("status", shop.target())
    assert ran.exit_code == 1
    assert ran.stderr.startswith("oncely: inbox: table 'inbox', or one")


async def test_a_redis_that_is_away_is_an_error_and_does_not_hide_the_database(shop: Shop) -> None:
    ran = await oncely("status", shop.target(), "--redis-url", "redis://:hush@127.0.0.1:1/0", "--json")
    assert (ran.exit_code, len(ran.json["outboxes"])) == (1, 1)
    [error] = ran.json["errors"]
    assert error["name"] == shop.stream
    assert error["error"].startswith("Redis cannot be reached: ")
    assert "hush" not in ran.stdout + ran.stderr


async def test_an_error_says_nothing_that_a_terminal_would_obey(stream: str, redis_url: str) -> None:
    ran = await oncely("status", "--redis-url", redis_url, "--stream", f"{stream}\x1b[31m", "--group", "g")
    assert (ran.exit_code, "\x1b" in ran.stderr) == (1, False)
    assert ran.stderr.startswith(f"oncely: {stream}\\x1b[31m: ")


@pytest.mark.parametrize(
    "driver_in_url", ["postgresql", "postgres", "postgresql+asyncpg", "postgresql+psycopg"]
)
async def test_a_database_that_is_away_is_one_line_without_the_password(driver_in_url: str) -> None:
    ran = await oncely(
        "status", "--database-url", f"{driver_in_url}://me:hush@127.0.0.1:1/shop?application_name=hush"
    )
    assert (ran.exit_code, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert ran.stderr.startswith("oncely: the database cannot be reached: ")
    assert "hush" not in ran.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a target (package.module:attribute), or --database-url or ONCELY_DATABASE_URL"),
        (["shop"], "'shop' is no import string; it has the form \"package.module:attribute\""),
        (["json:absent.loads"], "'json:absent.loads': json has no attribute 'absent'"),
        (["--database-url", "hush"], "the database's URL cannot be read; it has the form "),
        (
            ["--database-url", "mysql://me:hush@host/shop"],
            "'mysql' is no driver that oncely works with; write ",
        ),
        (["--database-url", "postgresql+psycopg2://me:hush@host/shop"], "'postgresql+psycopg2' is no driver"),
        (["--stream", "shop"], "a stream needs --redis-url or ONCELY_REDIS_URL, or a target"),
        (["--stream", "shop", "--redis-url", "hush"], "Redis's URL cannot be read; it has the form redis://"),
        (["json:loads", "--schema", "shop"], "--schema goes without a target, which says its schema itself"),
        (["json:__doc__"], "'json:__doc__' is of type str; name a Worker, one of oncely's objects"),
    ],
)
async def test_what_is_wrong_use_is_one_line_and_exit_code_2(words: list[str], message: str) -> None:
    ran = await oncely("status", *words)
    assert (ran.exit_code, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert ran.stderr.startswith(f"oncely: {message}")
    assert "hush" not in ran.stderr


async def test_names_that_are_not_there_are_said(shop: Shop, database: Database) -> None:
    for words, message in (
        ([shop.target(), "--table", "orders"], "there is no table 'orders' of oncely's here"),
        ([shop.target(), "--stream", "orders"], "there is no stream 'orders' here"),
        ([*place(database)[:2], "--schema", "pg_catalog"], "schema 'pg_catalog' of database '"),
    ):
        ran = await oncely("status", *words)
        assert (ran.exit_code, ran.stdout) == (1, "")
        assert ran.stderr.startswith(f"oncely: {message}")


async def test_the_inbox_of_a_consumers_handler_is_seen(shop: Shop) -> None:
    shown = facts((await oncely("status", shop.target("booking"), "--json")).json, shop)
    assert [inbox["name"] for inbox in shown["inboxes"]] == ["inbox"]


async def test_the_traceback_is_for_those_who_ask(shop: Shop) -> None:
    absent = [shop.target("broken")]
    assert "Traceback" not in (await oncely("status", *absent)).stderr
    for asked in (
        await oncely("status", *absent, "--verbose"),
        await oncely("status", *absent, env={"ONCELY_DEBUG": "1"}),
    ):
        assert "Traceback" in asked.stderr
        assert asked.stderr.endswith(
            f"oncely: {shop.target('broken')} cannot be called: LookupError: no configuration "
            f"({asked.stderr.rpartition('(')[2]}"
        )
        assert asked.exit_code == 1


async def test_a_watch_looks_again_and_ends_by_ctrl_c(shop: Shop, tmp_path: Path) -> None:
    await emit(shop.outbox, shop.sessions, 1)
    words = ["status", shop.target("relay"), "--app-dir", str(tmp_path), "--json"]
    watch = subprocess.Popen(  # noqa: ASYNC220  it is waited for in threads
        [sys.executable, "-m", "oncely.cli", *words, "--watch", "--interval", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watch.stdout is not None
    first = json.loads(await asyncio.to_thread(watch.stdout.readline))
    await emit(shop.outbox, shop.sessions, 2)
    counts = [first["outboxes"][0]["ready"]]
    while counts[-1] != 2:
        line = await asyncio.to_thread(watch.stdout.readline)
        counts.append(json.loads(line)["outboxes"][0]["ready"])
    watch.send_signal(signal.SIGINT)
    _, stderr = await asyncio.to_thread(watch.communicate, timeout=20)
    assert (watch.returncode, stderr, counts[0]) == (0, "", 1)


@pytest.mark.parametrize("on_terminal", [False, True])
async def test_a_watch_clears_the_screen_of_a_terminal_and_of_nothing_else(
    shop: Shop, tmp_path: Path, on_terminal: bool
) -> None:
    words = ["status", shop.target("relay"), "--app-dir", str(tmp_path), "--watch", "--interval", "0.1"]
    ours, theirs = pty.openpty() if on_terminal else os.pipe()
    watch = subprocess.Popen(  # noqa: ASYNC220  it is waited for in threads
        [sys.executable, "-m", "oncely.cli", *words],
        stdout=theirs,
        env=os.environ | {"TERM": "xterm"},
    )
    said = b""
    while said.count(b"in flight") < 2:
        said += await asyncio.to_thread(os.read, ours, 65_536)
    watch.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(watch.wait, 20) == 0
    assert (b"\033[H\033[2J" in said) is on_terminal
    os.close(ours)
    os.close(theirs)
