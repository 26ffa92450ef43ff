"""What operators give is checked before any SQL: an error with a type and a sentence, not a driver's.

The engine of these tests leads nowhere, so whatever reached it would fail in another way.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import pytest
from redis.asyncio import Redis
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from oncely import Effects, IdempotencyKeys, Inbox, InvalidKey, Outbox
from oncely.streams import DeadLetters
from oncely.webhooks import Keyring, Webhooks
from tests.webhooks import KEY

Given: TypeAlias = Any  # of any type: that is what is tested

NAIVE = datetime(2026, 1, 31, 12)  # noqa: DTZ001  that is what is tested
SOME = uuid.UUID(int=7)


@pytest.fixture
async def session() -> AsyncIterator[AsyncSession]:
    engine = create_async_engine("postgresql+asyncpg://nobody@127.0.0.1:1/nowhere")
    async with AsyncSession(engine) as session:
        yield session
    await engine.dispose()


Refusal: TypeAlias = tuple[dict[str, Any], type[Exception], str]

IDS: list[Refusal] = [
    ({"ids": ["x"]}, TypeError, "each of ids must be a UUID, not str"),
    ({"ids": [SOME, None]}, TypeError, "each of ids must be a UUID, not NoneType"),
    ({"ids": ""}, TypeError, "ids must be an iterable of UUIDs, not str"),
    ({"ids": str(SOME)}, TypeError, "ids must be an iterable of UUIDs, not str"),
    ({"ids": SOME}, TypeError, "ids must be an iterable of UUIDs, not UUID"),
]
LIMITS: list[Refusal] = [
    ({"limit": 0}, ValueError, "limit must be 1 or more, not 0"),
    ({"limit": 2**40}, ValueError, "limit must be 2,147,483,647 or less, not 1,099,511,627,776"),
    ({"limit": 10.0}, TypeError, "limit must be an int, not float"),
    ({"limit": True}, TypeError, "limit must be an int, not bool"),
    ({"limit": None}, TypeError, "limit must be an int, not NoneType"),
]
FILTERS: list[Refusal] = [
    ({"topic": "\0"}, InvalidKey, "topic: a NUL character cannot be stored"),
    ({"topic": 7}, InvalidKey, "topic must be a str, not int"),
    ({"error": ValueError}, InvalidKey, "error must be a str, not type"),
    ({"since": NAIVE}, ValueError, "since is a time without a time zone"),
    ({"until": "yesterday"}, TypeError, "until must be a datetime, not str"),
]
STREAM_IDS: list[Refusal] = [
    ({"ids": "1-1"}, TypeError, "ids must be an iterable of ids, not str"),
    ({"ids": [SOME]}, TypeError, "a dead letter's id must be a str, not UUID"),
    ({"ids": ["x"]}, ValueError, "'x' is no id of a dead letter; one looks like 1700000000000-0"),
    ({"ids": ["-"]}, ValueError, "'-' is no id of a dead letter"),
]
WEBHOOK_FILTERS: list[Refusal] = [
    ({"origin": "\0"}, InvalidKey, "origin: a NUL character cannot be stored"),
    ({"caller": 7}, InvalidKey, "caller must be a str, not int"),
]


@pytest.mark.parametrize("name", ["dead", "dead_ids", "replay", "discard"])
@pytest.mark.parametrize(("given", "type_", "sentence"), IDS + LIMITS + FILTERS)
async def test_a_choice_of_dead_events_is_checked(
    session: AsyncSession, name: str, given: Given, type_: type[Exception], sentence: str
) -> None:
    await _is_refused(lambda: getattr(Outbox(MetaData()), name)(session, **given), type_, sentence)


@pytest.mark.parametrize("name", ["list", "ids", "replay", "discard"])
@pytest.mark.parametrize(("given", "type_", "sentence"), STREAM_IDS + LIMITS + FILTERS)
async def test_a_choice_of_a_streams_dead_letters_is_checked(
    name: str, given: Given, type_: type[Exception], sentence: str
) -> None:
    async with Redis(port=1) as nowhere:
        letters = DeadLetters(nowhere, stream="shop")
        await _is_refused(lambda: getattr(letters, name)(**given), type_, sentence)


@pytest.mark.parametrize("name", ["list", "dead", "retry", "release", "discard"])
@pytest.mark.parametrize(("given", "type_", "sentence"), IDS + LIMITS[1:] + WEBHOOK_FILTERS)
async def test_a_choice_of_webhooks_is_checked(
    session: AsyncSession, name: str, given: Given, type_: type[Exception], sentence: str
) -> None:
    webhooks = Webhooks(MetaData(), keyring=Keyring({"one": KEY}, write="one"))
    await _is_refused(lambda: getattr(webhooks, name)(session, **given), type_, sentence)


@pytest.mark.parametrize(
    ("given", "type_", "sentence"),
    [
        ({"type": "\0"}, InvalidKey, "type: a NUL character cannot be stored"),
        ({"error": 410}, InvalidKey, "error must be a str, not int"),
        ({"since": NAIVE}, ValueError, "since is a time without a time zone"),
        ({"states": ["absent"]}, ValueError, "'absent' is not a valid State"),
    ],
)
async def test_a_choice_of_dead_webhooks_is_checked(
    session: AsyncSession, given: Given, type_: type[Exception], sentence: str
) -> None:
    webhooks = Webhooks(MetaData(), keyring=Keyring({"one": KEY}, write="one"))
    await _is_refused(lambda: webhooks.dead(session, **given), type_, sentence)


@pytest.mark.parametrize("given", ["text", "", None, 7, b"1" * 16])
async def test_one_event_is_named_by_its_uuid(session: AsyncSession, given: Given) -> None:
    sentence = f"must be a UUID, not {type(given).__name__}"

    async def work() -> None: ...

    await _is_refused(lambda: Outbox(MetaData()).cancel(session, given), TypeError, f"event_id {sentence}")
    handling = Inbox(MetaData())
    await _is_refused(
        lambda: handling.run(session, given, work, consumer="billing"), TypeError, f"event {sentence}"
    )


@pytest.mark.parametrize(
    ("given", "type_", "sentence"),
    [
        (0, ValueError, "at_most must be 1 or more, not 0"),
        (2**70, ValueError, "at_most must be 2,147,483,647 or less, not 1,180,591,620,717,411,303,424"),
        (1.5, TypeError, "at_most must be an int, not float"),
        (True, TypeError, "at_most must be an int, not bool"),
    ],
)
async def test_how_far_to_count_is_checked_everywhere(
    session: AsyncSession, given: Given, type_: type[Exception], sentence: str
) -> None:
    metadata, week = MetaData(), timedelta(days=7)
    sessions = async_sessionmaker(session.bind)
    effects = Effects(metadata, stale_after=week, sessionmaker=sessions)
    webhooks = Webhooks(metadata, keyring=Keyring({"one": KEY}, write="one"))
    for room in (Outbox(metadata), IdempotencyKeys(metadata), Inbox(metadata)):
        await _is_refused(lambda at=room: at.stats(session, at_most=given), type_, sentence)  # type: ignore[misc]
        await _is_refused(
            lambda at=room: at.prunable(session, older_than=week, at_most=given),  # type: ignore[misc]
            type_,
            sentence,
        )
    await _is_refused(lambda: webhooks.prunable(session, at_most=given), type_, sentence)
    await _is_refused(lambda: effects.stats(at_most=given), type_, sentence)
    await _is_refused(lambda: effects.purgeable(week, at_most=given), type_, sentence)


@pytest.mark.parametrize(
    ("given", "type_", "sentence"),
    [
        ({"older_than": 7}, TypeError, "older_than must be a datetime, not int"),
        ({"older_than": NAIVE}, ValueError, "older_than is a time without a time zone"),
        ({"older_than": timedelta(-1)}, ValueError, "older_than is below zero"),
        ({"older_than": timedelta(1), "limit": 1.0}, TypeError, "limit must be an int, not float"),
        ({"older_than": timedelta(1), "limit": True}, TypeError, "limit must be an int, not bool"),
        ({"older_than": timedelta(1), "limit": -1}, ValueError, "limit must be 0 or more, not -1"),
        ({"older_than": timedelta(1), "limit": 2**31}, ValueError, "limit must be 2,147,483,647 or less"),
    ],
)
async def test_what_is_to_be_pruned_is_checked(
    session: AsyncSession, given: Given, type_: type[Exception], sentence: str
) -> None:
    metadata = MetaData()
    webhooks = Webhooks(metadata, keyring=Keyring({"one": KEY}, write="one"))
    for room in (Outbox(metadata), IdempotencyKeys(metadata), Inbox(metadata), webhooks):
        await _is_refused(lambda at=room: at.prune(session, **given), type_, sentence)  # type: ignore[misc]


@pytest.mark.parametrize("given", [1.0, True, "1"])
async def test_a_number_of_records_is_an_int(session: AsyncSession, given: Given) -> None:
    sentence = f"must be an int, not {type(given).__name__}"
    sessions = async_sessionmaker(session.bind)
    effects = Effects(MetaData(), stale_after=timedelta(1), sessionmaker=sessions)
    webhooks = Webhooks(MetaData(), keyring=Keyring({"one": KEY}, write="one"))
    outbox = Outbox(MetaData())
    refused: list[tuple[str, Callable[[], Awaitable[object]]]] = [
        ("limit", lambda: effects.records(limit=given)),
        ("limit", lambda: effects.purge(timedelta(1), limit=given)),
        ("limit", lambda: webhooks.reseal(session, limit=given)),
        ("origins", lambda: webhooks.stats(session, origins=given)),
        ("batch", lambda: outbox.relay_once(sessions, _publish, batch=given)),
    ]
    for name, call in refused:
        await _is_refused(call, TypeError, f"{name} {sentence}")


async def _publish(events: object) -> None: ...


async def _is_refused(call: Callable[[], Awaitable[object]], type_: type[Exception], sentence: str) -> None:
    with pytest.raises(type_) as refused:
        await call()
    assert type(refused.value) is type_
    assert str(refused.value).startswith(sentence)
