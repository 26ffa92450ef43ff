"""A key does its work once, and every caller gets the same answer: on both drivers."""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import Answer, Outcome, Refused
from oncely.answer import Body
from oncely.errors import InvalidKey, KeyInUse, KeyLost, KeyReused
from tests.database import both_drivers
from tests.keys import Shop, sent

pytestmark = [pytest.mark.in_schema, both_drivers]


@pytest.fixture
async def shop(engine: AsyncEngine) -> Shop:
    return await Shop.open(engine)


async def test_a_request_that_arrives_twice_does_its_work_once(shop: Shop) -> None:
    first = await shop.request(answer=(201, '{"id": 1}'))
    again = await shop.request(answer=(500, "not asked"))
    assert first == Outcome(201, '{"id": 1}', replayed=False)
    assert again == Outcome(201, '{"id": 1}', replayed=True)
    assert (shop.worked, await shop.items()) == (1, ["book"])


async def test_the_answer_is_replayed_in_the_same_transaction_too(shop: Shop) -> None:
    async with shop.sessions.begin() as session:
        outcomes = [await shop.order(session), await shop.order(session)]
    assert [outcome.replayed for outcome in outcomes] == [False, True]
    assert await shop.items() == ["book"]


async def test_many_keys_are_used_in_one_transaction(shop: Shop) -> None:
    async with shop.sessions.begin() as session:
        for number in range(30):
            await shop.order(session, f"order-{number}")
    assert len(await shop.items()) == len(await shop.stored()) == 30


async def test_work_is_done_under_a_key_inside_the_work_of_another(shop: Shop) -> None:
    async with shop.sessions.begin() as session:

        async def pay() -> tuple[int, str]:
            inner = await shop.order(session, "inner", raising=Refused(402, "no money"))
            return 201, f"ordered, payment: {inner.status}"

        outcome = await shop.keys.run(session, scope="Ada", key="outer", fingerprint=b"", work=pay)
    assert outcome == Outcome(201, "ordered, payment: 402", replayed=False)
    assert await shop.stored() == ["inner", "outer"]


async def test_an_error_leaves_no_key_and_a_retry_works_again(shop: Shop) -> None:
    with pytest.raises(ConnectionError, match="payment service is away"):
        await shop.request(raising=ConnectionError("payment service is away"))
    assert (await shop.stored(), await shop.items()) == ([], [])
    assert await shop.request() == Outcome(201, "made", replayed=False)
    assert shop.worked == 2


async def test_an_error_that_is_caught_leaves_neither_key_nor_work_but_the_rest(shop: Shop) -> None:
    async with shop.sessions.begin() as session:
        await session.execute(text("INSERT INTO orders (item) VALUES ('before')"))
        with pytest.raises(ConnectionError):
            await shop.order(session, raising=ConnectionError())
        await session.execute(text("INSERT INTO orders (item) VALUES ('after')"))
    assert (await shop.stored(), await shop.items()) == ([], ["before", "after"])


class Stop(BaseException):
    """What is no Exception, like the groups of a task group that was interrupted."""


async def test_what_is_raised_and_no_exception_leaves_no_key_either(shop: Shop) -> None:
    async with shop.sessions.begin() as session:
        with pytest.raises(Stop):
            await shop.order(session, raising=Stop())
        with pytest.raises(BaseExceptionGroup):
            await shop.order(session, raising=BaseExceptionGroup("two", [Stop(), ValueError()]))
    assert (await shop.stored(), await shop.items()) == ([], [])


async def test_work_whose_coroutine_is_closed_leaves_no_key(shop: Shop) -> None:
    async with shop.sessions() as session:

        async def closed() -> None:
            raise GeneratorExit

        with pytest.raises(GeneratorExit):
            await shop.order(session, meanwhile=closed)
        with pytest.raises(KeyLost):
            await session.commit()
    assert (await shop.stored(), await shop.items()) == ([], [])


