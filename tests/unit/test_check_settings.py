"""Settings that contradict each other are found, with the arithmetic; the defaults are not."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from redis.asyncio import Redis, RedisCluster
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from oncely import Inbox, Outbox, Relay, Retention
from oncely.check import check_settings
from oncely.check.length import spell
from oncely.streams import StreamConsumer
from oncely.telemetry import Gauges
from oncely.webhooks import Keyring, StandardWebhooks, Webhooks, WebhookSender, WebhookWorker
from oncely.worker import Worker

SECOND, HOUR, DAY = timedelta(seconds=1), timedelta(hours=1), timedelta(days=1)


async def nowhere(events: object) -> None: ...


def sessions(**pool: int) -> Any:
    return async_sessionmaker(create_async_engine("postgresql+asyncpg://nobody@nowhere/shop", **pool))


def relay(outbox: Outbox | None = None, made: Any = None, **settings: Any) -> Relay:
    return Relay(outbox or Outbox(MetaData()), made or sessions(), nowhere, **settings)


def consumer(*, socket_timeout: float | None = 5, **settings: Any) -> StreamConsumer:
    return StreamConsumer(Redis(socket_timeout=socket_timeout), stream="orders", **settings)


async def test_the_defaults_fit_together() -> None:
    metadata = MetaData()
    outbox, inbox = Outbox(metadata), Inbox(metadata)
    made = sessions(pool_size=10, max_overflow=10)
    worker = Worker(relay(outbox, made), consumer(), Retention(made, {outbox: 7 * DAY, inbox: 30 * DAY}))
    assert await check_settings(worker.services, worker=worker) == []


async def said(*services: Any, worker: Worker | None = None) -> list[tuple[str, str, str]]:
    found = await check_settings(services, worker=worker)
    return [(finding.severity, finding.about, finding.message) for finding in found]


async def test_a_lease_that_one_unanswered_renewal_loses() -> None:
    assert await said(relay(lease=15 * SECOND, database_timeout=10 * SECOND)) == [
        (
            "wrong",
            "Relay outbox",
            (
                "one renewal without an answer loses its claim: it begins 5s after the claim (lease / "
                "3) and is given up after database_timeout, 10s; together 15s, and the claim is held "
                "for 13.5s (0.9 lease)"
            ),
        )
    ]


async def test_a_client_that_waits_for_redis_longer_than_entries_are_ours() -> None:
    short = consumer(retry_after_ms=6_000, max_attempts=100)
    assert await said(short) == [
        (
            "wrong",
            "StreamConsumer orders/workers",
            (
                "one call to Redis without an answer gives its entries to another worker: they are "
                "renewed after 2s (retry_after_ms / 3), the client's socket_timeout is 5s, and they "
                "are another's after 6s"
            ),
        )
    ]
    assert await said(consumer(retry_after_ms=6_000, max_attempts=100, socket_timeout=1)) == []


async def test_a_cluster_that_is_waited_for_longer_than_entries_are_ours() -> None:
    client = RedisCluster("nowhere", socket_timeout=30)
    [(severity, _, message)] = await said(StreamConsumer(client, stream="orders", retry_after_ms=30_000))
    assert severity == "wrong"
    assert "the client's socket_timeout is 30s" in message


async def test_a_handler_that_may_take_longer_than_a_stop_waits() -> None:
    assert await said(consumer(handler_timeout=20 * SECOND)) == [
        (
            "advice",
            "StreamConsumer orders/workers",
            (
                "a stop waits 10s (grace), a handler may take 20s (handler_timeout): one that is cut "
                "off begins again elsewhere"
            ),
        )
    ]


async def test_attempts_that_are_over_in_less_than_a_minute() -> None:
    assert await said(consumer(max_attempts=2)) == [
        (
            "advice",
            "StreamConsumer orders/workers",
            (
                "its 2 attempts are over after 30s: when what a handler needs is away for longer, every"
                " message that comes becomes a dead letter"
            ),
        )
    ]
    assert await said(consumer(max_attempts=3, backoff_factor=2)) == []


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 4 * 30),
        ({"max_attempts": 1}, 0),
        ({"max_attempts": 5, "backoff_factor": 2}, 30 + 60 + 120 + 240),
        ({"max_attempts": 5, "backoff_factor": 2, "backoff_maximum": timedelta(seconds=60)}, 30 + 3 * 60),
    ],
)
def test_how_long_a_message_is_tried(settings: dict[str, Any], seconds: int) -> None:
    assert consumer(**settings).tried_for == seconds * SECOND


def test_attempts_without_end_are_no_error() -> None:
    assert consumer(max_attempts=10**15).tried_for > 1_000_000 * DAY


async def test_a_worker_that_cuts_off_its_services() -> None:
    worker = Worker(relay(grace=15 * SECOND), grace=25 * SECOND)
    assert await said(worker=worker) == [
        (
            "wrong",
            "Relay outbox",
            (
                "may take 2 x 15s to stop (grace, and as long again to give back), and the worker "
                "cancels it after 20s (4/5 of its grace, 25s)"
            ),
        )
    ]


async def test_an_inbox_that_forgets_what_may_come_again() -> None:
    metadata = MetaData()
    outbox, inbox = Outbox(metadata), Inbox(metadata)
    slow = consumer(retry_after_ms=3_600_000, max_attempts=26)
    retention = Retention(sessions(pool_size=20), {outbox: 7 * DAY, inbox: DAY})
    assert await said(slow, retention) == [
        (
            "wrong",
            "inbox",
            (
                "forgets after 1d what StreamConsumer orders/workers may bring again: its attempts go "
                "on for 1d 1h, and then the message changes the database twice"
            ),
        ),
        (
            "advice",
            "inbox",
            (
                "forgets after 1d, and outbox keeps events for 7d: those in between, sent again by "
                "republish, are handled twice"
            ),
        ),
    ]


@pytest.mark.parametrize(
    ("overflow", "expected"),
    [
        (0, [("wrong", "1 connections (pool_size 1 + max_overflow 0) for 2 services: Relay one, Relay two")]),
        (
            10,
            [
                (
                    "advice",
                    (
                        "11 connections (pool_size 1 + max_overflow 10) for 2 services and, if they use "
                        "it, up to 16 handlers: 7 may wait for a connection"
                    ),
                )
            ],
        ),
        (30, []),
        (-1, []),  # as many as are wanted
    ],
)
async def test_a_pool_that_is_too_small(overflow: int, expected: list[tuple[str, str]]) -> None:
    made = sessions(pool_size=1, max_overflow=overflow)
    one, two = (relay(Outbox(MetaData(), table_name=name), made) for name in ("one", "two"))
    found = await said(one, two, consumer())
    assert found == [(severity, "pool of shop", message) for severity, message in expected]


async def test_a_webhook_worker_needs_a_connection_too() -> None:
    metadata, made = MetaData(), sessions(pool_size=1, max_overflow=0)
    webhooks = Webhooks(metadata, keyring=Keyring({"k": bytes(range(32))}, write="k"))
    sender = WebhookSender(StandardWebhooks("whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="))
    worker = WebhookWorker(webhooks, made, sender=sender)
    [(severity, _, message)] = await said(relay(Outbox(metadata), made), worker)
    assert severity == "wrong"
    assert message.endswith(f"for 2 services: Relay outbox, {worker.name}")


async def test_what_uses_one_connection_of_the_users_has_no_pool() -> None:
    engine = create_async_engine("sqlite+aiosqlite://")
    async with engine.connect() as connection:
        assert await said(*(relay(made=async_sessionmaker(connection)) for _ in range(20))) == []
    await engine.dispose()


async def test_gauges_need_a_connection_too() -> None:
    made, outbox = sessions(pool_size=1, max_overflow=0), Outbox(MetaData())
    assert await said(relay(outbox, made), Gauges(print, made, consumer(), outbox)) == [
        (
            "wrong",
            "pool of shop",
            "1 connections (pool_size 1 + max_overflow 0) for 2 services: Relay outbox, Gauges",
        )
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (1 / 15, "0.0667s"),
        (13.5, "13.5s"),
        (60, "1m"),
        (185, "3m 5s"),
        (7200, "2h"),
        (9_660, "2h 41m"),
        (86_400 * 1_001 + 3_600, "1,001d 1h"),
    ],
)
def test_a_length_of_time_is_spelled_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert spell(timedelta(seconds=seconds)) == text
