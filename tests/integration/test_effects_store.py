"""The store level, on PostgreSQL by both drivers and on SQLite: one suite, the same answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely.effects import EffectRecord, Effects, Status
from tests.effects import HOUR, make_effects, pass_time, record_of

MINUTE = timedelta(minutes=1)


@pytest.fixture
async def effects(any_engine: AsyncEngine) -> Effects:
    return await make_effects(any_engine, stale_after=HOUR)


async def owner_of(effects: Effects, key: str) -> str:
    token = await effects.claim(key, b"args")
    assert token is not None
    return token


async def test_a_claim_makes_a_pending_record(effects: Effects) -> None:
    before = datetime.now(UTC) - MINUTE
    token = await effects.claim("k", b"\0args\xff", provider_token="p")
    record = await record_of(effects, "k")
    assert record.expires_at is not None
    assert record == EffectRecord(
        key="k",
        args_hash=b"\0args\xff",
        status=Status.PENDING,
        result_json=None,
        error=None,
        token=str(token),
        provider_token="p",
        attempts=1,
        created_at=record.created_at,
        updated_at=record.updated_at,
        expires_at=record.expires_at,
        expired=False,
    )
    assert before < record.created_at <= record.updated_at < before + 2 * MINUTE
    assert abs(record.expires_at - record.created_at - HOUR) < timedelta(milliseconds=2)
    assert {time.tzinfo for time in (record.created_at, record.updated_at, record.expires_at)} == {UTC}


async def test_a_key_is_claimed_once(effects: Effects) -> None:
    assert await effects.claim("k", b"args") is not None
    assert await effects.claim("k", b"args") is None


@pytest.mark.parametrize("key", ["", "k" * 1_000, "trailing ", "🦊", "é", "e\u0301", "%s :a 'q' \"q\" $1"])
async def test_odd_keys_are_keys_of_their_own(effects: Effects, key: str) -> None:
    await effects.claim("trailing", b"args")
    await owner_of(effects, key)
    assert (await record_of(effects, key)).key == key


async def test_every_claim_has_tokens_of_its_own(effects: Effects, any_engine: AsyncEngine) -> None:
    tokens = []
    for _ in range(3):
        token = await owner_of(effects, "k")
        tokens += [token, (await record_of(effects, "k")).provider_token]
        await effects.finish("k", token, Status.DONE, ttl=MINUTE)
        await pass_time(effects, any_engine, HOUR)
        renewed = await effects.renew(await record_of(effects, "k"), b"args")
        tokens += [str(renewed), (await record_of(effects, "k")).provider_token]
        await effects.delete("k")
    assert len(set(tokens)) == len(tokens)


async def test_a_finished_record_holds_the_result(effects: Effects) -> None:
    token = await owner_of(effects, "k")
    assert await effects.finish("k", token, Status.DONE, result={"id": 7, "text": "é'\\"})
    record = await record_of(effects, "k")
    assert (record.status, record.result, record.error) == (Status.DONE, {"id": 7, "text": "é'\\"}, None)
    assert (record.expires_at, record.expired) == (None, False)


@pytest.mark.parametrize("result", [None, False, 0, "", [], {}, 2**70, 1e-320])
async def test_an_empty_or_odd_result_is_a_result(effects: Effects, result: object) -> None:
    token = await owner_of(effects, "k")
    await effects.finish("k", token, Status.DONE, result=result)
    record = await record_of(effects, "k")
    assert (record.status, record.result) == (Status.DONE, result)


async def test_a_failed_record_holds_the_error(effects: Effects) -> None:
    token = await owner_of(effects, "k")
    assert await effects.finish("k", token, Status.FAILED, error="CardDeclined: no funds")
    record = await record_of(effects, "k")
    assert (record.status, record.error, record.result_json) == (
        Status.FAILED,
        "CardDeclined: no funds",
        None,
    )


async def test_an_error_is_bounded_and_made_storable(effects: Effects) -> None:
    token = await owner_of(effects, "k")
    await effects.finish("k", token, Status.FAILED, error="a\0b\ud800c" + "x" * 5_000)
    error = (await record_of(effects, "k")).error
    assert error == "a\ufffdb?c" + "x" * 995


async def test_a_failure_without_a_word_is_still_a_failure(effects: Effects) -> None:
    token = await owner_of(effects, "k")
    await effects.finish("k", token, Status.FAILED)
    assert (await record_of(effects, "k")).status is Status.FAILED


@pytest.mark.parametrize("status", [Status.DONE, Status.FAILED, Status.UNKNOWN])
async def test_a_finish_happens_once(effects: Effects, status: Status) -> None:
    token = await owner_of(effects, "k")
    assert await effects.finish("k", token, status)
    before = await record_of(effects, "k")
    assert not await effects.finish("k", token, Status.DONE, result="other")
    assert not await effects.finish("k", token, Status.FAILED, error="other")
    assert await record_of(effects, "k") == before


async def test_a_stranger_changes_nothing(effects: Effects) -> None:
    await owner_of(effects, "k")
    stranger = await owner_of(effects, "other")
    before = await record_of(effects, "k")
    assert not await effects.finish("k", stranger, Status.DONE)
    assert not await effects.extend("k", stranger, HOUR)
    assert not await effects.delete("k", token=stranger)
    assert await record_of(effects, "k") == before


async def test_a_claim_that_has_run_out_reads_as_unknown(effects: Effects, any_engine: AsyncEngine) -> None:
    await owner_of(effects, "k")
    await pass_time(effects, any_engine, HOUR - MINUTE)
    assert (await record_of(effects, "k")).status is Status.PENDING
    await pass_time(effects, any_engine, MINUTE)
    record = await record_of(effects, "k")
    assert (record.status, record.expired) == (Status.UNKNOWN, True)


async def test_a_claim_is_extended_while_it_lives(effects: Effects, any_engine: AsyncEngine) -> None:
    token = await owner_of(effects, "k")
    await pass_time(effects, any_engine, 0.9 * HOUR)
    assert await effects.extend("k", token, HOUR)
    await pass_time(effects, any_engine, 0.9 * HOUR)
    assert (await record_of(effects, "k")).status is Status.PENDING


async def test_a_claim_that_has_run_out_is_not_extended(effects: Effects, any_engine: AsyncEngine) -> None:
    token = await owner_of(effects, "k")
    await pass_time(effects, any_engine, 1.1 * HOUR)
    assert not await effects.extend("k", token, HOUR)
    assert (await record_of(effects, "k")).status is Status.UNKNOWN


@pytest.mark.parametrize("status", [Status.DONE, Status.FAILED, Status.UNKNOWN])
async def test_a_finished_record_never_comes_back_to_life(
    effects: Effects, any_engine: AsyncEngine, status: Status
) -> None:
    token = await owner_of(effects, "k")
    await effects.finish("k", token, status)
    before = await record_of(effects, "k")
    assert not await effects.extend("k", token, HOUR)
    assert await record_of(effects, "k") == before
    await pass_time(effects, any_engine, 2 * HOUR)
    assert not await effects.extend("k", token, HOUR)


async def test_a_stale_owner_is_told_that_it_lost(effects: Effects, any_engine: AsyncEngine) -> None:
    first = await owner_of(effects, "k")
    await pass_time(effects, any_engine, HOUR)
    second = await effects.take(await record_of(effects, "k"), Status.PENDING)
    assert second is not None
    assert not await effects.finish("k", first, Status.DONE, result="the first's")
    assert not await effects.extend("k", first, HOUR)
    assert await effects.finish("k", second, Status.DONE, result="the second's")
    assert not await effects.finish("k", first, Status.DONE, result="the first's")
    assert (await record_of(effects, "k")).result == "the second's"


async def test_a_token_of_an_earlier_life_is_not_accepted(effects: Effects, any_engine: AsyncEngine) -> None:
    first = await owner_of(effects, "k")
    await effects.finish("k", first, Status.DONE, ttl=MINUTE)
    await pass_time(effects, any_engine, HOUR)
    assert await effects.renew(await record_of(effects, "k"), b"args") is not None
    assert not await effects.finish("k", first, Status.DONE, result="of the first life")
    await effects.delete("k")
    await owner_of(effects, "k")
    assert not await effects.extend("k", first, HOUR)
    assert (await record_of(effects, "k")).status is Status.PENDING


async def test_an_owner_may_finish_late_as_long_as_nobody_took_the_record(
    effects: Effects, any_engine: AsyncEngine
) -> None:
    token = await owner_of(effects, "k")
    await pass_time(effects, any_engine, 2 * HOUR)
    assert await effects.finish("k", token, Status.DONE, result="late")
    assert (await record_of(effects, "k")).result == "late"


async def test_a_live_owner_is_not_taken_from(effects: Effects) -> None:
    token = await owner_of(effects, "k")
    for status in Status:
        assert await effects.take(await record_of(effects, "k"), status) is None
    assert await effects.finish("k", token, Status.DONE)


async def test_a_finished_record_is_not_taken(effects: Effects) -> None:
    token = await owner_of(effects, "k")
    await effects.finish("k", token, Status.DONE, result=1)
    before = await record_of(effects, "k")
    for status in Status:
        assert await effects.take(before, status) is None
    assert await record_of(effects, "k") == before


async def test_a_takeover_to_call_again_keeps_what_the_provider_knows(
    effects: Effects, any_engine: AsyncEngine
) -> None:
    first = await owner_of(effects, "k")
    await effects.finish("k", first, Status.UNKNOWN, error="ReadTimeout: 5 s")
    unknown = await record_of(effects, "k")
    await pass_time(effects, any_engine, MINUTE)
    token = await effects.take(await record_of(effects, "k"), Status.PENDING)
    taken = await record_of(effects, "k")
    assert taken == replace(
        unknown,
        status=Status.PENDING,
        token=str(token),
        attempts=2,
        error=None,
        created_at=unknown.created_at - MINUTE,
        updated_at=taken.updated_at,
        expires_at=taken.expires_at,
    )
    assert taken.expires_at is not None
    assert abs(taken.expires_at - taken.updated_at - HOUR) < timedelta(milliseconds=2)


async def test_what_was_found_out_is_recorded_by_taking(effects: Effects) -> None:
    for key, status, end in (
        ("done", Status.DONE, {"result": {"charge": 1}, "ttl": HOUR}),
        ("failed", Status.FAILED, {"error": "by hand: never sent"}),
        ("unknown", Status.UNKNOWN, {"error": "being looked into"}),
    ):
        token = await owner_of(effects, key)
        await effects.finish(key, token, Status.UNKNOWN)
        assert await effects.take(await record_of(effects, key), status, **end) is not None
        record = await record_of(effects, key)
        assert (record.status, record.result, record.error, record.attempts) == (
            status,
            end.get("result"),
            end.get("error"),
            1,
        )
        assert (record.expires_at is not None) == ("ttl" in end)


async def test_a_take_compares_with_what_was_read(effects: Effects, any_engine: AsyncEngine) -> None:
    token = await owner_of(effects, "k")
    await effects.finish("k", token, Status.UNKNOWN)
    read = await record_of(effects, "k")
    assert await effects.take(read, Status.UNKNOWN) is not None
    assert await effects.take(read, Status.DONE, result="too late") is None
    assert await effects.take(replace(read, token="other"), Status.DONE) is None
    now = await record_of(effects, "k")
    assert await effects.take(replace(now, updated_at=now.updated_at - MINUTE), Status.DONE) is None
    assert await effects.take(now, Status.DONE) is not None


async def test_ttl_frees_a_finished_record_and_renew_opens_it(
    effects: Effects, any_engine: AsyncEngine
) -> None:
    token = await owner_of(effects, "k")
    await effects.finish("k", token, Status.FAILED, error="E", ttl=MINUTE)
    early = await record_of(effects, "k")
    assert await effects.renew(early, b"other") is None
    await pass_time(effects, any_engine, MINUTE)
    expired = await record_of(effects, "k")
    assert (expired.status, expired.expired) == (Status.FAILED, True)
    assert await effects.claim("k", b"other") is None  # a claim does not open it, renew does
    renewed = await effects.renew(expired, b"other", provider_token="new")
    record = await record_of(effects, "k")
    assert record == EffectRecord(
        key="k",
        args_hash=b"other",
        status=Status.PENDING,
        result_json=None,
        error=None,
        token=str(renewed),
        provider_token="new",
        attempts=1,
        created_at=record.created_at,
        updated_at=record.updated_at,
        expires_at=record.expires_at,
        expired=False,
    )
    assert record.created_at > expired.created_at
    assert await effects.renew(expired, b"other") is None


async def test_ttl_does_not_free_what_is_open(effects: Effects, any_engine: AsyncEngine) -> None:
    await owner_of(effects, "pending")
    token = await owner_of(effects, "unknown")
    await effects.finish("unknown", token, Status.UNKNOWN)
    await pass_time(effects, any_engine, 1_000 * HOUR)
    for key in ("pending", "unknown"):
        assert await effects.renew(await record_of(effects, key), b"args") is None


async def test_a_record_without_ttl_is_never_free(effects: Effects, any_engine: AsyncEngine) -> None:
    token = await owner_of(effects, "k")
    await effects.finish("k", token, Status.DONE)
    await pass_time(effects, any_engine, timedelta(days=30_000))
    assert await effects.renew(await record_of(effects, "k"), b"args") is None


async def all_kinds(effects: Effects) -> None:
    for status in (Status.DONE, Status.FAILED, Status.UNKNOWN):
        token = await owner_of(effects, status)
        await effects.finish(status, token, status)
    await owner_of(effects, "pending")
    token = await owner_of(effects, "long ttl")
    await effects.finish("long ttl", token, Status.DONE, ttl=1_000 * HOUR)
    token = await owner_of(effects, "short ttl")
    await effects.finish("short ttl", token, Status.DONE, ttl=MINUTE)


async def keys(effects: Effects) -> set[str]:
    return {record.key for record in await effects.records(list(Status))}


async def test_purge_removes_finished_records_only(effects: Effects, any_engine: AsyncEngine) -> None:
    await all_kinds(effects)
    await pass_time(effects, any_engine, 100 * HOUR)
    assert await effects.purge(99 * HOUR) == 3
    assert await keys(effects) == {"pending", "unknown", "long ttl"}
    assert {record.key for record in await effects.records()} == {"pending", "unknown"}
    assert await effects.purge(0) == 0


async def test_purge_keeps_what_is_younger(effects: Effects, any_engine: AsyncEngine) -> None:
    await all_kinds(effects)
    await pass_time(effects, any_engine, 100 * HOUR)
    token = await owner_of(effects, "young")
    await effects.finish("young", token, Status.DONE)
    assert await effects.purge(100.5 * 3600) == 0
    assert await effects.purge(60) == 3
    assert "young" in await keys(effects)


async def test_purge_counts_from_the_end_of_the_call(effects: Effects, any_engine: AsyncEngine) -> None:
    token = await owner_of(effects, "k")
    await pass_time(effects, any_engine, 100 * HOUR)
    await effects.finish("k", token, Status.DONE)
    assert await effects.purge(HOUR) == 0
    assert await effects.purge(0) == 1


async def test_purge_of_one_kind_and_in_bounded_batches(effects: Effects) -> None:
    for status in (Status.DONE, Status.FAILED):
        for number in range(5):
            token = await owner_of(effects, f"{status} {number}")
            await effects.finish(f"{status} {number}", token, status)
    assert await effects.purge(0, ["failed"]) == 5  # type: ignore[list-item]  # text will do
    assert [await effects.purge(0, limit=2) for _ in range(4)] == [2, 2, 1, 0]


async def test_records_lists_the_open_ones_newest_first(effects: Effects, any_engine: AsyncEngine) -> None:
    await owner_of(effects, "stale")
    await pass_time(effects, any_engine, 2 * HOUR)
    token = await owner_of(effects, "unknown")
    await effects.finish("unknown", token, Status.UNKNOWN, error="ReadTimeout")
    await pass_time(effects, any_engine, MINUTE)
    token = await owner_of(effects, "done")
    await effects.finish("done", token, Status.DONE)
    await pass_time(effects, any_engine, MINUTE)
    await owner_of(effects, "pending")

    async def listed(*statuses: Status, limit: int | None = None) -> list[tuple[str, Status]]:
        found = await effects.records(statuses or None, limit)
        return [(record.key, record.status) for record in found]

    assert await listed() == [
        ("pending", Status.PENDING),
        ("unknown", Status.UNKNOWN),
        ("stale", Status.UNKNOWN),
    ]
    assert await listed(Status.UNKNOWN) == [("unknown", Status.UNKNOWN), ("stale", Status.UNKNOWN)]
    assert await listed(Status.PENDING) == [("pending", Status.PENDING)]
    assert await listed(Status.DONE, Status.FAILED) == [("done", Status.DONE)]
    assert await listed(*Status, limit=2) == [("pending", Status.PENDING), ("done", Status.DONE)]


async def test_delete_says_whether_there_was_a_record(effects: Effects) -> None:
    token = await owner_of(effects, "k")
    assert not await effects.delete("other")
    assert await effects.delete("k")
    assert not await effects.delete("k")
    assert await effects.get("k") is None
    assert not await effects.finish("k", token, Status.DONE)


async def test_an_owner_gives_back_only_what_it_still_holds(effects: Effects) -> None:
    token = await owner_of(effects, "k")
    assert await effects.delete("k", token=token)
    token = await owner_of(effects, "k")
    await effects.finish("k", token, Status.DONE)
    assert not await effects.delete("k", token=token)


async def test_a_sessionmaker_serves_like_an_engine(effects: Effects, any_engine: AsyncEngine) -> None:
    through_sessions = effects.bind(async_sessionmaker(any_engine))
    token = await owner_of(through_sessions, "k")
    assert await effects.finish("k", token, Status.DONE)


async def test_a_loss_is_an_answer_at_any_isolation_level_of_the_engine(any_engine: AsyncEngine) -> None:
    effects = await make_effects(any_engine)
    strict = effects.bind(any_engine.execution_options(isolation_level="SERIALIZABLE"))
    for round_number in range(10):
        key = f"k{round_number}"
        claims = await asyncio.gather(*(strict.claim(key, b"args") for _ in range(5)))
        (token,) = filter(None, claims)
        await strict.finish(key, token, Status.UNKNOWN)
        read = await record_of(strict, key)
        takes = await asyncio.gather(*(strict.take(read, Status.PENDING) for _ in range(5)))
        assert len(list(filter(None, takes))) == 1


async def test_a_half_state_is_refused_by_the_table(effects: Effects, any_engine: AsyncEngine) -> None:
    now = datetime.now(UTC).replace(tzinfo=None if any_engine.dialect.name == "sqlite" else UTC)
    row = {
        "key": "k",
        "args_hash": b"",
        "status": "done",
        "result": "1",
        "token": "t",
        "provider_token": "p",
        "attempts": 1,
        "created_at": now,
        "updated_at": now,
    }
    for name, wrong in (
        ("effects_status_check", {"status": "doing", "result": None}),
        ("effects_result_check", {"result": None}),
        ("effects_result_check", {"status": "unknown"}),
        ("effects_error_check", {"error": "why"}),
        ("effects_error_check", {"status": "failed", "result": None}),
        ("effects_expiry_check", {"status": "pending", "result": None}),
        ("effects_expiry_check", {"status": "unknown", "result": None, "expires_at": now}),
        ("effects_attempts_check", {"attempts": 0}),
    ):
        with pytest.raises(IntegrityError) as caught:
            async with any_engine.begin() as connection:
                await connection.execute(insert(effects.table).values(row | wrong))
        assert name in str(caught.value.orig)