async def test_a_key_is_free_again_in_the_transaction_in_which_its_work_failed(shop: Shop) -> None:
    async with shop.sessions.begin() as session:
        with pytest.raises(ConnectionError):
            await shop.order(session, raising=ConnectionError())
        assert await shop.order(session) == Outcome(201, "made", replayed=False)
    assert (await shop.stored(), await shop.items()) == (["order-1"], ["book"])


async def test_a_refusal_undoes_the_work_and_is_stored(shop: Shop) -> None:
    refusal = Refused(409, b"sold out", {"Content-Type": "text/plain"})
    async with shop.sessions.begin() as session:
        await session.execute(text("INSERT INTO orders (item) VALUES ('before')"))
        first = await shop.order(session, raising=refusal)
    again = await shop.request()
    headers = (("Content-Type", "text/plain"),)
    assert first == Outcome(409, b"sold out", False, headers)
    assert again == Outcome(409, b"sold out", True, headers)
    assert (shop.worked, await shop.items()) == (1, ["before"])


async def test_a_rollback_erases_the_key_with_the_work(shop: Shop) -> None:
    async with shop.sessions() as session:
        await shop.order(session)
        await session.rollback()
    assert (await shop.stored(), await shop.items()) == ([], [])
    assert (await shop.request()).replayed is False


async def test_a_savepoint_of_the_caller_that_is_rolled_back_erases_both(shop: Shop) -> None:
    async with shop.sessions.begin() as session:
        savepoint = await session.begin_nested()
        await shop.order(session)
        await savepoint.rollback()
        assert (await shop.order(session)).replayed is False
    assert (shop.worked, await shop.items()) == (2, ["book"])


BODIES: list[Body] = [
    None,
    "",
    b"",
    "null",
    "0",
    "false",
    "[]",
    "{}",
    b"\x00\xff" * 3,
    "naïve 🛒\n",
    "a" * 100_000,
]


@pytest.mark.parametrize("body", BODIES, ids=[f"{body!r:.12}" for body in BODIES])
async def test_a_body_comes_back_as_it_was_given(shop: Shop, body: Body) -> None:
    first = await shop.request(answer=(204, body))
    again = await shop.request(answer=(204, "other"))
    assert (first, again) == (Outcome(204, body, False), Outcome(204, body, True))
    assert type(again.body) is type(body)
    assert shop.worked == 1


async def test_headers_come_back_in_their_order_and_number(shop: Shop) -> None:
    headers = (
        ("Link", "</a>; rel=prev"),
        ("ETag", '"x"'),
        ("Link", "</b>; rel=next"),
        ("X-Naïve", "🛒 \\u0000"),
    )
    await shop.request(answer=Answer(200, None, headers))
    assert (await shop.request()).headers == headers


async def test_two_scopes_use_one_key_each_for_itself(shop: Shop) -> None:
    pairs = [
        ("Ada", "k"),
        ("Bob", "k"),
        ("a:b", "c"),
        ("a", "b:c"),
        ("", "k"),
        ("a", " k"),
        ("a", "k"),
        ("a", "k "),
    ]
    for number, (scope, key) in enumerate(pairs):
        await shop.request(key, (200, str(number)), scope=scope)
    replays = [await shop.request(key, scope=scope) for scope, key in pairs]
    assert replays == [Outcome(200, str(number), True) for number in range(len(pairs))]


LONG = "x" * 1000
STORABLE = [
    "k",
    "x" * 255,
    LONG,
    "🛒" * 250,
    "ключ",
    unicodedata.normalize("NFC", "é"),
    unicodedata.normalize("NFD", "é"),
]


async def test_keys_of_any_text_up_to_1000_bytes_are_kept_apart(shop: Shop) -> None:
    for key in STORABLE:
        assert (await shop.request(key, (200, key), scope=LONG)).replayed is False
    assert [(await shop.request(key, scope=LONG)).body for key in STORABLE] == STORABLE


