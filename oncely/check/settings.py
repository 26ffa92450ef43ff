"""Settings that contradict each other, with the arithmetic.

What one object can see of its own settings it refuses when it is made. This is about what only the whole
shows: a worker and its services, a pool and those who share it, what is kept here and may come again from
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from sqlalchemy import Engine, Table
from sqlalchemy.pool import QueuePool

from oncely.check.finding import Finding
from oncely.check.kind import is_consumer, is_webhook_worker
from oncely.check.length import spell
from oncely.inbox import Inbox
from oncely.ledger import HELD
from oncely.outbox import Outbox
from oncely.relay import Relay
from oncely.retention import Retention
from oncely.telemetry import Gauges
from oncely.transaction import Sessionmaker, bind_of
from oncely.worker import Worker

if TYPE_CHECKING:
    from redis.asyncio import Redis, RedisCluster

    from oncely.streams import StreamConsumer

__all__ = ["check_settings"]


async def check_settings(services: Sequence[object], *, worker: Worker | None = None) -> list[Finding]:
    """What does not fit together in these services (Relay, StreamConsumer, Retention, WebhookWorker).

    Others, of the user's own, are passed over. No connection is made.
    """
    relays = [service for service in services if isinstance(service, Relay)]
    consumers = [service for service in services if is_consumer(service)]
    retentions = [service for service in services if isinstance(service, Retention)]
    return [
        *(finding for relay in relays for finding in _check_relay(relay)),
        *(finding for consumer in consumers for finding in _check_consumer(consumer)),
        *(_check_grace(worker) if worker is not None else ()),
        *(finding for retention in retentions for finding in _check_ages(retention, consumers)),
        *await _check_pools(services, consumers),
    ]


def _check_relay(relay: Relay) -> Iterable[Finding]:
    renewed, limit = relay.lease / 3, relay.lease * HELD
    if renewed + relay.database_timeout >= limit:
        yield Finding(
            "wrong",
            relay.name,
            f"one renewal without an answer loses its claim: it begins {spell(renewed)} after the claim "
            f"(lease / 3) and is given up after database_timeout, {spell(relay.database_timeout)}; "
            f"together {spell(renewed + relay.database_timeout)}, and the claim is held for {spell(limit)} "
            f"({HELD} lease)",
        )


def _check_consumer(consumer: StreamConsumer) -> Iterable[Finding]:
    retry_after = timedelta(milliseconds=consumer.retry_after_ms)
    timeout = _socket_timeout(consumer.redis)
    if timeout is not None and retry_after / 3 + timedelta(seconds=timeout) >= retry_after:
        yield Finding(
            "wrong",
            consumer.name,
            "one call to Redis without an answer gives its entries to another worker: they are renewed after "
            f"{spell(retry_after / 3)} (retry_after_ms / 3), the client's socket_timeout is "
            f"{spell(timedelta(seconds=timeout))}, and they are another's after {spell(retry_after)}",
        )
    if consumer.handler_timeout is not None and consumer.handler_timeout > consumer.grace:
        yield Finding(
            "advice",
            consumer.name,
            f"a stop waits {spell(consumer.grace)} (grace), a handler may take "
            f"{spell(consumer.handler_timeout)} (handler_timeout): one that is cut off begins again "
            "elsewhere",
        )
    tries = consumer.tried_for
    if tries < timedelta(minutes=1):
        yield Finding(
            "advice",
            consumer.name,
            f"its {consumer.max_attempts} attempts are over after {spell(tries)}: when what a handler needs "
            "is away for longer, every message that comes becomes a dead letter",
        )


def _check_grace(worker: Worker) -> Iterable[Finding]:
    for service in worker.services:
        grace = getattr(service, "grace", None)
        if isinstance(grace, timedelta) and 2 * grace > worker.patience:
            yield Finding(
                "wrong",
                getattr(service, "name", type(service).__name__),
                f"may take 2 x {spell(grace)} to stop (grace, and as long again to give back), and the "
                f"worker cancels it after {spell(worker.patience)} (4/5 of its grace, "
                f"{spell(worker.grace)})",
            )


def _check_ages(retention: Retention, consumers: Sequence[StreamConsumer]) -> Iterable[Finding]:
    outboxes = {prunable: age for prunable, age in retention.keep.items() if isinstance(prunable, Outbox)}
    for inbox, age in retention.keep.items():
        if not isinstance(inbox, Inbox):
            continue
        for consumer in consumers:
            if consumer.tried_for >= age:
                yield Finding(
                    "wrong",
                    inbox.table.fullname,
                    f"forgets after {spell(age)} what {consumer.name} may bring again: its attempts go on "
                    f"for {spell(consumer.tried_for)}, and then the message changes the database twice",
                )
        for outbox, kept in outboxes.items():
            if kept > age:
                yield Finding(
                    "advice",
                    inbox.table.fullname,
                    f"forgets after {spell(age)}, and {outbox.table.fullname} keeps events for "
                    f"{spell(kept)}: those in between, sent again by republish, are handled twice",
                )


async def _check_pools(services: Sequence[object], consumers: Sequence[StreamConsumer]) -> list[Finding]:
    users: dict[Engine, list[str]] = {}
    for service in services:
        for name, sessionmaker, table in _sessions(service):
            bind = await bind_of(sessionmaker, table)
            if isinstance(bind, Engine):
                users.setdefault(bind, []).append(name)
    findings = []
    handlers = sum(consumer.concurrency for consumer in consumers)
    for engine, names in users.items():
        pool = engine.pool
        if not isinstance(pool, QueuePool) or pool._max_overflow < 0:  # noqa: SLF001  SQLAlchemy shows it nowhere
            continue
        most = pool.size() + pool._max_overflow  # noqa: SLF001  as above
        shared_by = "1 service" if len(names) == 1 else f"{len(names)} services"
        arithmetic = f"{most} connections (pool_size {pool.size()} + max_overflow {pool._max_overflow})"  # noqa: SLF001
        where = f"pool of {engine.url.database}"
        if len(names) > most:
            findings.append(Finding("wrong", where, f"{arithmetic} for {shared_by}: {', '.join(names)}"))
        elif len(names) + handlers > most:
            findings.append(
                Finding(
                    "advice",
                    where,
                    f"{arithmetic} for {shared_by} and, if they use it, up to {handlers} handlers: "
                    f"{len(names) + handlers - most} may wait for a connection",
                )
            )
    return findings


def _sessions(service: object) -> Iterable[tuple[str, Sessionmaker, Table]]:
    """Which sessions a service uses; each holds a connection of the pool while it works."""
    if isinstance(service, Relay):
        yield service.name, service.sessionmaker, service.outbox.table
    elif isinstance(service, Retention):
        for prunable in list(service.keep)[:1]:
            yield service.name, service.sessionmaker, prunable.table
    elif isinstance(service, Gauges):
        tables = (getattr(each, "table", None) for each in service.measured)
        for table in [table for table in tables if isinstance(table, Table)][:1]:  # one after the other
            yield service.name, service.sessionmaker, table
    elif is_webhook_worker(service):
        yield service.name, service.sessionmaker, service.webhooks.table


def _socket_timeout(client: Redis | RedisCluster) -> float | None:
    """How long the client waits for an answer, in seconds; a cluster's nodes are asked by its own setting."""
    pool = getattr(client, "connection_pool", None)
    if pool is None:
        found: float | None = client.connection_kwargs.get("socket_timeout")  # type: ignore[union-attr]
        return found
    timeout: float | None = pool.make_connection().socket_timeout  # not connected; it knows the default
    return timeout
