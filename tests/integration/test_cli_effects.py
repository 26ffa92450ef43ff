"""`oncely effects` and `oncely keys`: what is known of a call or a key, and what a person decides."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely.effects import Effects, Status
from oncely.errors import EffectFailed, EffectUnknown
from tests.command import Ran, Shop, in_terminal, oncely, place
from tests.database import Database
from tests.outboxes import execute

pytestmark = pytest.mark.in_schema

KEY = "charge:o-1"  # with a colon, as an import string has one


@pytest.fixture
async def unknown(shop: Shop) -> str:
    """The provider token of a call that is in doubt, beside one that is done."""
    await shop.effects.run("charge:o-2", _charge)
    with pytest.raises(RuntimeError):
        await shop.effects.run(KEY, _fails)
    record = await shop.effects.get(KEY)
    assert record is not None
    return record.provider_token


async def _fails(provider_token: str) -> object:
    raise RuntimeError("no answer")


async def _charge(provider_token: str) -> object:
    return {"secret": provider_token}


async def test_the_list_has_what_is_open_or_what_is_asked_for(shop: Shop, unknown: str) -> None:
    ran = await oncely("effects", "list", shop.target(), "--json")
    [one] = ran.json["effects"]
    assert {name: one[name] for name in ("where", "key", "status", "attempts", "error", "expires_at")} == {
        "where": "effects",
        "key": KEY,
        "status": "unknown",
        "attempts": 1,
        "error": "RuntimeError: no answer",
        "expires_at": None,
    }
    assert (ran.exit_code, ran.json["more"]) == (0, False)
    ran = await oncely("effects", "list", shop.target(), "--status", "done", "--status", "unknown")
    assert [line.split()[:3] for line in ran.stdout.splitlines()[2:]] == [
        [KEY, "effects", "unknown"],
        ["charge:o-2", "effects", "done"],
    ]
    assert "secret" not in ran.stdout
    assert await oncely("effects", "list", shop.target(), "--status", "failed") == Ran(
        0, "no effect is failed\n", ""
    )


async def test_a_list_that_was_cut_short_says_so(shop: Shop, unknown: str) -> None:
    words = ["--status", "done", "--status", "unknown", "--limit", "1"]
    ran = await oncely("effects", "list", shop.target(), *words)
    assert (len(ran.stdout.splitlines()), ran.stderr) == (3, "oncely: there are more than 1; see --limit\n")
    assert (await oncely("effects", "list", shop.target(), *words, "--json")).json["more"] is True


async def test_show_has_the_token_to_ask_the_provider_by_and_the_result_when_asked(
    shop: Shop, unknown: str, database: Database
) -> None:
    ran = await oncely("effects", "show", *place(database), KEY, "--json")
    assert (ran.json["status"], ran.json["provider_token"]) == ("unknown", unknown)
    ran = await oncely("effects", "show", shop.target(), "charge:o-2")
    assert "secret" not in ran.stdout
    ran = await oncely("effects", "show", shop.target(), "charge:o-2", "--result", "--json")
    assert ran.json["result"] == {"secret": ran.json["provider_token"]}


async def test_done_gives_later_runs_the_result(shop: Shop, unknown: str) -> None:
    words = ["effects", "resolve", shop.target(), KEY, "--done", "--result", '{"id": 7}', "--yes"]
    assert await oncely(*words) == Ran(
        0, f"{KEY}: done\n", f"oncely: effect {KEY!r}, now unknown, will be recorded as done.\n"
    )
    assert await shop.effects.run(KEY, _fails) == {"id": 7}


async def test_failed_gives_later_runs_the_error(shop: Shop, unknown: str) -> None:
    words = ["effects", "resolve", shop.target(), KEY, "--failed", "--error", "the card was stolen", "--yes"]
    assert (await oncely(*words)).stdout == f"{KEY}: failed\n"
    with pytest.raises(EffectFailed, match="the card was stolen"):
        await shop.effects.run(KEY, _charge)


async def test_forget_lets_the_next_run_make_the_call_under_a_new_token(shop: Shop, unknown: str) -> None:
    words = ["effects", "resolve", shop.target(), KEY, "--forget", "--yes"]
    assert (await oncely(*words)).stdout == f"{KEY}: forgotten\n"
    assert await shop.effects.run(KEY, _charge) != {"secret": unknown}


async def test_a_finished_one_is_not_resolved_again_but_forgotten(shop: Shop, unknown: str) -> None:
    ran = await oncely("effects", "resolve", shop.target(), "charge:o-2", "--failed", "--yes")
    assert ran == Ran(1, "", "oncely: effect 'charge:o-2' is done already\n")
    ran = await oncely("effects", "resolve", shop.target(), "charge:o-2", "--forget", "--yes")
    assert (ran.exit_code, await shop.effects.get("charge:o-2")) == (0, None)


async def test_one_that_is_being_made_is_left_to_its_owner(shop: Shop) -> None:
    assert await shop.effects.claim(KEY, b"1" * 32) is not None
    for decision in ("--done", "--failed", "--forget"):
        ran = await oncely("effects", "resolve", shop.target(), KEY, decision, "--yes")
        assert (ran.exit_code, ran.stdout) == (1, "")
        assert ran.stderr.startswith(f"oncely: effect {KEY!r} is being made by its owner, until 20")
    record = await shop.effects.get(KEY)
    assert record is not None
    assert record.status is Status.PENDING


def meanwhile(monkeypatch: pytest.MonkeyPatch, database: Database, command: str, sql: str) -> None:
    """While the command asks its question, somebody else does this."""

    def confirm(question: str, *, yes: bool) -> None:
        with psycopg.connect(database.dsn()) as connection:
            connection.execute(sql.encode())

    monkeypatch.setattr(f"oncely.cli.{command}.confirm", confirm)


@pytest.mark.parametrize("decision", ["--done", "--failed", "--forget"])
async def test_what_somebody_else_has_resolved_meanwhile_is_left_as_it_is(
    shop: Shop, unknown: str, database: Database, monkeypatch: pytest.MonkeyPatch, decision: str
) -> None:
    by_another = f"status = 'failed', error = 'a colleague', token = 'another' WHERE key = '{KEY}'"
    meanwhile(monkeypatch, database, "effects", f"UPDATE effects SET {by_another}")
    ran = await oncely("effects", "resolve", shop.target(), KEY, decision)
    assert ran == Ran(1, "", f"oncely: effect {KEY!r} has changed in between; nothing was done\n")
    record = await shop.effects.get(KEY)
    assert record is not None
    assert (record.status, record.error) == (Status.FAILED, "a colleague")


async def test_an_effect_of_two_tables_is_chosen_by_table(
    shop: Shop, unknown: str, database: Database, engine: AsyncEngine
) -> None:
    await execute(engine, "CREATE TABLE older AS TABLE effects")
    ran = await oncely("effects", "show", *place(database), KEY)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert ran.stderr.replace("oncely_test.", "") == (
        f"oncely: there is an effect {KEY!r} in each of effects, older; choose by --table\n"
    )
    ran = await oncely("effects", "show", *place(database), KEY, "--table", "older", "--json")
    assert (ran.exit_code, ran.json["where"].replace("oncely_test.", "")) == (0, "older")


async def test_nothing_is_decided_without_a_yes(shop: Shop, unknown: str, database: Database) -> None:
    ran = await oncely("effects", "resolve", shop.target(), KEY, "--done")
    assert (ran.exit_code, ran.stderr.endswith("There is no terminal to ask on: say --yes\n")) == (2, True)
    ran = await in_terminal("effects", "resolve", *place(database), KEY, "--done", answer="n\n")
    assert (ran.exit_code, ran.stdout.endswith("oncely: nothing was done\n")) == (1, True)
    with pytest.raises(EffectUnknown):
        await shop.effects.run(KEY, _charge)


@pytest.mark.parametrize(
    ("words", "exit_code", "message"),
    [
        (["resolve", KEY], 2, "say one of --done, --failed and --forget"),
        (["resolve", KEY, "--done", "--forget"], 2, "say one of --done, --failed and --forget"),
        (["resolve", KEY, "--failed", "--result", "1"], 2, "--result goes with --done"),
        (["resolve", KEY, "--done", "--result", "{"], 2, "--result is no JSON: "),
        (["show", "absent"], 1, "there is no effect 'absent'"),
        (["show", "a", "b", "c"], 2, "give a target, if any, and one key, not 3 words"),
    ],
)
async def test_what_makes_no_sense_is_one_line(
    shop: Shop, unknown: str, database: Database, words: list[str], exit_code: int, message: str
) -> None:
    ran = await oncely("effects", *words, *place(database))
    assert (ran.exit_code, ran.stdout, ran.stderr.count("\n")) == (exit_code, "", 1)
    assert ran.stderr.startswith(f"oncely: {message}")


async def test_effects_in_sqlite_are_found_too(tmp_path: Path) -> None:
    file = Database.in_file(tmp_path / "effects.db")
    engine, metadata = file.engine(), MetaData()
    effects = Effects(metadata, stale_after=timedelta(seconds=30), sessionmaker=engine)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await effects.run("one", _charge)
    await engine.dispose()
    url = file.url.replace("+aiosqlite", "")
    ran = await oncely("effects", "show", "one", "--database-url", url, "--json")
    assert (ran.exit_code, ran.json["status"]) == (0, "done")
    ran = await oncely("status", "--database-url", url, "--json")
    assert ran.json["effects"] == [{"name": "effects", "pending": 0, "unknown": 0, "failed": 0, "done": 1}]


async def _made() -> tuple[int, str]:
    return 201, "secret"


async def store_key(shop: Shop, key: str = "k:1", ttl: timedelta | None = None) -> None:
    async with shop.sessions.begin() as session:
        await shop.keys.run(session, scope="7", key=key, fingerprint=b"1" * 32, work=_made, ttl=ttl)


async def test_a_key_is_shown_without_its_answer_unless_that_is_asked_for(
    shop: Shop, database: Database
) -> None:
    await store_key(shop)
    ran = await oncely("keys", "show", shop.target("rooms"), "k:1", "--scope", "7", "--json")
    assert ran.exit_code == 0
    assert {name: value for name, value in ran.json.items() if name != "created_at"} == {
        "where": "idempotency_keys",
        "scope": "7",
        "key": "k:1",
        "state": "answered",
        "status": 201,
        "expires_at": None,
    }
    ran = await oncely("keys", "show", *place(database), "k:1", "--scope", "7", "--answer", "--json")
    assert (ran.json["headers"], ran.json["body"]) == ([], "secret")


@pytest.mark.parametrize(("body", "read"), [(b'{"paid": 7}', '{"paid": 7}'), (b"\xff\x00", "ff00")])
async def test_a_person_reads_a_stored_body_of_bytes_as_the_text_that_it_is(
    shop: Shop, body: bytes, read: str
) -> None:
    async def work() -> tuple[int, bytes]:
        return 201, body

    async with shop.sessions.begin() as session:
        await shop.keys.run(session, scope="7", key="k:1", fingerprint=b"1" * 32, work=work)
    words = ["keys", "show", shop.target("rooms"), "k:1", "--scope", "7", "--answer"]
    ran = await oncely(*words)
    assert dict(line.split(maxsplit=1) for line in ran.stdout.splitlines() if line)["body"] == read
    assert (await oncely(*words, "--json")).json["body"] == body.hex()


async def test_a_person_reads_a_fact_on_each_line(shop: Shop) -> None:
    await store_key(shop)
    ran = await oncely("keys", "show", shop.target("rooms"), "k:1", "--scope", "7")
    facts = dict(line.split(maxsplit=1) for line in ran.stdout.splitlines() if line)
    assert {name: facts[name] for name in ("scope", "key", "state", "status")} == {
        "scope": "7",
        "key": "k:1",
        "state": "answered",
        "status": "201",
    }
    assert "secret" not in ran.stdout


async def test_a_key_that_somebody_else_has_forgotten_meanwhile_is_said(
    shop: Shop, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store_key(shop)
    meanwhile(monkeypatch, database, "keys", "DELETE FROM idempotency_keys")
    ran = await oncely("keys", "forget", shop.target("rooms"), "k:1", "--scope", "7")
    assert ran == Ran(1, "", "oncely: key 'k:1' was not there any more; nothing was done\n")


async def test_a_key_of_two_tables_is_chosen_by_table(
    shop: Shop, database: Database, engine: AsyncEngine
) -> None:
    await store_key(shop)
    await execute(engine, "CREATE TABLE older AS TABLE idempotency_keys")
    words = ["keys", "show", *place(database), "k:1", "--scope", "7"]
    ran = await oncely(*words)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert ran.stderr.replace("oncely_test.", "") == (
        "oncely: there is a key 'k:1' in each of idempotency_keys, older; choose by --table\n"
    )
    ran = await oncely(*words, "--table", "older", "--json")
    assert (ran.exit_code, ran.json["where"].replace("oncely_test.", "")) == (0, "older")


async def test_a_key_is_answered_expired_or_unanswered(shop: Shop, engine: AsyncEngine) -> None:
    await store_key(shop, "answered")
    await store_key(shop, "expired", ttl=timedelta(days=1))
    await execute(engine, "UPDATE idempotency_keys SET expires_at = now() WHERE expires_at IS NOT NULL")
    await store_key(shop, "unanswered")
    sql = "UPDATE idempotency_keys SET response_code = NULL, response_body = NULL WHERE key = 'unanswered'"
    await execute(engine, sql)
    for state in ("answered", "expired", "unanswered"):
        ran = await oncely("keys", "show", shop.target("rooms"), state, "--scope", "7", "--json")
        assert ran.json["state"] == state
    ran = await oncely("status", shop.target("rooms"), "--json")
    [keys] = ran.json["keys"]
    assert (keys["stored"], keys["unanswered"]) == (3, 1)


async def test_a_key_is_forgotten_after_a_yes(shop: Shop) -> None:
    await store_key(shop)
    words = ["keys", "forget", shop.target("rooms"), "k:1", "--scope", "7"]
    ran = await oncely(*words)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert await oncely(*words, "--yes") == Ran(
        0, "k:1: forgotten\n", "oncely: key 'k:1' of scope '7', answered, will be forgotten.\n"
    )
    assert await oncely(*words, "--yes") == Ran(1, "", "oncely: there is no key 'k:1' of scope '7'\n")


async def test_a_target_without_keys_or_effects_says_so(shop: Shop) -> None:
    ran = await oncely("keys", "show", shop.target("relay"), "k", "--scope", "")
    hint = "; a target shows what it holds, --database-url alone all"
    assert ran == Ran(1, "", f"oncely: there are no idempotency keys here{hint}\n")
    ran = await oncely("effects", "list", shop.target("relay"))
    assert ran == Ran(1, "", f"oncely: there are no effects here{hint}\n")
