"""Effects.run, on PostgreSQL and on SQLite: what the caller of each situation sees.

The store level's suite runs on psycopg too; run() is above it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import (
    NOT_HAPPENED,
    EffectFailed,
    EffectLost,
    EffectPending,
    Effects,
    EffectUnknown,
    KeyReused,
)
from oncely.effects import Status
from tests.effects import HOUR, Provider, make_effects, pass_time, record_of
from tests.waiting import until

pytestmark = pytest.mark.parametrize("any_database", ["asyncpg", "aiosqlite"], indirect=True)

MINUTE = timedelta(minutes=1)


class CardDeclined(Exception):
    pass


@pytest.fixture
async def effects(any_engine: AsyncEngine) -> Effects:
    return await make_effects(any_engine, failed_on=(CardDeclined,))


@pytest.fixture
def provider() -> Provider:
    return Provider()


async def must_not_be_made(provider_token: str) -> object:
    raise AssertionError("the call was made again")


async def times_out(provider_token: str) -> object:
    raise TimeoutError("read timed out")


async def leave_unknown(effects: Effects, key: str = "k", args: object = None) -> None:
    with pytest.raises(TimeoutError):
        await effects.run(key, times_out, args=args)


async def test_a_call_is_made_once_and_its_result_replayed(effects: Effects, provider: Provider) -> None:
    assert await effects.run("k", provider.charge) == {"charge": 1}
    assert await effects.run("k", must_not_be_made) == {"charge": 1}
    assert len(provider.tokens) == 1
    record = await record_of(effects, "k")
    assert (record.status, record.provider_token) == (Status.DONE, provider.tokens[0])


@pytest.mark.parametrize("result", [None, False, 0, "", [], {}])
async def test_an_empty_result_is_a_result(effects: Effects, result: object) -> None:
    async def call(provider_token: str) -> object:
        return result

    assert await effects.run("k", call) == result
    assert await effects.run("k", must_not_be_made) == result


async def test_the_first_caller_gets_what_later_ones_get(effects: Effects) -> None:
    @dataclass
    class Charge:
        id: str
        amounts: tuple[int, ...]

    async def call(provider_token: str) -> Charge:
        return Charge("ch_1", (1, 2))

    first = await effects.run("k", call)
    assert first == await effects.run("k", must_not_be_made) == {"id": "ch_1", "amounts": [1, 2]}


async def test_a_known_failure_is_replayed_and_the_call_not_made_again(effects: Effects) -> None:
    async def call(provider_token: str) -> object:
        raise EffectFailed("card declined")

    with pytest.raises(EffectFailed, match=r"^card declined$"):
        await effects.run("k", call)
    with pytest.raises(EffectFailed, match=r"^card declined$") as caught:
        await effects.run("k", must_not_be_made)
    assert caught.value.record == await record_of(effects, "k")


async def test_a_type_of_failed_on_goes_on_and_is_replayed_as_a_failure(effects: Effects) -> None:
    class NoFunds(CardDeclined):
        pass

    async def call(provider_token: str) -> object:
        raise NoFunds("3 EUR")

    with pytest.raises(NoFunds):
        await effects.run("k", call)
    with pytest.raises(EffectFailed, match=r"NoFunds: 3 EUR$"):
        await effects.run("k", must_not_be_made)


@pytest.mark.parametrize(
    "error", [TimeoutError("5 s"), ConnectionResetError(), RuntimeError("bug"), ValueError()]
)
async def test_any_other_exception_goes_on_and_leaves_the_outcome_unknown(
    effects: Effects, error: Exception
) -> None:
    async def call(provider_token: str) -> object:
        raise error

    with pytest.raises(type(error)) as first:
        await effects.run("k", call)
    assert first.value is error
    with pytest.raises(EffectUnknown) as caught:
        await effects.run("k", must_not_be_made)
    record = await record_of(effects, "k")
    assert caught.value.record == record
    assert record.status is Status.UNKNOWN
    assert str(record.error).startswith(type(error).__name__)
    assert await effects.records() == [record]


async def test_an_exception_before_the_call_awaits_leaves_the_outcome_unknown(effects: Effects) -> None:
    def call(provider_token: str) -> Any:
        raise RuntimeError("not even a coroutine")

    with pytest.raises(RuntimeError):
        await effects.run("k", call)
    assert (await record_of(effects, "k")).status is Status.UNKNOWN


async def test_a_cancelled_call_is_unknown_at_once(effects: Effects) -> None:
    started = asyncio.Event()

    async def call(provider_token: str) -> object:
        started.set()
        return await asyncio.Event().wait()

    run = asyncio.create_task(effects.run("k", call))
    await started.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    record = await record_of(effects, "k")
    assert (record.status, record.error) == (Status.UNKNOWN, "CancelledError")


async def test_a_timeout_around_the_run_is_unknown_at_once(effects: Effects) -> None:
    async def call(provider_token: str) -> object:
        limit.reschedule(asyncio.get_running_loop().time())
        return await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:
            await effects.run("k", call)
    assert (await record_of(effects, "k")).status is Status.UNKNOWN


async def test_an_owner_that_died_is_unknown_after_stale_after(
    effects: Effects, any_engine: AsyncEngine, provider: Provider
) -> None:
    await effects.claim("k", (await hash_of(effects, None)), provider_token="dead")
    with pytest.raises(EffectPending):
        await effects.run("k", must_not_be_made)
    await pass_time(effects, any_engine, HOUR)
    with pytest.raises(EffectUnknown):
        await effects.run("k", must_not_be_made)
    assert await effects.run("k", provider.charge, verify=provider.find) == {"charge": 1}
    assert provider.tokens == ["dead"]


async def hash_of(effects: Effects, args: object) -> bytes:
    async def call(provider_token: str) -> None:
        return None

    await effects.run("the hash of args", call, args=args)
    found = (await record_of(effects, "the hash of args")).args_hash
    await effects.delete("the hash of args")
    return found


async def test_what_the_verifier_found_becomes_the_result(effects: Effects) -> None:
    await leave_unknown(effects, args={"amount": 5})
    asked = []

    async def verify(key: str, args: Any) -> object:
        asked.append((key, args))
        return {"charge": 1}

    for _ in range(2):
        found = await effects.run("k", must_not_be_made, args={"amount": 5}, verify=verify, ttl=HOUR)
        assert found == {"charge": 1}
    assert asked == [("k", {"amount": 5})]
    record = await record_of(effects, "k")
    assert (record.status, record.error, record.attempts) == (Status.DONE, None, 1)
    assert record.expires_at is not None


async def test_a_call_that_has_not_happened_is_made_with_the_same_provider_token(
    effects: Effects, provider: Provider
) -> None:
    tokens = []

    async def lost(provider_token: str) -> object:
        tokens.append(provider_token)
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await effects.run("k", lost)
    with pytest.raises(ConnectionResetError):
        await effects.run("k", lost, verify=provider.find)
    assert await effects.run("k", provider.charge, verify=provider.find) == {"charge": 1}
    assert {*tokens, *provider.tokens} == {tokens[0]}
    assert (await record_of(effects, "k")).attempts == 3


async def test_a_verifier_with_a_provider_token_is_given_it(effects: Effects, provider: Provider) -> None:
    async def charged_and_lost(provider_token: str) -> object:
        await provider.charge(provider_token)
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await effects.run("k", charged_and_lost)
    assert await effects.run("k", must_not_be_made, verify=provider.find) == {"charge": 1}
    assert len(provider.tokens) == 1


async def test_a_verifier_that_raises_changes_nothing(effects: Effects) -> None:
    await leave_unknown(effects)
    before = await record_of(effects, "k")

    for error in (ConnectionError("provider away"), EffectFailed("cannot tell"), CardDeclined()):

        async def verify(key: str, args: Any, error: Exception = error) -> object:
            raise error

        with pytest.raises(type(error)):
            await effects.run("k", must_not_be_made, verify=verify)
    assert await record_of(effects, "k") == before


async def test_a_verifier_whose_result_cannot_be_stored_changes_nothing(effects: Effects) -> None:
    await leave_unknown(effects)
    before = await record_of(effects, "k")

    async def verify(key: str, args: Any) -> object:
        return b"bytes"

    with pytest.raises(ValueError, match="verifier"):
        await effects.run("k", must_not_be_made, verify=verify)
    assert await record_of(effects, "k") == before


async def test_no_verifier_is_asked_about_what_is_known(effects: Effects, provider: Provider) -> None:
    async def verify(key: str, args: Any) -> object:
        raise AssertionError("asked")

    assert await effects.run("k", provider.charge, verify=verify) == {"charge": 1}
    assert await effects.run("k", must_not_be_made, verify=verify) == {"charge": 1}
    with pytest.raises(EffectFailed):
        await effects.run("failed", declined, verify=verify)
    with pytest.raises(EffectFailed):
        await effects.run("failed", must_not_be_made, verify=verify)


async def declined(provider_token: str) -> object:
    raise EffectFailed("card declined")


async def test_a_person_decides_by_taking_the_record(effects: Effects) -> None:
    await leave_unknown(effects)
    (record,) = await effects.records()
    assert await effects.take(record, Status.DONE, result={"charge": "found by hand"}) is not None
    assert await effects.run("k", must_not_be_made) == {"charge": "found by hand"}


async def test_other_args_under_the_same_key_are_refused_in_every_state(
    effects: Effects, provider: Provider
) -> None:
    await effects.run("done", provider.charge, args={"amount": 1})
    with pytest.raises(EffectFailed):
        await effects.run("failed", declined, args={"amount": 1})
    await leave_unknown(effects, "unknown", {"amount": 1})
    await effects.claim("pending", b"of other args")
    for key in ("done", "failed", "unknown", "pending"):
        before = await record_of(effects, key)
        with pytest.raises(KeyReused) as caught:
            await effects.run(key, must_not_be_made, args={"amount": 2}, verify=provider.find)
        assert (caught.value.scope, caught.value.key) == ("", key)
        assert await record_of(effects, key) == before


async def test_after_its_ttl_a_key_is_a_new_effect_with_a_new_provider_token(
    effects: Effects, any_engine: AsyncEngine, provider: Provider
) -> None:
    assert await effects.run("k", provider.charge, args=1, ttl=MINUTE) == {"charge": 1}
    await pass_time(effects, any_engine, MINUTE)
    assert await effects.run("k", provider.charge, args=2) == {"charge": 2}
    assert len(set(provider.tokens)) == 2
    assert await effects.run("k", must_not_be_made, args=2) == {"charge": 2}


async def test_a_failure_may_be_tried_again_after_its_ttl_or_by_hand(
    effects: Effects, any_engine: AsyncEngine, provider: Provider
) -> None:
    for key in ("ttl", "by hand"):
        with pytest.raises(EffectFailed):
            await effects.run(key, declined, ttl=MINUTE)
    assert await effects.delete("by hand")
    await pass_time(effects, any_engine, MINUTE)
    for number, key in enumerate(("ttl", "by hand"), start=1):
        assert await effects.run(key, provider.charge) == {"charge": number}


async def test_while_another_owner_makes_the_call_it_is_pending(effects: Effects) -> None:
    async def call(provider_token: str) -> object:
        with pytest.raises(EffectPending) as caught:  # also from inside itself
            await effects.run("k", must_not_be_made)
        return caught.value.expires_at == (await record_of(effects, "k")).expires_at

    assert await effects.run("k", call) is True


async def test_a_caller_that_waits_gets_the_owners_result(effects: Effects) -> None:
    started, may_end = asyncio.Event(), asyncio.Event()

    async def call(provider_token: str) -> object:
        started.set()
        await may_end.wait()
        return "the owner's"

    owner = asyncio.create_task(effects.run("k", call))
    await started.wait()
    waiters = [
        asyncio.create_task(effects.run("k", must_not_be_made, wait=timedelta(seconds=30))) for _ in range(3)
    ]
    with pytest.raises(EffectPending):
        await effects.run("k", must_not_be_made, wait=timedelta(milliseconds=50))
    may_end.set()
    assert await asyncio.gather(owner, *waiters) == ["the owner's"] * 4


async def test_a_caller_that_waits_verifies_when_the_owner_is_gone(
    effects: Effects, any_engine: AsyncEngine, provider: Provider
) -> None:
    await effects.claim("k", await hash_of(effects, None), provider_token="dead")
    waiter = asyncio.create_task(
        effects.run("k", provider.charge, verify=provider.find, wait=timedelta(seconds=30))
    )
    await pass_time(effects, any_engine, HOUR)
    assert await waiter == {"charge": 1}
    assert provider.tokens == ["dead"]


async def test_twenty_callers_of_one_key_make_one_call(effects: Effects, provider: Provider) -> None:
    async def slowly(provider_token: str) -> object:
        await asyncio.sleep(0.05)
        return await provider.charge(provider_token)

    results = await asyncio.gather(*(effects.run("k", slowly, wait=timedelta(seconds=30)) for _ in range(20)))
    assert results == [{"charge": 1}] * 20
    assert len(provider.tokens) == 1


async def test_ten_callers_of_an_unknown_effect_make_one_call(effects: Effects, provider: Provider) -> None:
    for round_number in range(5):
        key = f"k{round_number}"
        await leave_unknown(effects, key)
        results = await asyncio.gather(
            *(
                effects.run(key, provider.charge, verify=provider.find, wait=timedelta(seconds=30))
                for _ in range(10)
            )
        )
        assert results == [{"charge": round_number + 1}] * 10


async def test_ten_callers_of_an_expired_effect_make_one_call(
    effects: Effects, any_engine: AsyncEngine, provider: Provider
) -> None:
    for round_number in range(5):
        key = f"k{round_number}"
        await effects.run(key, provider.charge, ttl=MINUTE)
        await pass_time(effects, any_engine, MINUTE)
        results = await asyncio.gather(
            *(effects.run(key, provider.charge, wait=timedelta(seconds=30)) for _ in range(10))
        )
        assert results == [{"charge": 2 * round_number + 2}] * 10


async def test_no_transaction_is_open_during_the_call_or_the_verifier(
    effects: Effects, any_engine: AsyncEngine
) -> None:
    in_use, uses = set(), []

    def begin(driver: Any, *_: Any) -> None:
        uses.append(driver)
        in_use.add(id(driver))

    event.listen(any_engine.sync_engine, "checkout", begin)
    event.listen(any_engine.sync_engine, "checkin", lambda driver, *_: in_use.discard(id(driver)))

    async def call(provider_token: str) -> object:
        return len(in_use)

    async def verify(key: str, args: Any) -> object:
        return len(in_use)

    assert await effects.run("k", call) == 0
    await leave_unknown(effects, "unknown")
    assert await effects.run("unknown", call, verify=verify) == 0
    assert len(uses) > 4


async def test_a_result_that_cannot_be_stored_leaves_the_outcome_unknown(effects: Effects) -> None:
    for key, result in (("bytes", b"bytes"), ("decision", NOT_HAPPENED)):

        async def call(provider_token: str, result: object = result) -> object:
            return result

        with pytest.raises(EffectUnknown) as caught:
            await effects.run(key, call)
        record = await record_of(effects, key)
        assert caught.value.record == record
        assert record.status is Status.UNKNOWN
        assert str(record.error).startswith("ValueError: result: ")


async def test_a_result_that_cannot_be_stored_is_no_failure_whatever_failed_on_says(
    any_engine: AsyncEngine,
) -> None:
    effects = await make_effects(any_engine, failed_on=(Exception,))

    async def call(provider_token: str) -> object:
        return b"bytes"

    with pytest.raises(EffectUnknown):
        await effects.run("k", call)
    assert (await record_of(effects, "k")).status is Status.UNKNOWN


async def test_redact_decides_what_is_stored_of_an_error(any_engine: AsyncEngine) -> None:
    def redact(error: BaseException) -> str:
        return f"HTTP {error.args[1]}"

    effects = await make_effects(any_engine, redact=redact)
    for error, stored in (
        (RuntimeError("card 4242", 500), "RuntimeError: HTTP 500"),
        (KeyError("card 4242"), "KeyError: (no message: IndexError)"),
        (EffectFailed("card 4242", 402), "EffectFailed: HTTP 402"),
    ):

        async def call(provider_token: str, error: Exception = error) -> object:
            raise error

        with pytest.raises(type(error)):
            await effects.run(stored, call)
        assert (await record_of(effects, stored)).error == stored


async def test_an_owner_that_was_taken_from_raises_what_it_lost(
    effects: Effects, any_engine: AsyncEngine
) -> None:
    async def call(provider_token: str) -> object:
        await pass_time(effects, any_engine, HOUR)
        assert await effects.take(await record_of(effects, "k"), Status.DONE, result="the taker's")
        return "the owner's"

    with pytest.raises(EffectLost) as caught:
        await effects.run("k", call)
    assert (caught.value.key, caught.value.result) == ("k", "the owner's")
    assert caught.value.record == await record_of(effects, "k")
    assert await effects.run("k", must_not_be_made) == "the taker's"


async def test_an_owner_that_failed_after_it_was_taken_from_has_lost_too(
    effects: Effects, any_engine: AsyncEngine
) -> None:
    async def call(provider_token: str) -> object:
        await pass_time(effects, any_engine, HOUR)
        assert await effects.take(await record_of(effects, "k"), Status.PENDING)
        raise EffectFailed("declined")

    with pytest.raises(EffectLost):
        await effects.run("k", call)
    assert (await record_of(effects, "k")).status is Status.PENDING


async def test_an_owner_whose_record_was_deleted_has_lost(effects: Effects) -> None:
    async def call(provider_token: str) -> object:
        await effects.delete("k")
        return 1

    with pytest.raises(EffectLost) as caught:
        await effects.run("k", call)
    assert caught.value.record is None


async def test_a_lost_effect_inside_an_effect_names_itself_and_leaves_the_outer_one_in_doubt(
    effects: Effects,
) -> None:
    async def inner(provider_token: str) -> object:
        await effects.delete("inner")
        return 1

    async def outer(provider_token: str) -> object:
        return await effects.run("inner", inner)

    with pytest.raises(EffectLost) as caught:
        await effects.run("outer", outer)
    assert (caught.value.key, caught.value.record) == ("inner", None)
    assert (await record_of(effects, "outer")).status is Status.UNKNOWN


async def test_an_owner_whose_time_ran_out_unnoticed_may_still_finish(
    effects: Effects, any_engine: AsyncEngine
) -> None:
    async def call(provider_token: str) -> object:
        await pass_time(effects, any_engine, 2 * HOUR)
        return 1

    assert await effects.run("k", call) == 1


async def test_a_long_call_keeps_its_claim_by_its_heartbeat(any_engine: AsyncEngine) -> None:
    effects = await make_effects(any_engine, stale_after=timedelta(seconds=2))
    ends = set()

    async def call(provider_token: str) -> object:
        async def is_old() -> bool:
            record = await record_of(effects, "k")
            assert record.status is Status.PENDING
            ends.add(record.expires_at)
            return record.updated_at - record.created_at > timedelta(seconds=2.2)

        await until(is_old)
        return "long"

    assert await effects.run("k", call) == "long"
    assert len(ends) >= 4


async def test_a_call_whose_claim_has_ended_is_stopped(any_engine: AsyncEngine) -> None:
    effects = await make_effects(any_engine, stale_after=timedelta(seconds=0.9))
    ends = []

    async def call(provider_token: str) -> object:
        await pass_time(effects, any_engine, HOUR)
        try:
            return await asyncio.Event().wait()
        finally:
            ends.append("stopped")

    with pytest.raises(EffectLost) as caught:
        await effects.run("k", call)
    assert ends == ["stopped"]
    record = await record_of(effects, "k")
    assert (record.status, caught.value.record) == (Status.UNKNOWN, record)


async def test_a_call_is_stopped_when_another_has_taken_its_record(any_engine: AsyncEngine) -> None:
    effects = await make_effects(any_engine, stale_after=timedelta(seconds=0.9))
    taken = []

    async def call(provider_token: str) -> object:
        await pass_time(effects, any_engine, HOUR)
        taken.append(await effects.take(await record_of(effects, "k"), Status.PENDING))
        return await asyncio.Event().wait()

    with pytest.raises(EffectLost) as caught:
        await effects.run("k", call)
    record = await record_of(effects, "k")
    assert (record.status, record.token) == (Status.PENDING, taken[0])
    assert caught.value.record == record


async def test_a_call_that_outlives_its_stop_may_still_have_its_result_recorded(
    any_engine: AsyncEngine,
) -> None:
    effects = await make_effects(any_engine, stale_after=timedelta(seconds=0.9))

    async def call(provider_token: str) -> object:
        await pass_time(effects, any_engine, HOUR)
        try:
            return await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "it had happened"

    assert await effects.run("k", call) == "it had happened"
    assert await effects.run("k", must_not_be_made) == "it had happened"


async def test_a_timeout_of_the_calls_own_is_not_taken_for_a_lost_claim(any_engine: AsyncEngine) -> None:
    effects = await make_effects(any_engine, failed_on=(TimeoutError,))
    with pytest.raises(TimeoutError):
        await effects.run("k", times_out)
    assert (await record_of(effects, "k")).status is Status.FAILED


async def test_a_lost_claim_is_no_failure_whatever_failed_on_says(any_engine: AsyncEngine) -> None:
    effects = await make_effects(
        any_engine, stale_after=timedelta(seconds=0.9), failed_on=(TimeoutError, EffectLost, Exception)
    )

    async def call(provider_token: str) -> object:
        await pass_time(effects, any_engine, HOUR)
        return await asyncio.Event().wait()

    with pytest.raises(EffectLost):
        await effects.run("k", call)
    assert (await record_of(effects, "k")).status is Status.UNKNOWN


async def test_an_effect_inside_an_effect_keeps_its_own_record(effects: Effects, provider: Provider) -> None:
    async def outer(provider_token: str) -> object:
        return [await effects.run("inner", provider.charge), await provider.charge(provider_token)]

    assert await effects.run("outer", outer) == [{"charge": 1}, {"charge": 2}]
    assert await effects.run("inner", must_not_be_made) == {"charge": 1}


async def test_a_decorated_function_takes_its_key_from_its_arguments(
    effects: Effects, provider: Provider
) -> None:
    asked = []

    async def verify(key: str, args: Any) -> object:
        asked.append((key, args))
        return NOT_HAPPENED

    @effects.once(key=lambda order, amount=1: f"charge:{order}", verify=verify)
    async def charge(provider_token: str, order: str, amount: int = 1) -> object:
        """Charges the card of an order."""
        if amount == 13 and not asked:
            raise ConnectionResetError
        return [order, amount, await provider.charge(provider_token)]

    assert charge.__doc__ == "Charges the card of an order."
    assert await charge("a") == ["a", 1, {"charge": 1}]
    assert await charge("a", amount=1) == ["a", 1, {"charge": 1}]
    with pytest.raises(KeyReused):
        await charge("a", 2)
    with pytest.raises(ConnectionResetError):
        await charge("b", 13)
    assert await charge(order="b", amount=13) == ["b", 13, {"charge": 2}]
    assert asked == [("charge:b", {"order": "b", "amount": 13})]


async def test_a_decorated_function_takes_its_key_from_the_caller(
    effects: Effects, provider: Provider
) -> None:
    @effects.once(ttl=HOUR)
    async def charge(provider_token: str, *orders: str, currency: str = "EUR") -> object:
        return [orders, currency, await provider.charge(provider_token)]

    assert await charge.run("k", "a", "b") == [["a", "b"], "EUR", {"charge": 1}]
    assert await charge.run("k", "a", "b", currency="EUR") == [["a", "b"], "EUR", {"charge": 1}]
    with pytest.raises(KeyReused):
        await charge.run("k", "a", "b", currency="USD")
    with pytest.raises(TypeError, match=r"charge\.run"):
        await charge("a")
    assert (await record_of(effects, "k")).expires_at is not None