TOO_ODD = ["x" * 1001, "x" * 2700, "x" * 10_000, "🛒" * 251, "a\x00b", "a\ud800b"]


@pytest.mark.parametrize("odd", TOO_ODD, ids=[f"{odd[:5]!a} {len(odd)}" for odd in TOO_ODD])
async def test_a_key_or_scope_that_cannot_be_stored_is_refused_before_any_sql(shop: Shop, odd: str) -> None:
    async with shop.sessions.begin() as session:
        with sent(shop.engine) as statements:
            with pytest.raises(InvalidKey, match="key"):
                await shop.order(session, odd)
            with pytest.raises(InvalidKey, match="scope"):
                await shop.order(session, scope=odd)
        assert statements == []
        await shop.order(session)
    assert (shop.worked, await shop.items()) == (1, ["book"])


async def test_an_empty_key_is_refused_for_it_would_be_everybodys(shop: Shop) -> None:
    with pytest.raises(InvalidKey, match="key is empty"):
        await shop.request("")


async def test_another_request_under_the_same_key_is_refused(shop: Shop) -> None:
    await shop.request(fingerprint=b"one book")
    async with shop.sessions.begin() as session:
        with pytest.raises(KeyReused) as caught:
            await shop.order(session, fingerprint=b"two books")
        assert (caught.value.scope, caught.value.key) == ("Ada", "order-1")
        await session.execute(text("INSERT INTO orders (item) VALUES ('after')"))
    assert (shop.worked, await shop.items()) == (1, ["book", "after"])


@pytest.mark.parametrize("fingerprint", [b"one book", b"two books"])
@pytest.mark.parametrize("wait", [None, timedelta(0), timedelta(seconds=5)])
async def test_the_key_is_in_use_inside_its_own_work(
    shop: Shop, fingerprint: bytes, wait: timedelta | None
) -> None:
    async with shop.sessions.begin() as session:

        async def again() -> None:
            for _ in range(2):
                with pytest.raises(KeyInUse):
                    await shop.order(session, fingerprint=fingerprint, wait=wait)
            async with session.begin_nested():
                with pytest.raises(KeyInUse):
                    await shop.order(session, fingerprint=fingerprint, wait=wait)

        await shop.order(session, meanwhile=again)
    assert (shop.worked, await shop.items()) == (1, ["book"])


async def test_the_key_is_in_use_when_it_was_claimed_under_a_savepoint(shop: Shop) -> None:
    async with shop.sessions.begin() as session, session.begin_nested():

        async def again() -> None:
            with pytest.raises(KeyInUse):
                await shop.order(session)

        await shop.order(session, meanwhile=again)


async def test_a_key_that_was_in_use_is_free_after_a_rollback(shop: Shop) -> None:
    with pytest.raises(KeyInUse):
        async with shop.sessions.begin() as session:
            await shop.order(session, meanwhile=lambda: shop.order(session))
    assert await shop.request() == Outcome(201, "made", replayed=False)


async def test_a_key_whose_time_is_over_is_free(shop: Shop) -> None:
    await shop.request(answer=Answer(201, b"old", {"Link": "old"}), ttl=timedelta(hours=1))
    assert (await shop.request()).body == b"old"
    await shop.expire()
    assert await shop.request(answer=(204, None), fingerprint=b"other") == Outcome(204, None, replayed=False)
    assert await shop.request(fingerprint=b"other") == Outcome(204, None, replayed=True)
    assert (shop.worked, await shop.items()) == (2, ["book", "book"])


async def test_a_key_used_again_without_a_ttl_never_expires(shop: Shop) -> None:
    await shop.request(ttl=timedelta(hours=1))
    await shop.expire()
    await shop.request()
    table = shop.keys.table
    async with shop.sessions() as session:
        assert (await session.execute(select(table.c.expires_at))).all() == [(None,)]


