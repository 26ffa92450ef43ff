"""Settings of a wrong type are refused where they are given, not at the first failure in production."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from oncely import Event, Inbox, Outbox, Relay, Retention
from oncely.streams import StreamConsumer
from oncely.telemetry import Gauges
from oncely.testing import RecordingObserver
from oncely.webhooks import Keyring, StandardWebhooks, Webhooks, WebhookSender, WebhookWorker
from oncely.worker import Worker

engine = create_async_engine("postgresql+asyncpg://nobody@nowhere/nothing")
sessions = async_sessionmaker(engine)
outbox = Outbox(MetaData())


async def nowhere(events: Sequence[Event]) -> None: ...


def relay(**settings: Any) -> Relay:
    made: dict[str, Any] = {"outbox": outbox, "sessionmaker": sessions, "publish": nowhere}
    return Relay(**made | settings)


def retention(sessionmaker: Any = sessions, **settings: Any) -> Retention:
    return Retention(sessionmaker, settings.pop("keep", {outbox: timedelta(days=1)}), **settings)


def gauges(sessionmaker: Any = sessions, **settings: Any) -> Gauges:
    return Gauges(RecordingObserver(), sessionmaker, outbox, **settings)


def consumer(**settings: Any) -> StreamConsumer:
    return StreamConsumer(Redis(), stream="s", **settings)


def webhook_worker(sessionmaker: Any = sessions, **settings: Any) -> WebhookWorker:
    webhooks = Webhooks(MetaData(), keyring=Keyring({"k": bytes(range(32))}, write="k"))
    sender = WebhookSender(StandardWebhooks("whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="))
    return WebhookWorker(webhooks, sessionmaker, sender=sender, **settings)


DURATIONS: list[tuple[Callable[..., object], str]] = [
    *((relay, name) for name in ("lease", "publish_timeout", "poll_interval", "database_timeout", "grace")),
    *((retention, name) for name in ("interval", "database_timeout", "grace")),
    *((gauges, name) for name in ("interval", "timeout", "grace")),
    *((consumer, name) for name in ("grace", "handler_timeout")),
    *((webhook_worker, name) for name in ("lease", "poll_interval", "database_timeout", "grace")),
    (lambda **settings: Worker(relay(), **settings), "grace"),
]


@pytest.mark.parametrize(("make", "name"), DURATIONS)
def test_a_duration_is_a_timedelta_above_zero(make: Callable[..., object], name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be a timedelta, not int$"):
        make(**{name: 30})
    with pytest.raises(ValueError, match=f"^{name} must be positive, not 0:00:00$"):
        make(**{name: timedelta(0)})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (relay, "retry"),
        (relay, "outage"),
        (retention, "outage"),
        (gauges, "outage"),
        (consumer, "outage"),
        (webhook_worker, "retry"),
        (webhook_worker, "outage"),
    ],
)
def test_a_backoff_is_a_backoff(make: Callable[..., object], name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be a Backoff, not int$"):
        make(**{name: 5})


@pytest.mark.parametrize("make", [relay, retention, gauges, webhook_worker])
@pytest.mark.parametrize("wrong", [engine, AsyncSession(engine), sessionmaker(), None])
def test_a_sessionmaker_makes_async_sessions(make: Callable[..., object], wrong: object) -> None:
    with pytest.raises(TypeError, match=r"^sessionmaker must make AsyncSessions, as async_sessionmaker"):
        make(sessionmaker=wrong)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outbox": None}, "outbox must be an Outbox, not NoneType"),
        ({"publish": None}, "publish must be an async function, not None"),
        ({"publish": lambda events: None}, "publish must be an async function"),
        ({"batch": 1.5}, "batch must be an int, not float"),
        ({"max_attempts": True}, "max_attempts must be an int, not bool"),
    ],
)
def test_what_a_relay_is_made_of(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        relay(**settings)


@pytest.mark.parametrize("make", [Outbox, Inbox])
def test_a_table_has_a_metadata(make: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match=r"^metadata must be a MetaData \(Base.metadata, say\), not None$"):
        make(None)


@pytest.mark.parametrize("make", [Outbox, Inbox])
def test_a_table_has_a_name(make: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match=r"^table_name must be a str, not int$"):
        make(MetaData(), table_name=5)
    with pytest.raises(ValueError, match=r"^table_name is empty$"):
        make(MetaData(), table_name="")


def test_an_age_is_a_timedelta() -> None:
    with pytest.raises(TypeError, match=r"^the age for outbox must be a timedelta, not int$"):
        retention(keep={outbox: 7})
