"""`oncely dead`: dead events, dead letters of streams and webhooks that ended badly, in one vocabulary."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely.errors import Reject
from oncely.event import Event
from oncely.outbox import DeadEvent
from oncely.streams import DeadLetters, StreamConsumer, stream_publisher
from oncely.webhooks import State
from tests.command import Ran, Shop, in_terminal, oncely, place
from tests.database import Database
from tests.outboxes import emit, execute, fail, locked
from tests.streams import entries, events
from tests.webhooks import enqueue

pytestmark = pytest.mark.in_schema


@dataclass(frozen=True)
class Dead:
    """The ids of what died in the shop: two events, one letter of its stream, three webhooks."""

    first: str
    second: str
    letter: str
    expired: str
    rejected: str
    quarantined: str

    @property
    def all(self) -> list[str]:
        return [self.first, self.second, self.letter, self.expired, self.rejected, self.quarantined]


@pytest.fixture
async def dead(shop: Shop, engine: AsyncEngine) -> Dead:
    [first] = await emit(shop.outbox, shop.sessions, "one", topic="order.paid", key="secret key")
    await fail(shop.outbox, shop.sessions, "one", error="ValueError: no\n\x1b[31mcolour", delay=None)
    [second] = await emit(shop.outbox, shop.sessions, "two", topic="order.sent")
    await fail(shop.outbox, shop.sessions, "two", error="KeyError: 2", delay=None)
    consumer = StreamConsumer(shop.redis, stream=shop.stream, group="billing")
    consumer.subscribe("*", _reject)
    await stream_publisher(shop.redis, shop.stream)(events("three", topic="order.paid", key="secret key"))
    await consumer.run_once()
    [letter] = await letters(shop).list()
    hooks = []
    for state, error in (("expired", None), ("rejected", "HTTP 410"), ("quarantined", "SealBroken")):
        key, type_ = f"secret {state}", "order.paid" if state == "expired" else "order.sent"
        url = "https://hooks.example.com/secret"
        hook = await enqueue(shop.webhooks, shop.sessions, url, key=key, type=type_)
        await execute(
            engine,
            "UPDATE webhooks SET state = :state, last_error = :error, "
            "finished_at = CASE WHEN :state = 'quarantined' THEN NULL ELSE now() END WHERE id = :id",
            state=state,
            error=error,
            id=hook,
        )
        hooks.append(str(hook))
    return Dead(str(first), str(second), letter.id, *hooks)


async def _reject(event: Event) -> None:
    raise Reject("never")


def letters(shop: Shop) -> DeadLetters:
    return DeadLetters(shop.redis, stream=shop.stream)


async def dead_events(shop: Shop) -> list[DeadEvent]:
    async with shop.sessions() as session:
        return await shop.outbox.dead(session)


async def hooks_in(shop: Shop, state: State) -> list[str]:
    async with shop.sessions() as session:
        return [str(record.id) for record in await shop.webhooks.list(session, state=state)]


def ids(ran: Ran) -> list[str]:
    return [each["id"] for each in ran.json["dead"]]


async def test_the_list_has_every_kind_without_keys_and_payloads(shop: Shop, dead: Dead) -> None:
    ran = await oncely("dead", "list", shop.target(), "--json")
    assert (ran.exit_code, ran.stderr, ran.json["more"]) == (0, "", False)
    found: list[dict[str, Any]] = ran.json["dead"]
    for each in found:
        assert datetime.now(UTC) - datetime.fromisoformat(each.pop("dead_at")) < timedelta(minutes=1)
    event = {"kind": "outbox", "where": "outbox", "state": "dead", "attempts": 1}
    hook = {"kind": "webhook", "where": "webhooks", "attempts": 0}
    colour = "ValueError: no\n\x1b[31mcolour"
    assert found == [
        event | {"id": dead.first, "topic": "order.paid", "error": colour},
        event | {"id": dead.second, "topic": "order.sent", "error": "KeyError: 2"},
        {
            "kind": "stream",
            "where": shop.stream,
            "id": dead.letter,
            "topic": "order.paid",
            "state": "dead",
            "attempts": 1,
            "error": "Reject: never",
        },
        hook | {"id": dead.expired, "topic": "order.paid", "state": "expired", "error": None},
        hook | {"id": dead.rejected, "topic": "order.sent", "state": "rejected", "error": "HTTP 410"},
        hook | {"id": dead.quarantined, "topic": "order.sent", "state": "quarantined", "error": "SealBroken"},
    ]
    assert "secret" not in ran.stdout


async def test_a_person_reads_whole_ids_and_nothing_that_a_terminal_would_obey(
    shop: Shop, dead: Dead
) -> None:
    ran = await oncely("dead", "list", shop.target(), "--table", "outbox")
    rows = [line.split() for line in ran.stdout.splitlines()]
    assert [row[:5] for row in rows[2:]] == [
        [dead.first, "outbox", "order.paid", "dead", "1"],
        [dead.second, "outbox", "order.sent", "dead", "1"],
    ]
    assert rows[2][-3:] == ["ValueError:", "no", r"\x1b[31mcolour"]


async def test_eighty_columns_show_row_by_row_what_does_not_fit(
    shop: Shop, dead: Dead, database: Database
) -> None:
    table = shop.outbox.table.name
    words = [*place(database), "--table", table, "--topic", "order.sent"]
    ran = await in_terminal("dead", "list", *words, columns=80)
    name = f"{database.schema}.{table}" if database.schema else table
    died = next(line for line in ran.stdout.splitlines() if "dead since" in line)
    assert ran == Ran(
        0,
        f"id: {dead.second}\n  where: {name}\n  topic: order.sent\n  state: dead\n  attempts: 1\n"
        f"{died}\n  error: KeyError: 2\n",
        "",
    )
    wide = await in_terminal("dead", "list", *words, columns=160)
    assert wide.stdout.splitlines()[2].split()[0] == dead.second


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--topic", "order.sent"], ["second", "rejected", "quarantined"]),
        (["--error", "ValueError"], ["first"]),
        (["--error", "HTTP 410"], ["rejected"]),
        (["--topic", "order.paid", "--error", "Reject"], ["letter"]),
        (["--after", "1h"], ["first", "second", "letter", "expired", "rejected", "quarantined"]),
        (["--before", "1h"], []),
        (["--after", "2999-01-01T00:00:00Z"], []),
        (["--before", "2999-01-01T00:00:00+01:00", "--error", "KeyError"], ["second"]),
        (["--group", "shipping", "--topic", "order.paid"], ["first", "expired"]),
        (["--table", "webhooks"], ["expired", "rejected", "quarantined"]),
    ],
)
async def test_the_list_is_chosen_by_all_that_is_given(
    shop: Shop, dead: Dead, options: list[str], expected: list[str]
) -> None:
    ran = await oncely("dead", "list", shop.target(), "--json", *options)
    assert ids(ran) == [getattr(dead, name) for name in expected]


async def test_a_list_that_is_cut_says_that_there_is_more(shop: Shop, dead: Dead) -> None:
    ran = await oncely("dead", "list", shop.target(), "--limit", "2", "--json")
    assert (ids(ran), ran.json["more"]) == ([dead.first, dead.second], True)
    ran = await oncely("dead", "list", shop.target(), "--limit", "2")
    assert ran.stderr == "oncely: there are more than 2; see --limit\n"


async def test_nothing_dead_is_said_in_words(shop: Shop) -> None:
    assert await oncely("dead", "list", shop.target()) == Ran(0, "no dead letters\n", "")
    assert await oncely("dead", "replay", shop.target(), "--all") == Ran(0, "no dead letters\n", "")


async def test_show_has_the_key_and_the_payload_when_asked(shop: Shop, dead: Dead) -> None:
    ran = await oncely("dead", "show", shop.target(), dead.first, dead.letter, "--json")
    event, letter = ran.json["dead"]
    assert (event["key"], letter["key"], letter["group"]) == ("secret key", "secret key", "billing")
    assert [("payload" in each) for each in (event, letter)] == [False, False]
    ran = await oncely("dead", "show", shop.target(), dead.first, dead.letter, "--payload", "--json")
    assert [each["payload"] for each in ran.json["dead"]] == ['"one"', '"three"']
    ran = await oncely("dead", "show", shop.target(), dead.rejected, "--payload", "--json")
    [hook] = ran.json["dead"]
    assert (hook["origin"], hook["key"]) == ("https://hooks.example.com", "secret rejected")
    assert "payload" not in hook


async def test_an_entry_that_is_no_event_is_shown_by_its_fields(shop: Shop) -> None:
    await shop.redis.xadd(shop.stream, {"what": "is this"})
    consumer = StreamConsumer(shop.redis, stream=shop.stream, group="billing")
    consumer.subscribe("*", _reject)
    await consumer.run_once()
    [letter] = await letters(shop).list()
    ran = await oncely("dead", "show", shop.target("consumer"), letter.id, "--payload", "--json")
    [shown] = ran.json["dead"]
    assert (shown["topic"], shown["event_id"], shown["fields"]) == (None, None, ["what", "is this"])


async def test_an_id_that_is_not_there_is_said_and_the_others_are_shown(
    shop: Shop, dead: Dead, database: Database
) -> None:
    absent = str(UUID(int=7))
    ran = await oncely("dead", "show", *place(database), dead.first, absent, "1-1")
    assert ran.exit_code == 1
    assert ran.stdout.splitlines()[2].split() == ["id", dead.first]
    assert ran.stderr == f"oncely: not among these dead letters: {absent}, 1-1\n"


async def test_replay_says_how_many_and_sends_them_again(shop: Shop, dead: Dead) -> None:
    ran = await oncely("dead", "replay", shop.target(), "--all", "--yes")
    assert ran.exit_code == 0
    assert ran.stderr == (
        f"oncely: 6 dead letters will be sent again (outbox 2, {shop.stream} 1, webhooks 3).\n"
    )
    assert ran.stdout == (
        f"outbox: 2 of 2 sent again\n{shop.stream}: 1 of 1 sent again\nwebhooks: 3 of 3 sent again\n"
    )
    assert await dead_events(shop) == []
    assert (await letters(shop).list(), len(await entries(shop.redis, shop.stream))) == ([], 2)
    assert sorted(await hooks_in(shop, State.PENDING)) == sorted(
        [dead.expired, dead.rejected, dead.quarantined]
    )


async def test_replay_takes_those_that_are_named_and_says_which_were_not_there(
    shop: Shop, dead: Dead
) -> None:
    absent = str(UUID(int=7))
    ran = await oncely("dead", "replay", shop.target(), dead.second, absent, "--yes", "--json")
    assert ran.exit_code == 1
    by = [{"kind": "outbox", "where": "outbox", "asked": 1, "done": 1}]
    assert ran.json == {"asked": 1, "done": 1, "by": by}
    assert ran.stderr.splitlines()[-1] == f"oncely: not among these dead letters: {absent}"
    assert [str(event.id) for event in await dead_events(shop)] == [dead.first]


async def test_discard_deletes_and_leaves_webhooks_that_are_given_up_already(shop: Shop, dead: Dead) -> None:
    ran = await oncely("dead", "discard", shop.target(), "--topic", "order.sent", "--yes")
    assert ran.stderr == "oncely: 2 dead letters will be given up, for good (outbox 1, webhooks 1).\n"
    assert (ran.exit_code, ran.stdout) == (0, "outbox: 1 of 1 given up\nwebhooks: 1 of 1 given up\n")
    assert [str(event.id) for event in await dead_events(shop)] == [dead.first]
    assert sorted(await hooks_in(shop, State.REJECTED)) == sorted([dead.rejected, dead.quarantined])
    assert len(await letters(shop).list()) == 1


async def test_what_is_done_may_be_less_than_what_was_said(
    shop: Shop, dead: Dead, engine: AsyncEngine
) -> None:
    async with locked(engine, "one"):
        ran = await oncely("dead", "replay", shop.target("relay"), "--all", "--yes", "--json")
    assert (ran.exit_code, ran.json["asked"], ran.json["done"]) == (0, 2, 1)


async def test_many_go_in_batches_and_no_more_than_the_limit(
    shop: Shop, dead: Dead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncely.cli.dead.BATCH", 2)
    await emit(shop.outbox, shop.sessions, *range(5))
    await fail(shop.outbox, shop.sessions, *range(5), delay=None)
    ran = await oncely("dead", "discard", shop.target("relay"), "--all", "--limit", "6", "--yes")
    assert "6 dead letters will be given up, for good (outbox 6; there may be more, see" in ran.stderr
    assert (ran.stdout, len(await dead_events(shop))) == ("outbox: 6 of 6 given up\n", 1)


async def test_without_a_terminal_and_yes_nothing_is_done(shop: Shop, dead: Dead) -> None:
    for command in ("replay", "discard"):
        ran = await oncely("dead", command, shop.target("relay"), "--all", answer="y\n")
        assert (ran.exit_code, ran.stdout) == (2, "")
        assert ran.stderr.startswith("oncely: 2 dead letters will be ")
        assert ran.stderr.endswith("(outbox 2). There is no terminal to ask on: say --yes\n")
    assert len(await dead_events(shop)) == 2


async def test_everything_has_to_be_asked_for(shop: Shop, dead: Dead) -> None:
    for command in ("replay", "discard"):
        ran = await oncely("dead", command, shop.target(), "--yes")
        assert ran == Ran(
            2, "", "oncely: say which: give ids, --topic, --error, --after, --before or --all\n"
        )
    assert len(await dead_events(shop)) == 2


async def test_on_a_terminal_it_asks_and_goes_by_the_answer(
    shop: Shop, dead: Dead, database: Database
) -> None:
    words = ["dead", "discard", *place(database), "--table", "outbox", "--all"]
    said, done = await asyncio.gather(
        in_terminal(*words, "--error", "nothing"), in_terminal(*words, answer="n\n")
    )
    assert said == Ran(0, "no dead letters\n", "")
    assert "2 dead letters will be given up, for good (" in done.stdout
    assert (done.exit_code, done.stdout.endswith("Go on? [y/N]: oncely: nothing was done\n")) == (1, True)
    assert len(await dead_events(shop)) == 2
    done = await in_terminal(*words, answer="y\n")
    assert (done.exit_code, done.stdout.endswith("outbox: 2 of 2 given up\n")) == (0, True)
    assert await dead_events(shop) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["replay", "shop"], "'shop' is no id of a dead letter\n"),
        (
            ["show", "1-0", "shop:worker"],
            "'shop:worker' is no id of a dead letter; a target comes before the ids",
        ),
        (["show"], "say which: give an id"),
        (["list", "--after", "soon"], "--after: 'soon' is no moment; write 2026-01-31T12:00:00Z, or 2h"),
        (["list", "--before", "2026-01-31"], "--before: '2026-01-31' has no time zone"),
        (["replay", "--topic", "\0", "--yes"], "topic: a NUL character"),
    ],
)
async def test_what_makes_no_sense_is_one_line(
    shop: Shop, database: Database, words: list[str], message: str
) -> None:
    ran = await oncely("dead", *words, *place(database))
    assert (ran.exit_code in (1, 2), ran.stdout, ran.stderr.count("\n")) == (True, "", 1)
    assert ran.stderr.startswith(f"oncely: {message}")


async def test_a_database_that_went_away_is_one_line(shop: Shop, dead: Dead) -> None:
    url = "postgresql://me:hush@127.0.0.1:1/shop"
    ran = await oncely("dead", "replay", shop.target("relay"), "--all", "--yes", "--database-url", url)
    assert (ran.exit_code, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert ran.stderr.startswith("oncely: the database cannot be reached: ")
    assert "hush" not in ran.stderr


async def test_what_was_done_before_an_error_is_said(
    shop: Shop, dead: Dead, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncely.cli.dead.BATCH", 1)
    refuse = (
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$"
    )
    await execute(engine, refuse)
    when = "FOR EACH ROW WHEN (old.topic = 'order.sent') EXECUTE FUNCTION refuse()"
    await execute(engine, f"CREATE TRIGGER refuse BEFORE UPDATE ON outbox {when}")
    ran = await oncely("dead", "replay", shop.target("relay"), "--all", "--yes", "--json")
    assert (ran.exit_code, ran.json["asked"], ran.json["done"]) == (1, 2, 1)
    assert ran.stderr.splitlines()[-1] == "oncely: the database says: not this one (P0001)"
    assert [str(event.id) for event in await dead_events(shop)] == [dead.second]


@pytest.mark.parametrize("options", [[], ["--json"]])
async def test_a_reader_that_has_seen_enough_is_no_error(
    shop: Shop, dead: Dead, database: Database, options: list[str]
) -> None:
    words = shlex.join(["dead", "list", *place(database), "--table", "outbox", *options])
    command = f"{shlex.quote(sys.executable)} -m oncely.cli {words} | true"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    shell = await asyncio.create_subprocess_shell(command, stderr=asyncio.subprocess.PIPE, env=buffered)
    _, stderr = await shell.communicate()
    assert stderr == b""
