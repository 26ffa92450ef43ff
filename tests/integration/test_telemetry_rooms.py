"""What an observer is told of keys, inbox, effects, webhooks, retention and consumers, on real engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, HTTPException
from redis.asyncio import Redis
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import (
    NOT_HAPPENED,
    EffectFailed,
    Effects,
    EffectUnknown,
    Event,
    IdempotencyKeys,
    Inbox,
    KeyInFlight,
    KeyReused,
    Outbox,
    Refused,
    Reject,
    Relay,
    Retention,
)
from oncely.backoff import Backoff
from oncely.event import uuid7
from oncely.fastapi import idempotent_route
from oncely.streams import StreamConsumer, stream_publisher
from oncely.telemetry import (
    EffectRun,
    MessageHandled,
    MessageReceived,
    MessagesTakenOver,
    Outage,
    Record,
    RequestGuarded,
    RowsPruned,
    WebhookAttempted,
    WebhookEnqueued,
    WebhooksExpired,
)
from oncely.webhooks import Keyring, Webhooks, WebhookWorker
from tests import webhooks as hooks
from tests.effects import no_writes, pass_time
from tests.outboxes import Sessions, sent_sql
from tests.streams import events
from tests.telemetry import Recorder, records_made, without_times
from tests.waiting import backend_waits, until
from tests.webhooks import Endpoint

pytestmark = pytest.mark.in_schema

NOW = timedelta(0)


async def create(engine: AsyncEngine, metadata: MetaData) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)


def guarded(outcome: Any) -> RequestGuarded:
    return RequestGuarded(keys="idempotency_keys", outcome=outcome, duration=NOW)


def answering(answer: object) -> Callable[[], Awaitable[Any]]:
    async def work() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return work


async def ask(
    keys: IdempotencyKeys,
    session: Any,
    key: str,
    answer: object = (201, "made"),
    *,
    fingerprint: bytes = b"f",
) -> None:
    work = answering(answer)
    await keys.run(session, scope="s", key=key, fingerprint=fingerprint, work=work, wait=NOW)


async def test_requests_are_told_once_their_answer_is_committed(
    engine: AsyncEngine, metadata: MetaData, sessions: Sessions, observer: Recorder
) -> None:
    keys = IdempotencyKeys(metadata, observer=observer)
    await create(engine, metadata)
    async with sessions() as session:
        await ask(keys, session, "rolled back")
        await session.rollback()
    async with sessions.begin() as session:
        await ask(keys, session, "k")
        assert observer.records == []
        async with sessions.begin() as other:
            with pytest.raises(KeyInFlight):
                await ask(keys, other, "k")
    async with sessions.begin() as session:
        await ask(keys, session, "k")
        with pytest.raises(KeyReused):
            await ask(keys, session, "k", fingerprint=b"another")
        await ask(keys, session, "refused", Refused(409, "no"))
        with pytest.raises(RuntimeError):
            await ask(keys, session, "failed", RuntimeError("the work is told by nobody"))
    assert observer.timeless == [
        guarded("in_flight"),
        guarded("first"),
        guarded("replayed"),
        guarded("reused"),
        guarded("refused"),
    ]


async def test_routes_that_are_idempotent_tell_of_their_requests(
    engine: AsyncEngine, metadata: MetaData, sessions: Sessions, observer: Recorder
) -> None:
    keys = IdempotencyKeys(metadata, observer=observer)
    await create(engine, metadata)
    app = FastAPI()
    guarding = idempotent_route(keys, sessions, scope=lambda request: "s", refusals={409})
    router = APIRouter(route_class=guarding)

    @router.post("/{answer}")
    async def answer(answer: str) -> str:
        if answer != "made":
            raise HTTPException(409 if answer == "refused" else 500, answer)
        return answer

    app.include_router(router)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
        for path, key in (("made", "1"), ("made", "1"), ("refused", "2"), ("refused", "1"), ("failed", "3")):
            await client.post(f"/{path}", headers={"Idempotency-Key": f"key-number-{key}"})
    outcomes = [guarded(outcome) for outcome in ("first", "replayed", "refused", "reused")]
    assert observer.timeless == outcomes  # and a request that failed has left nothing


async def test_the_inbox_tells_first_and_duplicate(
    engine: AsyncEngine, metadata: MetaData, sessions: Sessions, observer: Recorder
) -> None:
    inbox = Inbox(metadata, observer=observer)
    await create(engine, metadata)
    event = Event(uuid7(), "t", 1)

    async def handle(session: object, event: Event) -> None:
        pass

    async def fail(session: object, event: Event) -> None:
        raise ValueError

    with pytest.raises(ValueError):
        await inbox.handler(sessions, fail, consumer="mail")(event)
    await inbox.handler(sessions, handle, consumer="mail")(event)
    await inbox.handler(sessions, handle, consumer="mail")(event)
    async with sessions.begin() as session:
        assert await inbox.run(session, event, answering(None), consumer="bill")
        assert len(observer.records) == 2
    async with sessions() as session:
        assert await inbox.run(session, event, answering(None), consumer="rolled back")
        await session.rollback()
    assert observer.records == [
        MessageReceived(inbox="inbox", consumer="mail", outcome="first"),
        MessageReceived(inbox="inbox", consumer="mail", outcome="duplicate"),
        MessageReceived(inbox="inbox", consumer="bill", outcome="first"),
    ]


def call(answer: object) -> Callable[[str], Awaitable[object]]:
    async def make(provider_token: str) -> object:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return make


def ran(outcome: Any, error: str = "") -> EffectRun:
    return EffectRun(effects="effects", outcome=outcome, error=error, duration=NOW)


async def test_runs_of_effects_tell_whether_the_call_was_made_and_what_is_known(
    engine: AsyncEngine, metadata: MetaData, observer: Recorder
) -> None:
    effects = Effects(
        metadata,
        stale_after=timedelta(hours=1),
        sessionmaker=engine,
        observer=observer,
        failed_on=(KeyError,),
    )
    await create(engine, metadata)

    async def run(key: str, answer: object, **given: Any) -> None:
        with suppress(Exception):
            await effects.run(key, call(answer), **given)

    async def found(key: str, args: object) -> object:
        return "it had happened"

    async def not_happened(key: str, args: object) -> object:
        return NOT_HAPPENED

    async def cannot_tell(key: str, args: object) -> object:
        raise ConnectionError("secret")

    await run("a", 1)
    await run("a", 1)
    await run("a", 1, args="others")
    await run("b", EffectFailed("declined"))
    await run("b", 1)
    await run("c", KeyError("4711"))
    await run("d", TimeoutError("secret"))
    await run("d", 1)
    await run("d", 1, verify=cannot_tell)
    await run("d", 1, verify=found)
    await run("e", TimeoutError())
    await run("e", EffectUnknown("another effect, inside the call"), verify=not_happened)
    await run("e", 1, verify=not_happened)
    assert observer.timeless == [
        ran("done"),
        ran("stored"),
        ran("reused", "KeyReused"),
        ran("failed", "EffectFailed"),
        ran("refused", "EffectFailed"),
        ran("failed", "KeyError"),
        ran("unknown", "TimeoutError"),
        ran("in_doubt", "EffectUnknown"),
        ran("in_doubt", "ConnectionError"),
        ran("found"),
        ran("unknown", "TimeoutError"),
        ran("unknown", "EffectUnknown"),
        ran("done"),
    ]


async def test_an_effect_whose_claim_ended_is_told_as_lost_and_one_that_is_awaited_as_pending(
    engine: AsyncEngine, metadata: MetaData, observer: Recorder
) -> None:
    effects = Effects(metadata, stale_after=timedelta(hours=1), sessionmaker=engine, observer=observer)
    await create(engine, metadata)

    async def slow(provider_token: str) -> object:
        with suppress(Exception):
            await effects.run("k", call(1))
        await pass_time(effects, engine, timedelta(hours=2))
        with suppress(EffectUnknown):
            await effects.run("k", call(1))
        assert await effects.delete("k")
        return 1

    with suppress(Exception):
        await effects.run("k", slow)
    assert observer.timeless == [
        ran("pending", "EffectPending"),
        ran("in_doubt", "EffectUnknown"),
        ran("lost", "EffectLost"),
    ]


async def test_an_effect_that_was_cut_off_before_anything_was_known_is_not_told(
    engine: AsyncEngine, metadata: MetaData, observer: Recorder
) -> None:
    effects = Effects(metadata, stale_after=timedelta(hours=1), sessionmaker=engine, observer=observer)
    await create(engine, metadata)
    async with no_writes(effects, engine):
        looking = asyncio.create_task(effects.run("k", call(1)))
        await backend_waits(engine, "relation")
        looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    assert (await effects.get("k"), observer.timeless) == (None, [])


async def test_webhooks_are_told_when_committed_and_after_each_attempt(
    engine: AsyncEngine, sessions: Sessions, observer: Recorder, server: Endpoint
) -> None:
    webhooks = await hooks.make_webhooks(engine, observer=observer)
    for _ in range(2):
        await hooks.enqueue(webhooks, sessions, server.url("/secret"))
    async with sessions() as session:
        await webhooks.enqueue(session, server.url(), b"", key="2", caller="shop", type="rolled.back")
        await session.rollback()
    server.answer = hooks.Answer(503)
    worker = hooks.worker(webhooks, sessions, server)
    await worker.run_once()
    await hooks.pass_time(engine, timedelta(hours=1))
    server.answer = hooks.Answer(204)
    await worker.run_once()
    await hooks.enqueue(webhooks, sessions, server.url(), key="overdue")
    await hooks.pass_time(engine, timedelta(days=5))
    await worker.run_once()

    def attempted(outcome: Any, attempt: int, error: str) -> WebhookAttempted:
        return WebhookAttempted(
            webhooks="webhooks",
            type="order.paid",
            outcome=outcome,
            attempt=attempt,
            error=error,
            duration=NOW,
        )

    def enqueued(*, repeated: bool) -> WebhookEnqueued:
        return WebhookEnqueued(webhooks="webhooks", type="order.paid", repeated=repeated)

    assert observer.timeless == [
        enqueued(repeated=False),
        enqueued(repeated=True),
        attempted("retry", 1, "HTTP 503"),
        attempted("delivered", 2, ""),
        enqueued(repeated=False),
        WebhooksExpired(webhooks="webhooks", count=1),
    ]


async def test_retention_tells_what_it_deleted_and_that_the_database_is_away(
    engine: AsyncEngine, metadata: MetaData, sessions: Sessions, observer: Recorder
) -> None:
    inbox, other = Inbox(metadata), Inbox(metadata, table_name="other")
    await create(engine, metadata)
    async with sessions.begin() as session:
        for _ in range(2):
            await inbox.run(session, uuid7(), answering(None), consumer="c")
    await Retention(sessions, {inbox: NOW, other: NOW}, observer=observer).run_once()
    assert observer.timeless == [RowsPruned(table="inbox", count=2, duration=NOW)]

    stop = asyncio.Event()

    def away() -> Any:
        stop.set()
        raise ConnectionRefusedError("secret")

    pause = timedelta(milliseconds=1)
    outage = Backoff(first=pause, maximum=pause, jitter=0)
    await Retention(away, {inbox: NOW}, observer=observer, outage=outage).run(stop)
    assert observer.of(Outage) == [
        Outage(
            service="retention", name="", waits_for="database", error="ConnectionRefusedError", retry_in=pause
        )
    ]


async def test_relays_and_webhook_workers_tell_that_the_database_is_away(
    metadata: MetaData, server: Endpoint, observer: Recorder
) -> None:
    pause = timedelta(milliseconds=1)
    outage = Backoff(first=pause, maximum=pause, jitter=0)
    outbox = Outbox(metadata, observer=observer)
    webhooks = Webhooks(metadata, keyring=Keyring({"k": hooks.KEY}, write="k"), observer=observer)

    async def publish(events: object) -> None:
        raise AssertionError("there is nothing to publish")

    def away() -> Any:
        stop.set()
        raise ConnectionRefusedError("secret")

    for service, made in (
        ("relay", Relay(outbox, away, publish, outage=outage, listen=False)),
        ("webhooks", WebhookWorker(webhooks, away, sender=hooks.sender(server), outage=outage)),
    ):
        stop = asyncio.Event()
        observer.records.clear()
        await made.run(stop)
        assert [(record.service, record.name) for record in observer.of(Outage)] == [
            (service, "outbox" if service == "relay" else "webhooks")
        ]
        assert {(record.waits_for, record.error) for record in observer.of(Outage)} == {
            ("database", "ConnectionRefusedError")
        }


def handled(
    stream: str, result: Any, attempt: int, error: str = "", topic: str = "order.paid"
) -> MessageHandled:
    return MessageHandled(
        stream=stream,
        group="workers",
        topic=topic,
        result=result,
        attempt=attempt,
        error=error,
        duration=NOW,
    )


def timeless(record: Record) -> Record:
    """What was not handled took no time at all."""
    return record if getattr(record, "duration", NOW) == NOW else without_times(record)


async def test_messages_are_told_when_redis_knows_how_they_ended(
    redis: Redis, stream: str, observer: Recorder
) -> None:
    consumer = StreamConsumer(redis, stream=stream, retry_after_ms=1, max_attempts=2, observer=observer)
    failing: dict[object, Exception] = {"b": ValueError("secret"), "c": Reject("secret")}

    @consumer.subscribe("*")
    async def handle(event: Event) -> None:
        if event.payload in failing:
            raise failing[event.payload]

    await stream_publisher(redis, stream)(events("a", "b", "c", topic="order.paid"))
    await redis.xadd(stream, {"no": "event"})
    while not [record for record in observer.records if getattr(record, "attempt", 0) == 2]:
        await consumer.run_once()
    told = [timeless(record) for record in observer.records]
    assert sorted(told[:4], key=str) == sorted(
        [
            handled(stream, "ok", 1),
            handled(stream, "retry", 1, "ValueError"),
            handled(stream, "dead", 1, "Reject"),
            handled(stream, "dead", 0, "NotAnEvent", topic=""),
        ],
        key=str,
    )
    assert told[4:] == [
        MessagesTakenOver(stream=stream, group="workers", count=1),
        handled(stream, "dead", 2, "ValueError"),
    ]


async def test_a_consumer_tells_that_redis_is_away(observer: Recorder) -> None:
    async with Redis(host="127.0.0.1", port=1) as nowhere:
        pause = timedelta(milliseconds=1)
        outage = Backoff(first=pause, maximum=pause, jitter=0)
        consumer = StreamConsumer(nowhere, stream="s", outage=outage, observer=observer)
        stop = asyncio.Event()

        async def handle(event: Event) -> None:
            raise AssertionError("there is no event")

        consumer.subscribe("*", handle)
        running = asyncio.create_task(consumer.run(stop))
        await until(lambda: len(observer.records) >= 2)
        stop.set()
        await running
    told = Outage(service="consumer", name="s", waits_for="broker", error="ConnectionError", retry_in=pause)
    assert observer.records[:2] == [told, told]


async def test_without_an_observer_no_record_is_made_and_with_one_no_statement_is_added(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, server: Endpoint
) -> None:
    sessions = async_sessionmaker(engine)
    made = records_made(monkeypatch)

    async def work(observer: Recorder | None) -> list[str]:
        metadata = MetaData()
        keys = IdempotencyKeys(metadata, observer=observer)
        inbox = Inbox(metadata, observer=observer)
        effects = Effects(metadata, stale_after=timedelta(hours=1), sessionmaker=sessions, observer=observer)
        webhooks = await hooks.make_webhooks(engine, metadata=metadata, observer=observer)
        event = Event(uuid7(), "t", 1)
        with sent_sql(engine) as sent:
            for _ in range(2):
                async with sessions.begin() as session:
                    await ask(keys, session, "k")
                    await inbox.run(session, event, answering(None), consumer="c")
                await effects.run("k", call(1))
            await hooks.enqueue(webhooks, sessions, server.url())
            await hooks.worker(webhooks, sessions, server).run_once()
            await Retention(sessions, {inbox: NOW}, observer=observer).run_once()
        async with engine.begin() as connection:
            await connection.run_sync(metadata.drop_all)
        return sent

    without = await work(None)
    assert made == []
    assert await work(Recorder()) == without
    assert set(made) == {
        "RequestGuarded",
        "MessageReceived",
        "EffectRun",
        "WebhookEnqueued",
        "WebhookAttempted",
        "RowsPruned",
    }


async def test_an_observer_costs_a_consumer_no_command_of_redis(
    redis: Redis, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = records_made(monkeypatch)

    async def commands(name: str, observer: Recorder | None) -> int:
        consumer = StreamConsumer(redis, stream=name, observer=observer)

        async def handle(event: Event) -> None:
            pass

        consumer.subscribe("*", handle)
        before = (await redis.info("stats"))["total_commands_processed"]
        await stream_publisher(redis, name)(events(*range(20)))
        assert await consumer.run_once() == 20
        return int((await redis.info("stats"))["total_commands_processed"] - before)

    await commands(f"{stream}:warm", None)
    without = await commands(f"{stream}:plain", None)
    assert made == []
    assert await commands(f"{stream}:observed", Recorder()) == without
    assert made == ["MessageHandled"] * 20
