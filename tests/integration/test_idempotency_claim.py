"""The two halves of `run`: a claim, and how it ends. And work that ends its transaction by itself."""

from __future__ import annotations

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from oncely import Answer, KeyInUse, KeyLost, KeyReused, KeyUnanswered, Outcome, Refused
from oncely.idempotency import Claim
from tests.database import both_drivers
from tests.keys import Customer, Order, Shop

pytestmark = [pytest.mark.in_schema, both_drivers]


@pytest.fixture
async def shop(engine: AsyncEngine) -> Shop:
    return await Shop.open(engine)


async def claim(shop: Shop, session: AsyncSession | AsyncConnection, key: str = "order-1") -> Claim:
    held = await shop.keys.claim(session, scope="Ada", key=key, fingerprint=b"one book")
    assert isinstance(held, Claim)
    return held


async def test_a_claim_is_settled_with_what_was_done_since(shop: Shop) -> None:
    async with shop.sessions() as session:
        held = await claim(shop, session)
        session.add(Order(item="book"))
        outcome = await held.settle(Answer(201, "made", {"Location": "/orders/1"}))
        await session.commit()
    assert outcome == Outcome(201, "made", False, {"Location": "/orders/1"})
    assert await shop.items() == ["book"]
    assert await shop.request() == Outcome(201, "made", True, {"Location": "/orders/1"})


async def test_an_answered_key_gives_its_answer_instead_of_a_claim(shop: Shop) -> None:
    await shop.request()
    async with shop.sessions() as session:
        held = await shop.keys.claim(session, scope="Ada", key="order-1", fingerprint=b"one book")
        assert held == Outcome(201, "made", replayed=True)
        with pytest.raises(KeyReused):
            await shop.keys.claim(session, scope="Ada", key="order-1", fingerprint=b"two books")


async def test_a_claim_whose_work_was_undone_is_settled_with_a_refusal(shop: Shop) -> None:
    async with shop.sessions() as session:
        ada = Customer(name="Ada")
        session.add(ada)
        held = await claim(shop, session)
        ada.name = "Eve"
        session.add(Order(item="undone"))
        await session.flush()
        await held.undo()
        await held.undo()
        assert ada.name == "Ada"
        session.add(Order(item="written after"))
        await held.settle(Answer(409, "sold out"))
        await session.commit()
    assert await shop.items() == ["written after"]
    assert await shop.request() == Outcome(409, "sold out", replayed=True)


async def test_a_claim_that_is_abandoned_leaves_nothing(shop: Shop) -> None:
    async with shop.sessions() as session:
        session.add(Order(item="before"))
        held = await claim(shop, session)
        session.add(Order(item="undone"))
        await held.abandon()
        await held.abandon()
        session.add(Order(item="after"))
        await session.commit()
    assert (await shop.items(), await shop.stored()) == (["before", "after"], [])


async def test_a_claim_is_abandoned_after_its_work_was_undone(shop: Shop) -> None:
    async with shop.sessions() as session:
        held = await claim(shop, session)
        await held.undo()
        await held.abandon(ConnectionError("the response could not be rendered"))
        await session.commit()
    assert await shop.stored() == []


async def test_a_claim_ends_once(shop: Shop) -> None:
    async with shop.sessions() as session:
        held = await claim(shop, session)
        await held.settle(Answer(201, None))
        with pytest.raises(RuntimeError, match=r"key='order-1'.* has ended"):
            await held.settle(Answer(201, None))
        with pytest.raises(RuntimeError, match="has ended"):
            await held.undo()
        await held.abandon()
        await session.commit()
    assert await shop.stored() == ["order-1"]