async def test_an_expired_key_whose_work_fails_is_free(shop: Shop) -> None:
    await shop.request(ttl=timedelta(hours=1))
    await shop.expire()
    async with shop.sessions.begin() as session:
        with pytest.raises(ConnectionError):
            await shop.order(session, raising=ConnectionError())
    assert await shop.stored() == []


async def test_an_expired_key_whose_transaction_fails_is_as_it_was(shop: Shop) -> None:
    await shop.request(ttl=timedelta(hours=1))
    await shop.expire()
    async with shop.sessions() as session:
        await shop.order(session)
        await session.rollback()
    assert await shop.stored() == ["order-1"]
    assert (await shop.request()).replayed is False


async def test_the_ttl_counts_from_the_answer(shop: Shop) -> None:
    await shop.request(ttl=timedelta(hours=1), meanwhile=lambda: asyncio.sleep(0.05))
    table = shop.keys.table
    async with shop.sessions() as session:
        kept = await session.scalar(select(table.c.expires_at - table.c.created_at))
    assert kept is not None
    assert kept >= timedelta(hours=1, seconds=0.05)


async def test_work_that_takes_longer_than_its_ttl_is_still_in_use_inside(shop: Shop) -> None:
    async with shop.sessions.begin() as session:

        async def again() -> None:
            await asyncio.sleep(0.01)
            with pytest.raises(KeyInUse):
                await shop.order(session)

        await shop.order(session, ttl=timedelta(milliseconds=1), meanwhile=again)
    assert shop.worked == 1


async def test_get_reads_an_answer_and_nothing_else(shop: Shop) -> None:
    answer = Answer(201, b"made", [("Link", "a"), ("Link", "b")])

    async def get(key: str = "order-1") -> Outcome | None:
        async with shop.sessions() as session:
            return await shop.keys.get(session, scope="Ada", key=key)

    assert await get() is None
    async with shop.sessions.begin() as session:

        async def inside() -> None:
            assert await shop.keys.get(session, scope="Ada", key="order-1") is None

        await shop.order(session, answer=answer, ttl=timedelta(hours=1), meanwhile=inside)
        assert await get() is None
    assert await get() == Outcome(201, b"made", True, answer.headers)
    assert await get("order-2") is None
    await shop.expire()
    assert await get() is None


async def test_forget_frees_a_key_when_it_is_committed(shop: Shop) -> None:
    await shop.request("one")
    await shop.request("two")
    await shop.request("one", scope="Bob")
    async with shop.sessions.begin() as session:
        assert await shop.keys.forget(session, scope="Ada", key="none") == 0
        assert await shop.keys.forget(session, scope="Ada", key="one") == 1
    assert await shop.stored() == ["one", "two"]
    assert (await shop.request("one")).replayed is False


async def test_forget_frees_a_whole_scope(shop: Shop) -> None:
    for scope, key in [("Ada", "one"), ("Ada", "two"), ("Bob", "three")]:
        await shop.request(key, scope=scope)
    async with shop.sessions.begin() as session:
        assert await shop.keys.forget(session, scope="Ada") == 2
        await session.rollback()
    assert await shop.stored() == ["one", "three", "two"]
    async with shop.sessions.begin() as session:
        assert await shop.keys.forget(session, scope="Ada") == 2
    assert await shop.stored() == ["three"]


