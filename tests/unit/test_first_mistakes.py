"""What a newcomer gives by mistake is refused where it is given, with a sentence that says what to give."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import redis
import redis.asyncio
from sqlalchemy import MetaData, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import scoped_session, sessionmaker

from oncely import Effects, Event, IdempotencyKeys, Inbox, Outbox, Relay, Retention, Worker
from oncely.arguments import check_takes
from oncely.extras import needs
from oncely.fastapi import idempotent_route
from oncely.streams import StreamConsumer, stream_publisher
from oncely.telemetry import Gauges

METADATA = MetaData()
SESSIONS = async_sessionmaker(create_async_engine("postgresql+asyncpg://nowhere/shop"))
OUTBOX, KEYS, INBOX = Outbox(METADATA), IdempotencyKeys(METADATA), Inbox(METADATA)
REDIS = redis.asyncio.Redis()


async def publish(events: Sequence[Event]) -> None: ...


async def handle(session: AsyncSession, event: Event) -> None: ...


async def handle_event(event: Event) -> None: ...


def consumer(**options: Any) -> StreamConsumer:
    return StreamConsumer(REDIS, stream="shop", **options)


SESSIONMAKER_TAKERS: dict[str, Callable[[Any], object]] = {
    "Relay": lambda given: Relay(OUTBOX, given, publish),
    "Inbox.handler": lambda given: INBOX.handler(given, handle, consumer="billing"),
    "Retention": lambda given: Retention(given, {OUTBOX: timedelta(days=1)}),
    "Gauges": lambda given: Gauges(print, given, OUTBOX),
    "idempotent_route": lambda given: idempotent_route(KEYS, given, scope=str),
    "Effects": lambda given: Effects(MetaData(), sessionmaker=given, stale_after=timedelta(seconds=30)),
}
NO_SESSIONMAKERS = {
    "a session": AsyncSession(),
    "a plain sessionmaker": sessionmaker(create_engine("postgresql+psycopg://nowhere/shop")),
    "a plain scoped session": scoped_session(sessionmaker()),
    "a URL": "postgresql+asyncpg://nowhere/shop",
}


@pytest.mark.parametrize("given", NO_SESSIONMAKERS.values(), ids=list(NO_SESSIONMAKERS))
@pytest.mark.parametrize("take", SESSIONMAKER_TAKERS.values(), ids=list(SESSIONMAKER_TAKERS))
def test_what_makes_no_async_sessions_is_refused(take: Callable[[Any], object], given: object) -> None:
    with pytest.raises(TypeError) as raised:
        take(given)
    assert str(raised.value) == (
        "sessionmaker must make AsyncSessions, as async_sessionmaker(engine) does, "
        f"and is {type(given).__name__}"
    )


@pytest.mark.parametrize("take", SESSIONMAKER_TAKERS.values(), ids=list(SESSIONMAKER_TAKERS))
def test_a_sessionmaker_whose_class_is_async_is_taken(take: Callable[[Any], object]) -> None:
    take(sessionmaker(class_=AsyncSession))  # SQLAlchemy 1.4's way


DURATION_TAKERS: dict[str, Callable[[Any], object]] = {
    "lease": lambda given: Relay(OUTBOX, SESSIONS, publish, lease=given),
    "interval": lambda given: Retention(SESSIONS, {OUTBOX: timedelta(days=1)}, interval=given),
    "the age for outbox": lambda given: Retention(SESSIONS, {OUTBOX: given}),
    "timeout": lambda given: Gauges(print, SESSIONS, OUTBOX, timeout=given),
    "handler_timeout": lambda given: consumer(handler_timeout=given),
    "grace": lambda given: Worker(Relay(OUTBOX, SESSIONS, publish), grace=given),
}


@pytest.mark.parametrize(("name", "take"), DURATION_TAKERS.items(), ids=list(DURATION_TAKERS))
def test_a_number_is_no_duration(name: str, take: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be a timedelta, not int$"):
        take(30)


REDIS_TAKERS: dict[str, Callable[[Any], object]] = {
    "stream_publisher": lambda given: stream_publisher(given, "shop"),
    "StreamConsumer": lambda given: StreamConsumer(given, stream="shop"),
}


@pytest.mark.parametrize("take", REDIS_TAKERS.values(), ids=list(REDIS_TAKERS))
@pytest.mark.parametrize(
    ("given", "named"), [(redis.Redis(), "redis.client.Redis"), ("redis://localhost", "builtins.str")]
)
def test_a_redis_that_is_not_awaited_is_refused(
    take: Callable[[Any], object], given: object, named: str
) -> None:
    with pytest.raises(TypeError, match=f"^redis must be a client of redis.asyncio, .* not {named}$"):
        take(given)


def test_a_handler_with_a_session_is_refused_and_the_inbox_named() -> None:
    with pytest.raises(TypeError) as raised:
        consumer().subscribe("order.paid", handle)  # type: ignore[arg-type]  # that is the mistake
    assert str(raised.value) == (
        "a handler is called with (event): missing a required argument: 'event'; "
        "inbox.handler(sessionmaker, handle, consumer=…) makes a handler of handle(session, event)"
    )


def test_what_shows_no_signature_is_taken_at_its_word() -> None:
    check_takes(max, "a handler", "event")


def test_an_extra_that_is_not_installed_is_named() -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        needs("redis", "asyncio", "absent_of_oncely")
    assert str(raised.value) == "No module named 'absent_of_oncely': pip install 'oncely[redis]'"
    assert raised.value.name == "absent_of_oncely"


def test_a_handler_of_the_inbox_without_a_session_is_refused() -> None:
    expected = "handle is called with (session, event): too many positional arguments"
    with pytest.raises(TypeError, match=f"^{re.escape(expected)}$"):
        INBOX.handler(SESSIONS, handle_event, consumer="billing")  # type: ignore[arg-type]  # the mistake


def test_a_publisher_that_is_not_async_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^publish must be an async function, not the plain "):
        Relay(OUTBOX, SESSIONS, lambda events: None)  # type: ignore[arg-type,return-value]  # the mistake


def test_what_is_closed_is_given_without_parentheses() -> None:
    with pytest.raises(TypeError, match=r"such as engine\.dispose \(without parentheses\), not NoneType$"):
        Worker(Relay(OUTBOX, SESSIONS, publish), close=[None])  # type: ignore[list-item]  # the mistake
