"""What is of a wrong type is refused where it is given, before any SQL, by a sentence that names it.

The engine and the Redis of these tests lead nowhere, so whatever reached them would fail in another way.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import pytest
from redis.asyncio import Redis
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from oncely import Answer, Effects, Event, IdempotencyKeys, Inbox, Outbox, Refused, Relay, Retention, Worker
from oncely.backoff import Backoff
from oncely.effects import EffectRecord, Status
from oncely.errors import InvalidKey
from oncely.fastapi import idempotent_route
from oncely.streams import DeadLetters, StreamConsumer, stream_publisher
from oncely.telemetry import Gauges
from oncely.telemetry.logging import LoggingObserver
from oncely.testing import EmbeddedPostgres, Steps
from oncely.webhooks import (
    HttpSignatures,
    HttpSignaturesVerifier,
    Keyring,
    PinnedTransport,
    StandardWebhooks,
    StandardWebhooksVerifier,
    Webhooks,
    WebhookSender,
    WebhookWorker,
)

Given: TypeAlias = Any  # of a wrong type: that is what is tested

SESSIONS = async_sessionmaker(create_async_engine("postgresql+asyncpg://nobody@127.0.0.1:1/nowhere"))
SESSION = AsyncSession()
REDIS = Redis(port=1)
METADATA = MetaData()
WEEK = timedelta(days=7)
SECRET = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="

outbox, keys, inbox = Outbox(METADATA), IdempotencyKeys(METADATA), Inbox(METADATA)
keyring = Keyring({"k": bytes(32)}, write="k")
webhooks = Webhooks(METADATA, keyring=keyring)
effects = Effects(METADATA, stale_after=WEEK, sessionmaker=SESSIONS)
record = EffectRecord(
    key="k",
    args_hash=b"",
    status=Status.UNKNOWN,
    result_json=None,
    error=None,
    token="t",
    provider_token="p",
    attempts=1,
    created_at=datetime(2026, 1, 2, tzinfo=UTC),
    updated_at=datetime(2026, 1, 2, tzinfo=UTC),
    expires_at=None,
    expired=False,
)


async def publish(events: Sequence[Event]) -> None: ...


async def handle(event: Event) -> None: ...


async def work() -> None: ...


async def call(provider_token: str) -> None: ...


def consumer(**settings: Any) -> StreamConsumer:
    made = StreamConsumer(REDIS, stream="s", **settings)
    made.subscribe("t", handle)
    return made


def webhook_worker(**settings: Any) -> WebhookWorker:
    made: dict[str, Any] = {"webhooks": webhooks, "sender": WebhookSender(StandardWebhooks(SECRET))}
    return WebhookWorker(sessionmaker=SESSIONS, **made | settings)


def route(**settings: Any) -> object:
    made: dict[str, Any] = {"keys": keys, "sessionmaker": SESSIONS, "scope": str}
    return idempotent_route(**made | settings)


def enqueue(**given: Any) -> object:
    return webhooks.enqueue(SESSION, "https://example.com", b"", key="k", caller="c", type="t", **given)


Refusal: TypeAlias = tuple[Callable[[Any], object], Given, str]

REFUSALS: list[Refusal] = [
    *(
        (lambda given, room=room: room(MetaData(), schema=given), 7, "schema must be a str, not int")
        for room in (Outbox, IdempotencyKeys, Inbox)
    ),
    (lambda given: Outbox(MetaData(), max_payload_bytes=given), 1.5, "max_payload_bytes must be an int"),
    (lambda given: outbox.emit_many(SESSION, given), None, "events must be an Iterable, not NoneType"),
    (lambda given: outbox.measure(given), SESSION, "sessionmaker must make AsyncSessions"),
    (lambda given: webhooks.measure(given), SESSION, "sessionmaker must make AsyncSessions"),
    *(
        (
            lambda given, room=room: room.prune(SESSION, older_than=given),
            None,
            "older_than must be a timedelta or a datetime, not NoneType",
        )
        for room in (outbox, keys, inbox, webhooks)
    ),
    (lambda given: Answer(200, "", given), 7, "headers must be pairs of str, not int"),
    (lambda given: Answer(200, "", given), [7], "headers must be pairs of str, not (7,)"),
    (lambda given: Refused(409, "", given), None, "headers must be pairs of str, not None"),
    (lambda given: Refused(409, "", given), ["Link"], "headers must be pairs of str, not ['Link']"),
    (
        lambda given: inbox.run(SESSION, uuid.UUID(int=7), given, consumer="c"),
        None,
        "work must be a function",
    ),
    (lambda given: Retention(SESSIONS, given), [outbox], "keep must be a Mapping, not list"),
    (
        lambda given: Retention(SESSIONS, given),
        {"outbox": WEEK},
        "keep says what is pruned, such as an Outbox",
    ),
    (
        lambda given: Worker(Relay(outbox, SESSIONS, publish), close=given),
        print,
        "close must be an Iterable, not builtin_function_or_method",
    ),
    (lambda given: Gauges(print, SESSIONS, given), SESSIONS, "measured is an Outbox, a StreamConsumer or"),
    (lambda given: Backoff(first=given), 1, "first must be a timedelta, not int"),
    (lambda given: Backoff(maximum=given), 1, "maximum must be a timedelta, not int"),
    (lambda given: Backoff(factor=given), "2", "factor must be a number, not str"),
    (lambda given: Backoff(jitter=given), None, "jitter must be a number, not NoneType"),
    (lambda given: LoggingObserver(given), "oncely", "logger.log must be a function, not NoneType"),
    (lambda given: Steps(given), "relay.claim.before", "on_step must be a function, not str"),
    (lambda given: EmbeddedPostgres(programs=given), "/usr/bin", "programs must be a Path, not str"),
    # effects
    (lambda given: Effects(MetaData(), stale_after=given), 60, "stale_after must be a timedelta, not int"),
    (
        lambda given: Effects(MetaData(), stale_after=WEEK, failed_on=given),
        OSError,
        "failed_on must be an Iterable, not type",
    ),
    (
        lambda given: Effects(MetaData(), stale_after=WEEK, failed_on=given),
        (7,),
        "each of failed_on must be a",
    ),
    (
        lambda given: Effects(MetaData(), stale_after=WEEK, redact=given),
        "",
        "redact must be a function, not str",
    ),
    (lambda given: effects.run("k", given), None, "call must be a function, not NoneType"),
    (lambda given: effects.run("k", call, verify=given), True, "verify must be a function, not bool"),
    (lambda given: effects.run("k", call, ttl=given), 60, "ttl must be a timedelta, not int"),
    (lambda given: effects.run("k", call, wait=given), 1.5, "wait must be a timedelta, not float"),
    (lambda given: effects.once(key=given), "k", "key must be a function, not str"),
    (lambda given: effects.once(ttl=given), 60, "ttl must be a timedelta, not int"),
    (lambda given: effects.claim("k", given), "args", "args_hash must be bytes, not str"),
    (lambda given: effects.extend("k", "t", given), 60, "lease must be a timedelta, not int"),
    (lambda given: effects.finish("k", "t", Status.DONE, ttl=given), 60, "ttl must be a timedelta, not int"),
    (lambda given: effects.take(given, Status.DONE), "k", "record must be an EffectRecord, not str"),
    (lambda given: effects.renew(given, b""), None, "record must be an EffectRecord, not NoneType"),
    (lambda given: effects.renew(record, given), None, "args_hash must be bytes, not NoneType"),
    (lambda given: effects.records(given), "done", "statuses must be a collection of them, not str"),
    (lambda given: effects.purge(given), "7d", "older_than must be a timedelta, or seconds, not str"),
    (lambda given: effects.purge(WEEK, given), None, "statuses must be a collection of them, not NoneType"),
    # streams
    (lambda given: stream_publisher(REDIS, given), None, "stream must be a str, not NoneType"),
    (lambda given: stream_publisher(REDIS, "s", maxlen=given), "9", "maxlen must be an int, not str"),
    (lambda given: StreamConsumer(REDIS, stream=given), None, "stream must be a str, not NoneType"),
    *(
        (lambda given, name=name: consumer(**{name: given}), wrong, f"{name} must be {right}")
        for name, wrong, right in (
            ("group", None, "a str, not NoneType"),
            ("retry_after_ms", timedelta(seconds=30), "an int, not timedelta"),
            ("max_attempts", 1.5, "an int, not float"),
            ("concurrency", "16", "an int, not str"),
            ("count", None, "an int, not NoneType"),
            ("backoff_factor", "2", "a number, not str"),
            ("backoff_maximum", 3600, "a timedelta, not int"),
            ("dead_letter_stream", 7, "a str, not int"),
            ("on_result", True, "a function, not bool"),
        )
    ),
    (lambda given: consumer().subscribe(given, handle), 7, "a topic must be a str, not int"),
    (lambda given: consumer().run_once(count=given), 1.5, "count must be an int, not float"),
    (lambda given: consumer().run_once(block_ms=given), WEEK, "block_ms must be an int, not timedelta"),
    (lambda given: consumer().trim(keep=given), None, "keep must be an int, not NoneType"),
    (lambda given: DeadLetters(given, stream="s"), "redis://", "redis must be a client of redis.asyncio"),
    (lambda given: DeadLetters(REDIS, stream=given), 7, "stream must be a str, not int"),
    (
        lambda given: DeadLetters(REDIS, stream="s").list(ids=given),
        7,
        "ids must be an iterable of ids, not int",
    ),
    # webhooks
    (lambda given: Webhooks(MetaData(), keyring=given), {}, "keyring must be a Keyring, not dict"),
    (
        lambda given: Webhooks(MetaData(), keyring=keyring, horizon=given),
        3,
        "horizon must be a timedelta, not int",
    ),
    (
        lambda given: Webhooks(MetaData(), keyring=keyring, max_body_bytes=given),
        None,
        "max_body_bytes must be an int, not NoneType",
    ),
    (lambda given: enqueue(headers=given), 7, "headers must be pairs of str, not int"),
    (lambda given: enqueue(headers=given), [("X-Id", 7)], "headers must be pairs of str"),
    (lambda given: webhooks.retry(SESSION, horizon=given), 1, "horizon must be a timedelta, not int"),
    (lambda given: webhooks.release(SESSION, horizon=given), 1, "horizon must be a timedelta, not int"),
    (lambda given: webhooks.dead(SESSION, states=given), "expired", "states must be a collection of them"),
    (lambda given: Keyring(given, write="k"), [bytes(32)], "keys must be a Mapping, not list"),
    (lambda given: Keyring({"k": given}, write="k"), "k" * 32, "key 'k' must be bytes, not str"),
    (lambda given: Keyring({"k": bytes(32)}, write=given), ["k"], "write must be a str, not list"),
    (lambda given: WebhookSender(given), SECRET, "signer.sign must be a function, not NoneType"),
    (
        lambda given: WebhookSender(StandardWebhooks(SECRET), transport=given),
        "https",
        "transport must be a PinnedTransport, not str",
    ),
    (
        lambda given: StandardWebhooksVerifier(SECRET, tolerance=given),
        300,
        "tolerance must be a timedelta, not int",
    ),
    (lambda given: PinnedTransport(deadline=given), 15, "deadline must be a timedelta, not int"),
    (lambda given: HttpSignaturesVerifier(given), [b""], "keys must be a Mapping, not list"),
    (
        lambda given: HttpSignatures(b"", key_id="k", valid_for=given),
        300,
        "valid_for must be a timedelta, not int",
    ),
    (lambda given: webhook_worker(webhooks=given), outbox, "webhooks must be a Webhooks, not Outbox"),
    (lambda given: webhook_worker(sender=given), SECRET, "sender must be a WebhookSender, not str"),
    (lambda given: webhook_worker(sender=None, resolver=given), {}, "resolver must be a function, not dict"),
    (lambda given: webhook_worker(concurrency=given), "32", "concurrency must be an int, not str"),
    (lambda given: webhook_worker(per_endpoint=given), 1.5, "per_endpoint must be an int, not float"),
    (lambda given: webhook_worker(on_attempt=given), "print", "on_attempt must be a function, not str"),
    # routes
    (lambda given: route(keys=given), METADATA, "keys must be an IdempotencyKeys, not MetaData"),
    (lambda given: route(methods=given), None, "methods must be an Iterable, not NoneType"),
    (lambda given: route(methods=given), [b"POST"], "each of methods must be a str, not bytes"),
    (lambda given: route(headers=given), [7], "each of headers must be a str, not int"),
    (lambda given: route(refusals=given), 409, "refusals must be an Iterable, not int"),
    (lambda given: route(max_body=given), 1e6, "max_body must be an int, not float"),
]


@pytest.mark.parametrize(
    ("take", "given", "sentence"),
    REFUSALS,
    ids=[f"{sentence}-{given!r:.20}" for _, given, sentence in REFUSALS],
)
async def test_what_is_of_a_wrong_type_is_refused(
    take: Callable[[Any], object], given: Given, sentence: str
) -> None:
    async def use() -> None:
        made = take(given)
        if inspect.isawaitable(made):
            await made

    with pytest.raises(TypeError) as refused:
        await use()
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("token", [7, b"t", "nul\0"])
async def test_a_token_that_cannot_be_stored_is_refused(token: Given) -> None:
    for using in (
        effects.extend("k", token, WEEK),
        effects.finish("k", token, Status.DONE),
        effects.claim("k", b"", provider_token=token),
        effects.renew(record, b"", provider_token=token),
        effects.delete("k", token=token),
    ):
        with pytest.raises(InvalidKey, match="token"):
            await using


@pytest.mark.parametrize(
    ("take", "name"),
    [
        (lambda given: outbox.relay_once(SESSIONS, publish, lease=given), "lease"),
        (lambda given: effects.extend("k", "t", given), "lease"),
        (lambda given: effects.run("k", call, ttl=given), "ttl"),
        (lambda given: Effects(MetaData(), stale_after=given), "stale_after"),
    ],
)
async def test_what_a_database_cannot_add_to_now_is_refused(take: Callable[[Any], Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be at most 36,500 days, not 999999999 days"):
        await take(timedelta.max)