async def test_work_may_forget_its_scope_but_not_its_own_key(shop: Shop) -> None:
    await shop.request("before")
    async with shop.sessions.begin() as session:

        async def forget() -> None:
            assert await shop.keys.forget(session, scope="Ada") == 1
            assert await shop.keys.forget(session, scope="Ada", key="erase me") == 0

        await shop.order(session, "erase me", meanwhile=forget)
    assert await shop.stored() == ["erase me"]
    assert (await shop.request("erase me")).replayed is True


ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"fingerprint": "one book"}, TypeError, "fingerprint must be bytes, not str"),
    ({"fingerprint": None}, TypeError, "fingerprint must be bytes, not NoneType"),
    ({"ttl": 60}, TypeError, "ttl must be a timedelta, not int"),
    ({"ttl": timedelta(0)}, ValueError, "ttl must be above zero"),
    ({"ttl": timedelta(seconds=-1)}, ValueError, "ttl must be above zero"),
    ({"ttl": timedelta.max}, ValueError, "ttl must be above zero and at most 365,000 days"),
    ({"wait": 1}, TypeError, "wait must be a timedelta, not int"),
    ({"wait": timedelta(seconds=-1)}, ValueError, "wait is below zero"),
    ({"work": None}, TypeError, "work must be an async callable, not NoneType"),
    ({"key": 7}, InvalidKey, "key must be a str, not int"),
    ({"key": None}, InvalidKey, "key must be a str, not NoneType"),
    ({"scope": b"Ada"}, InvalidKey, "scope must be a str, not bytes"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), ARGUMENTS, ids=lambda value: str(value)[:40])
async def test_a_wrong_argument_is_refused_before_any_sql(
    shop: Shop, arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    async with shop.sessions.begin() as session:
        right: dict[str, Any] = {
            "scope": "Ada",
            "key": "order-1",
            "fingerprint": b"",
            "work": shop.work(session),
        }
        with sent(shop.engine) as statements, pytest.raises(kind, match=message):
            await shop.keys.run(session, **(right | arguments))
        assert (statements, shop.worked) == ([], 0)


ANSWERS: list[tuple[object, type[Exception], str]] = [
    (None, TypeError, r"work must return \(status, body\) or an Answer, not NoneType"),
    ((201,), TypeError, r"work must return \(status, body\) or an Answer, not tuple"),
    ((201, "made", ()), TypeError, r"work must return \(status, body\) or an Answer, not tuple"),
    ([201, "made"], TypeError, r"work must return \(status, body\) or an Answer, not list"),
    ("ok", TypeError, r"work must return \(status, body\) or an Answer, not str"),
    (("201", "made"), TypeError, "status must be an int, not str"),
    ((201, {"id": 1}), TypeError, "body must be str, bytes or None, not dict"),
    ((201, "a\x00b"), ValueError, "NUL"),
    ((2**31, ""), ValueError, "32-bit"),
]


@pytest.mark.parametrize(("answer", "kind", "message"), ANSWERS, ids=lambda value: ascii(value)[:20])
async def test_an_answer_that_is_none_undoes_the_work(
    shop: Shop, answer: Any, kind: type[Exception], message: str
) -> None:
    async with shop.sessions.begin() as session:
        with pytest.raises(kind, match=message):
            await shop.order(session, answer=answer)
    assert (await shop.stored(), await shop.items()) == ([], [])


async def test_a_refusal_that_cannot_be_stored_undoes_the_work(shop: Shop) -> None:
    async with shop.sessions.begin() as session:
        with pytest.raises(TypeError, match="body must be str, bytes or None, not dict"):
            await shop.order(session, raising=Refused(409, {"error": "sold out"}))  # type: ignore[arg-type]
    assert (await shop.stored(), await shop.items()) == ([], [])


async def test_work_that_is_not_async_is_refused_and_leaves_nothing(shop: Shop) -> None:
    work: Callable[[], Any] = lambda: (201, "made")  # noqa: E731
    async with shop.sessions.begin() as session:
        with pytest.raises(TypeError, match="work must be an async callable; it returned tuple at once"):
            await shop.keys.run(session, scope="Ada", key="k", fingerprint=b"", work=work)
    assert await shop.stored() == []


async def test_other_things_than_async_sessions_are_refused(shop: Shop) -> None:
    async with shop.sessions() as session:
        for other in (session.sync_session, shop.sessions, shop.engine, None):
            with pytest.raises(
                TypeError, match="session must be an AsyncSession, an async_scoped_session or"
            ):
                await shop.order(other)  # type: ignore[arg-type]
