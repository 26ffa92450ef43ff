"""Callers who come at the same time: who works, who waits, for how long, and what they find after it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker

from oncely import KeyInFlight, KeyReused, Outcome, Refused, is_retryable
from oncely.errors import OncelyError
from oncely.idempotency import Work
from tests.database import Database, both_drivers
from tests.keys import Shop
from tests.schemas import schemas_of_their_own
from tests.waiting import backend_waits

pytestmark = [pytest.mark.in_schema, both_drivers]

AT_ONCE = timedelta(0)
REAL_TIME = time.time
LONG = timedelta(seconds=30)
ISOLATION = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


@pytest.fixture
async def shop(engines: Callable[..., AsyncEngine]) -> Shop:
    return await Shop.open(engines(pool_size=30))


@asynccontextmanager
async def held(shop: Shop, key: str = "order-1") -> AsyncIterator[asyncio.Event]:
    """Somebody works on the key, until the event is set or the block ends; then it is committed."""
    begun, finish = asyncio.Event(), asyncio.Event()

    async def meanwhile() -> None:
        begun.set()
        await finish.wait()

    task = asyncio.create_task(shop.request(key, meanwhile=meanwhile))
    await begun.wait()
    yield finish
    finish.set()
    await task


async def waiting(shop: Shop, count: int = 1) -> None:
    await backend_waits(shop.engine, "advisory", count)


async def settings(session: AsyncSession | AsyncConnection) -> tuple[str, str]:
    query = text("SELECT current_setting('lock_timeout'), current_setting('search_path')")
    lock_timeout, search_path = (await session.execute(query)).one()
    return lock_timeout, search_path


# One caller beside another


async def test_a_second_caller_waits_and_gets_the_answer(shop: Shop) -> None:
    async with held(shop) as finish:
        second = asyncio.create_task(shop.request())
        await waiting(shop)
        finish.set()
        assert await second == Outcome(201, "made", replayed=True)
    assert (shop.worked, await shop.items()) == (1, ["book"])


async def test_a_second_caller_works_when_the_first_has_failed(shop: Shop) -> None:
    begun, finish = asyncio.Event(), asyncio.Event()

    async def meanwhile() -> None:
        begun.set()
        await finish.wait()

    first = asyncio.create_task(shop.request(meanwhile=meanwhile, raising=ConnectionError("away")))
    await begun.wait()
    second = asyncio.create_task(shop.request(wait=LONG))
    await waiting(shop)
    finish.set()
    with pytest.raises(ConnectionError):
        await first
    assert await second == Outcome(201, "made", replayed=False)
    assert (shop.worked, await shop.items()) == (2, ["book"])


async def test_a_second_caller_with_another_request_waits_to_be_refused(shop: Shop) -> None:
    async with held(shop) as finish:
        second = asyncio.create_task(shop.request(fingerprint=b"two books"))
        await waiting(shop)
        finish.set()
        with pytest.raises(KeyReused):
            await second


@pytest.mark.parametrize("wait", [AT_ONCE, timedelta(milliseconds=1), timedelta(milliseconds=80)])
async def test_a_wait_that_ends_leaves_the_transaction_as_it_was(shop: Shop, wait: timedelta) -> None:
    async with held(shop), shop.sessions() as session:
        await session.execute(text("SET LOCAL lock_timeout = '77s'"))
        await session.execute(text("INSERT INTO orders (item) VALUES ('before')"))
        before = await settings(session)
        begin = time.monotonic()
        with pytest.raises(KeyInFlight) as caught:
            await shop.order(session, wait=wait)
        assert timedelta(seconds=time.monotonic() - begin) >= wait
        assert (caught.value.scope, caught.value.key) == ("Ada", "order-1")
        assert caught.value.retry_after == timedelta(seconds=1)
        assert await settings(session) == before
        assert not session.in_nested_transaction()
        await shop.order(session, "order-2")
        await session.commit()
        assert await settings(session) != before
    assert sorted(await shop.items()) == ["before", "book", "book"]


@pytest.mark.parametrize("driver", ["asyncpg"], indirect=True)
async def test_who_has_waited_long_is_told_to_come_back_later(shop: Shop) -> None:
    async with held(shop):
        with pytest.raises(KeyInFlight) as caught:
            await shop.request(wait=timedelta(seconds=1.05))
        assert caught.value.retry_after == timedelta(seconds=1.05)


async def test_a_wait_that_is_rewarded_leaves_the_settings_as_they_were(shop: Shop) -> None:
    async with held(shop) as finish, shop.sessions() as session:
        await session.execute(text("SET LOCAL lock_timeout = '77s'"))
        before = await settings(session)
        second = asyncio.create_task(shop.order(session, wait=LONG))
        await waiting(shop)
        finish.set()
        assert (await second).replayed is True
        assert await settings(session) == before


async def test_a_wait_that_wins_the_key_leaves_the_settings_as_they_were(shop: Shop) -> None:
    async with shop.sessions() as first, shop.engine.connect() as session:
        await shop.order(first)
        await session.execute(text("SET lock_timeout = '77s'"))
        before = await settings(session)
        inside: list[tuple[str, str]] = []

        async def note() -> None:
            inside.append(await settings(session))

        second = asyncio.create_task(shop.order(session, wait=LONG, meanwhile=note))
        await waiting(shop)
        await first.rollback()
        assert (await second).replayed is False
        assert (inside, await settings(session)) == ([before], before)
        await session.commit()
        assert await settings(session) == before
        await session.invalidate()


@pytest.mark.parametrize("wait", [None, timedelta(days=100_000)])
async def test_a_wait_without_end_takes_the_callers_own_limits(shop: Shop, wait: timedelta | None) -> None:
    async with held(shop), shop.sessions() as session:
        await session.execute(text(f"SET LOCAL {'lock' if wait is None else 'statement'}_timeout = '50ms'"))
        error = KeyInFlight if wait is None else DBAPIError
        with pytest.raises(error):
            await shop.order(session, wait=wait)
        await session.execute(text("SET LOCAL statement_timeout = 0"))
        await shop.order(session, "order-2")
        await session.commit()


async def test_an_answer_is_there_for_those_who_do_not_wait_while_another_replays(shop: Shop) -> None:
    await shop.request()
    async with shop.sessions() as session:
        await shop.order(session)
        assert (await shop.request(wait=AT_ONCE)).replayed is True


async def test_a_waiter_who_got_the_answer_holds_nothing(shop: Shop) -> None:
    async with held(shop) as finish, shop.sessions() as session:
        waiter = asyncio.create_task(shop.order(session))
        await waiting(shop)
        finish.set()
        await waiter
        async with shop.engine.connect() as other:
            locks = await other.scalar(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"))
        assert locks == 0


async def test_two_keys_do_not_wait_for_each_other(shop: Shop) -> None:
    async with held(shop):
        assert (await shop.request("order-2", wait=AT_ONCE)).replayed is False
        assert (await shop.request(scope="Bob", wait=AT_ONCE)).replayed is False


async def test_keys_of_two_translated_schemas_do_not_wait_for_each_other(
    shop: Shop, database: Database
) -> None:
    with schemas_of_their_own(database, "one", "other") as names:
        async with shop.engine.connect() as one, shop.engine.connect() as other:
            for connection, name in zip((one, other), names, strict=True):
                await connection.execution_options(schema_translate_map={None: name})
                await connection.run_sync(shop.keys.table.metadata.create_all)
                await connection.commit()

            def work(name: str) -> Work:
                async def work() -> tuple[int, str]:
                    return 201, name

                return work

            outcomes = [
                await shop.keys.run(
                    connection, scope="Ada", key="k", fingerprint=b"", wait=AT_ONCE, work=work(name)
                )
                for connection, name in ((one, "one"), (other, "other"))
            ]
            assert outcomes == [Outcome(201, "one", False), Outcome(201, "other", False)]
            await one.rollback()
            await other.rollback()


async def test_a_key_that_is_being_pruned_is_waited_for(shop: Shop) -> None:
    await shop.request(ttl=LONG)
    await shop.expire()
    async with shop.sessions() as pruner:
        assert await shop.keys.prune(pruner, older_than=LONG) == 1
        for wait in (AT_ONCE, timedelta(milliseconds=30)):
            with pytest.raises(KeyInFlight):
                await shop.request(wait=wait)
        waiter = asyncio.create_task(shop.request())
        await asyncio.sleep(0)
        await pruner.commit()
        assert await waiter == Outcome(201, "made", replayed=False)
    assert shop.worked == 2


async def test_forget_waits_for_who_uses_an_expired_key_and_forgets_the_new_answer(shop: Shop) -> None:
    await shop.request(ttl=LONG)
    await shop.expire()
    async with shop.sessions() as user, shop.sessions() as operator:
        await shop.order(user)
        forgetting = asyncio.create_task(shop.keys.forget(operator, scope="Ada", key="order-1"))
        await backend_waits(shop.engine, "transactionid")
        await user.commit()
        assert await forgetting == 1
        await operator.commit()
    assert await shop.stored() == []


async def test_the_clock_of_the_host_decides_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, hours in [("fast", 1), ("slow", -1)]:
        monkeypatch.setattr(time, "time", lambda hours=hours: REAL_TIME() + 3600 * hours)
        assert (await shop.request(key, ttl=timedelta(minutes=30))).replayed is False
        assert (await shop.request(key)).replayed is True
        async with shop.sessions.begin() as session:
            assert await shop.keys.prune(session, older_than=timedelta(minutes=30)) == 0


# Isolation


@pytest.mark.parametrize("level", ISOLATION)
async def test_a_key_works_at_any_isolation(
    engines: Callable[..., AsyncEngine], shop: Shop, level: str
) -> None:
    other = Shop(engines(isolation_level=level))
    assert (await other.request()).replayed is False
    assert (await other.request()).replayed is True
    assert (await other.request("order-2", raising=Refused(409, ""))).status == 409
    await shop.expire()
    assert (await other.request()).replayed is False


@pytest.mark.parametrize("level", ISOLATION[1:])
async def test_a_caller_whose_snapshot_is_older_than_the_answer_is_told_to_try_again(
    engines: Callable[..., AsyncEngine], shop: Shop, level: str
) -> None:
    late = async_sessionmaker(engines(isolation_level=level))
    async with held(shop) as finish, late() as session:
        waiter = asyncio.create_task(shop.order(session))
        await waiting(shop)
        finish.set()
        with pytest.raises(DBAPIError) as caught:
            await waiter
        assert is_retryable(caught.value)
        await session.rollback()
        assert (await shop.order(session)).replayed is True
    assert shop.worked == 1


@pytest.mark.parametrize("level", ISOLATION[1:])
async def test_an_expired_key_that_was_used_since_the_snapshot_is_told_too(
    engines: Callable[..., AsyncEngine], shop: Shop, level: str
) -> None:
    await shop.request(ttl=LONG)
    await shop.expire()
    late = async_sessionmaker(engines(isolation_level=level))
    async with late() as session:
        await session.execute(text("SELECT count(*) FROM orders"))
        await shop.request()
        with pytest.raises(DBAPIError) as caught:
            await shop.order(session)
        assert is_retryable(caught.value)
        await session.rollback()
        assert (await shop.order(session)).replayed is True
    assert shop.worked == 2


async def test_two_keys_in_opposite_orders_are_a_deadlock_and_the_loser_may_try_again(shop: Shop) -> None:
    async def both(keys: list[str], others: asyncio.Barrier) -> None:
        async with shop.sessions.begin() as session:
            await shop.order(session, keys[0])
            await others.wait()
            await shop.order(session, keys[1])

    barrier = asyncio.Barrier(2)
    results = await asyncio.gather(
        both(["one", "two"], barrier), both(["two", "one"], barrier), return_exceptions=True
    )
    (lost,) = [result for result in results if result is not None]
    assert isinstance(lost, DBAPIError)
    assert not isinstance(lost, OncelyError)
    assert is_retryable(lost)
    assert await shop.stored() == ["one", "two"]
    async with shop.sessions.begin() as session:
        replays = [await shop.order(session, key) for key in ("two", "one")]
    assert [replay.replayed for replay in replays] == [True, True]


# Races


@pytest.mark.parametrize("callers", [12, 20])
async def test_of_many_retries_at_once_one_works_and_all_get_its_answer(shop: Shop, callers: int) -> None:
    for round_number in range(5):
        shop.worked = 0
        key = f"order-{round_number}"
        outcomes = await asyncio.gather(*(shop.request(key) for _ in range(callers)))
        assert sorted(outcome.replayed for outcome in outcomes) == [False] + [True] * (callers - 1)
        assert {(outcome.status, outcome.body) for outcome in outcomes} == {(201, "made")}
        assert shop.worked == 1
    assert len(await shop.items()) == 5


async def test_twenty_who_come_while_one_works_slowly_get_its_answer_at_once(shop: Shop) -> None:
    async with held(shop) as finish:
        callers = [asyncio.create_task(shop.request()) for _ in range(20)]
        await waiting(shop, 20)
        finish.set()
        outcomes = await asyncio.gather(*callers)
    assert [outcome.replayed for outcome in outcomes] == [True] * 20
    assert shop.worked == 1


@pytest.mark.parametrize("wait", [None, LONG])
async def test_when_the_first_fails_exactly_one_of_twelve_waiters_works(
    shop: Shop, wait: timedelta | None
) -> None:
    for round_number in range(3):
        key = f"order-{round_number}"
        shop.worked = 0
        async with shop.sessions() as first:
            await shop.order(first, key)
            waiters = [asyncio.create_task(shop.request(key, wait=wait)) for _ in range(12)]
            await waiting(shop, 12)
            await first.rollback()
            outcomes = await asyncio.gather(*waiters)
        assert sorted(outcome.replayed for outcome in outcomes) == [False] + [True] * 11
        assert shop.worked == 2
    assert len(await shop.items()) == 3


async def test_of_twelve_who_find_an_expired_key_one_works(shop: Shop) -> None:
    for round_number in range(5):
        key = f"order-{round_number}"
        await shop.request(key, (200, "old"), ttl=LONG)
        await shop.expire(key)
        shop.worked = 0
        outcomes = await asyncio.gather(*(shop.request(key, (200, "new")) for _ in range(12)))
        assert sorted(outcome.replayed for outcome in outcomes) == [False] + [True] * 11
        assert {outcome.body for outcome in outcomes} == {"new"}
        assert shop.worked == 1


async def test_those_who_do_not_wait_never_hang_beside_those_who_do(shop: Shop) -> None:
    for round_number in range(5):
        key = f"order-{round_number}"
        shop.worked = 0
        async with held(shop, key) as finish:
            patient = [asyncio.create_task(shop.request(key)) for _ in range(6)]
            await waiting(shop, 6)
            async with asyncio.timeout(5):
                hasty = await asyncio.gather(
                    *(shop.request(key, wait=AT_ONCE) for _ in range(6)), return_exceptions=True
                )
            assert [type(result) for result in hasty] == [KeyInFlight] * 6
            finish.set()
            assert [outcome.replayed for outcome in await asyncio.gather(*patient)] == [True] * 6
        assert shop.worked == 1


async def test_whoever_comes_when_the_answer_does_gets_it_or_is_in_flight(shop: Shop) -> None:
    for round_number in range(8):
        key = f"order-{round_number}"
        shop.worked = 0
        waits = [None, AT_ONCE, timedelta(milliseconds=5), LONG]
        results = await asyncio.gather(
            *(shop.request(key, wait=waits[number % 4]) for number in range(16)), return_exceptions=True
        )
        outcomes = [result for result in results if isinstance(result, Outcome)]
        others = {type(result) for result in results if not isinstance(result, Outcome)}
        assert [outcome.replayed for outcome in outcomes].count(False) == 1
        assert others <= {KeyInFlight}
        assert all(isinstance(results[number], Outcome) for number in range(16) if number % 4 in (0, 3))
        assert shop.worked == 1


@pytest.mark.parametrize("level", ISOLATION[1:])
async def test_races_at_a_higher_isolation_end_with_one_work_and_retries(
    engines: Callable[..., AsyncEngine], shop: Shop, level: str
) -> None:
    strict = Shop(engines(pool_size=12, isolation_level=level))

    async def until_answered(key: str) -> Outcome:
        while True:
            try:
                return await strict.request(key)
            except DBAPIError as error:
                if not is_retryable(error):
                    raise

    for round_number in range(4):
        outcomes = await asyncio.gather(*(until_answered(f"order-{round_number}") for _ in range(12)))
        assert sorted(outcome.replayed for outcome in outcomes) == [False] + [True] * 11
    assert len(await shop.items()) == 4