async def test_a_claim_is_held_on_a_connection_too(shop: Shop, engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        held = await claim(shop, connection)
        await connection.execute(text("INSERT INTO orders (item) VALUES ('undone')"))
        await held.undo()
        await held.settle(Answer(409, b""))
        abandoned = await claim(shop, connection, "order-2")
        await connection.execute(text("INSERT INTO orders (item) VALUES ('undone')"))
        await abandoned.abandon()
    assert (await shop.items(), await shop.stored()) == ([], ["order-1"])


async def test_two_claims_are_held_in_one_transaction(shop: Shop) -> None:
    async with shop.sessions() as session:
        outer = await claim(shop, session, "outer")
        inner = await claim(shop, session, "inner")
        with pytest.raises(KeyInUse):
            await claim(shop, session, "outer")
        await inner.settle(Answer(201, None))
        await outer.settle(Answer(201, None))
        await session.commit()
    assert await shop.stored() == ["inner", "outer"]


async def test_a_session_does_not_commit_a_claim_that_is_open(shop: Shop) -> None:
    async with shop.sessions() as session:
        held = await claim(shop, session)
        with pytest.raises(KeyLost) as caught:
            await session.commit()
        assert (caught.value.scope, caught.value.key) == ("Ada", "order-1")
        await held.undo()
        with pytest.raises(KeyLost):
            await session.commit()
        await held.settle(Answer(201, None))
        await session.commit()
    assert await shop.stored() == ["order-1"]


async def test_a_session_whose_block_ends_with_an_open_claim_rolls_back(shop: Shop) -> None:
    async def leave_open() -> None:
        async with shop.sessions.begin() as session:
            session.add(Order(item="book"))
            await claim(shop, session)

    with pytest.raises(KeyLost):
        await leave_open()
    assert (await shop.items(), await shop.stored()) == ([], [])


async def test_a_session_is_usable_after_an_open_claim_was_rolled_back(shop: Shop) -> None:
    async with shop.sessions() as session:
        held = await claim(shop, session)
        await session.rollback()
        session.add(Order(item="after"))
        await session.commit()
        with pytest.raises(KeyLost):
            await held.settle(Answer(201, None))
        await held.abandon()
        await session.commit()
    assert (await shop.items(), await shop.stored()) == (["after"], [])


async def test_work_that_commits_the_session_is_stopped(shop: Shop) -> None:
    async with shop.sessions() as session:
        session.add(Order(item="before"))

        async def work() -> tuple[int, None]:
            session.add(Order(item="book"))
            await session.commit()
            return 201, None

        with pytest.raises(KeyLost, match="may not end before the answer is stored in it"):
            await shop.keys.run(session, scope="Ada", key="order-1", fingerprint=b"", work=work)
        assert await shop.items() == []
        await session.commit()
    assert (await shop.items(), await shop.stored()) == (["before"], [])


async def test_work_that_commits_from_inside_a_savepoint_is_stopped(shop: Shop) -> None:
    async with shop.sessions() as session:

        async def work() -> tuple[int, None]:
            await session.begin_nested()
            session.add(Order(item="book"))
            await session.commit()
            return 201, None

        with pytest.raises(KeyLost):
            await shop.keys.run(session, scope="Ada", key="order-1", fingerprint=b"", work=work)
        await session.commit()
    assert (await shop.items(), await shop.stored()) == ([], [])


async def test_work_whose_commit_was_stopped_may_go_on_without_it(shop: Shop) -> None:
    async with shop.sessions() as session:

        async def work() -> tuple[int, None]:
            session.add(Order(item="book"))
            with pytest.raises(KeyLost):
                await session.commit()
            return 201, None

        outcome = await shop.keys.run(session, scope="Ada", key="order-1", fingerprint=b"", work=work)
        await session.commit()
    assert outcome == Outcome(201, None, replayed=False)
    assert (await shop.items(), await shop.stored()) == (["book"], ["order-1"])


@pytest.mark.parametrize("ends", ["rollback", "close", "reset"])
async def test_work_that_ends_the_sessions_transaction_stores_nothing(shop: Shop, ends: str) -> None:
    async with shop.sessions() as session:

        async def work() -> tuple[int, None]:
            session.add(Order(item="book"))
            await session.flush()
            await getattr(session, ends)()
            return 201, None

        with pytest.raises(KeyLost):
            await shop.keys.run(session, scope="Ada", key="order-1", fingerprint=b"one book", work=work)
        await session.commit()
    assert (await shop.items(), await shop.stored()) == ([], [])


async def test_work_that_deletes_its_own_row_stores_nothing(shop: Shop) -> None:
    async with shop.sessions() as session:

        async def work() -> tuple[int, None]:
            await session.execute(text("INSERT INTO orders (item) VALUES ('book')"))
            await session.execute(text("DELETE FROM idempotency_keys"))
            return 201, None

        with pytest.raises(KeyLost):
            await shop.keys.run(session, scope="Ada", key="order-1", fingerprint=b"", work=work)
        await session.commit()
    assert (await shop.items(), await shop.stored()) == ([], [])


async def test_a_claim_that_cannot_be_abandoned_says_why(shop: Shop) -> None:
    async with shop.sessions() as session:
        held = await claim(shop, session)
        pid = await session.scalar(text("SELECT pg_backend_pid()"))
        async with shop.engine.connect() as other:
            await other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
        with pytest.raises(DBAPIError):
            await held.abandon()
    assert await shop.stored() == []


@pytest.mark.parametrize("ends", ["commit", "rollback"])
async def test_work_that_ends_the_transaction_below_the_session_stores_nothing(shop: Shop, ends: str) -> None:
    async with shop.sessions() as session:

        async def work() -> tuple[int, None]:
            connection = await session.connection()
            await connection.execute(text("INSERT INTO orders (item) VALUES ('book')"))
            await getattr(connection, ends)()
            return 201, None

        with pytest.raises(KeyLost):
            await shop.keys.run(session, scope="Ada", key="order-1", fingerprint=b"one book", work=work)
    if ends == "commit":
        with pytest.raises(KeyUnanswered):
            await shop.request()
    else:
        assert (await shop.request()).replayed is False
    assert (shop.worked, await shop.items()) == (int(ends == "rollback"), ["book"])


async def test_refused_work_that_has_rolled_back_stores_nothing(shop: Shop) -> None:
    async with shop.sessions() as session:

        async def work() -> tuple[int, None]:
            await session.rollback()
            raise Refused(409, "sold out")

        with pytest.raises(KeyLost):
            await shop.keys.run(session, scope="Ada", key="order-1", fingerprint=b"", work=work)
        await session.commit()
    assert await shop.stored() == []


async def test_failed_work_that_has_rolled_back_fails_with_its_own_error(shop: Shop) -> None:
    async with shop.sessions() as session:

        async def work() -> tuple[int, None]:
            await session.rollback()
            await session.execute(text("INSERT INTO orders (item) VALUES ('written after')"))
            raise ConnectionError("away")

        with pytest.raises(ConnectionError, match="away") as caught:
            await shop.keys.run(session, scope="Ada", key="order-1", fingerprint=b"", work=work)
        assert not hasattr(caught.value, "__notes__")
        await session.commit()
    assert (await shop.items(), await shop.stored()) == (["written after"], [])


@pytest.mark.parametrize("fails", [False, True])
async def test_a_key_that_was_committed_without_an_answer_is_not_worked_on_again(
    shop: Shop, engine: AsyncEngine, fails: bool
) -> None:
    async with engine.connect() as connection:

        async def work() -> tuple[int, None]:
            await connection.execute(text("INSERT INTO orders (item) VALUES ('book')"))
            await connection.commit()
            if fails:
                raise ConnectionError
            return 201, None

        with pytest.raises(ConnectionError if fails else KeyLost):
            await shop.keys.run(connection, scope="Ada", key="order-1", fingerprint=b"one book", work=work)
        await connection.commit()
    with pytest.raises(KeyUnanswered, match="was committed without an answer") as caught:
        await shop.request()
    assert (caught.value.scope, caught.value.key) == ("Ada", "order-1")
    with pytest.raises(KeyReused):
        await shop.request(fingerprint=b"two books")
    assert (shop.worked, await shop.items()) == (0, ["book"])
    async with shop.sessions.begin() as session:
        assert await shop.keys.get(session, scope="Ada", key="order-1") is None
        assert await shop.keys.forget(session, scope="Ada", key="order-1") == 1
    assert (await shop.request()).replayed is False


async def test_the_row_of_another_transaction_is_never_taken_for_ones_own(
    shop: Shop, engine: AsyncEngine
) -> None:
    async with engine.connect() as connection:
        held = await claim(shop, connection)
        await connection.commit()
        await connection.execute(select(1))
        await held.abandon()
        with pytest.raises(RuntimeError, match="has ended"):
            await held.settle(Answer(201, None))
        await connection.commit()
    assert await shop.stored() == ["order-1"]
