"""What a command finds at its place: rooms with tables, each with the sessions to reach them, and streams.

A room that has no sessionmaker of its own (an Outbox, say) uses that of what stands beside it in the
target, if there is one only, or the database of ONCELY_DATABASE_URL.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely.check.kind import is_consumer, is_webhook_worker, is_webhooks
from oncely.cli.address import connect
from oncely.cli.discovery import Room, discover
from oncely.cli.failure import WRONG_USE, Failure
from oncely.cli.place import Place
from oncely.cli.target import load
from oncely.effects import Effects
from oncely.idempotency import IdempotencyKeys
from oncely.inbox import Inbox, InboxHandler
from oncely.outbox import Outbox
from oncely.relay import Relay
from oncely.retention import Retention
from oncely.transaction import Sessionmaker, bind_of
from oncely.worker import Service, Worker

if TYPE_CHECKING:
    from redis.asyncio import Redis, RedisCluster

    from oncely.streams import DeadLetters, StreamConsumer
    from oncely.webhooks import Webhooks

__all__ = ["Rooms", "Stored", "Stream", "open_rooms"]

_R = TypeVar("_R", bound="Outbox | IdempotencyKeys | Inbox | Effects | Webhooks")


@dataclass(frozen=True, slots=True)
class Stored(Generic[_R]):
    """A room and the sessions that reach its tables."""

    room: _R
    sessionmaker: Sessionmaker

    @property
    def name(self) -> str:
        return self.room.table.fullname


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream and its dead letters."""

    name: str
    redis: Redis | RedisCluster
    dead_letters: DeadLetters


@dataclass(frozen=True, slots=True)
class Rooms:
    """All that is there, in the order in which it was found.

    `ages` is what a Retention keeps, by table; `services` are what runs, in `worker` if there is one.
    """

    outboxes: Sequence[Stored[Outbox]] = ()
    keys: Sequence[Stored[IdempotencyKeys]] = ()
    inboxes: Sequence[Stored[Inbox]] = ()
    effects: Sequence[Stored[Effects]] = ()
    webhooks: Sequence[Stored[Webhooks]] = ()
    streams: Sequence[Stream] = ()
    ages: Mapping[str, timedelta] = field(default_factory=dict)
    services: Sequence[Service] = ()
    worker: Worker | None = None


@asynccontextmanager
async def open_rooms(place: Place) -> AsyncIterator[Rooms]:
    """The rooms at a place, while their engines and clients are open.

    Raises Failure when there are none, or one of them has no database.
    """
    finds = _Finds(place)
    try:
        if place.target is not None and place.schema is not None:
            raise Failure("--schema goes without a target, which says its schema itself", exit_code=WRONG_USE)
        if place.target is not None:
            finds.walk(load(place.target, app_dir=place.app_dir))
        else:
            await _discover(finds)
        yield finds.rooms()
    finally:
        await finds.close()


class _Finds:
    """What was found so far, by kind, and what has to be closed in the end."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.stored: list[tuple[Room, Sessionmaker | None]] = []
        self.streams: list[Stream] = []
        self.ages: dict[str, timedelta] = {}
        self.services: list[Service] = []
        self.worker: Worker | None = None
        self.sessionmakers: list[Sessionmaker] = []
        self.asked = None if place.database_url is None else self.connect(place.database_url)

    def connect(self, url: str) -> Sessionmaker:
        made = async_sessionmaker(connect(url))
        self.sessionmakers.append(made)
        return made

    def walk(self, found: object, *, within: bool = False) -> None:
        """Take what an application's object has in it. Within a Worker or a list, others are passed over."""
        if isinstance(found, Service):
            self.services.append(found)
        if isinstance(found, (list, tuple, set, frozenset)):
            for each in found:
                self.walk(each, within=True)
        elif isinstance(found, Relay):
            self.add(found.outbox, found.sessionmaker)
        elif isinstance(found, Retention):
            for prunable, age in found.keep.items():
                if isinstance(prunable, (Outbox, IdempotencyKeys, Inbox, Effects)) or is_webhooks(prunable):
                    self.add(prunable, found.sessionmaker)
                    self.ages[prunable.table.fullname] = age
        elif isinstance(found, (Outbox, IdempotencyKeys, Inbox)):
            self.add(found, None)
        elif isinstance(found, Effects):
            self.add(found, found.sessionmaker)
        elif isinstance(found, AsyncEngine):
            self.sessionmakers.append(async_sessionmaker(found))
        elif isinstance(found, async_sessionmaker):
            self.sessionmakers.append(found)
        elif is_webhook_worker(found):
            self.add(found.webhooks, found.sessionmaker)
        elif is_webhooks(found):
            self.add(found, None)
        elif is_consumer(found):
            self.add_stream(found)
        elif isinstance(found, Worker):
            self.worker = found
            for each in found.services:
                self.walk(each, within=True)
        elif not within:
            raise Failure(
                f"{self.place.target!r} is of type {type(found).__name__}; name a Worker, one of oncely's "
                "objects (Relay, Outbox, StreamConsumer, Inbox, …) or a list of them",
                exit_code=WRONG_USE,
            )

    def add(self, room: Room, sessionmaker: Sessionmaker | None) -> None:
        self.stored.append((room, sessionmaker))
        if sessionmaker is not None:
            self.sessionmakers.append(sessionmaker)

    def add_stream(self, consumer: StreamConsumer) -> None:
        for handler in consumer.handlers:
            if isinstance(handler, InboxHandler):
                self.add(handler.inbox, handler.sessionmaker)
        redis = consumer.redis
        if self.place.redis_url is not None:
            redis = _redis(self.place.redis_url)
        self.open_stream(redis, consumer.stream, consumer.dead_letter_stream)

    def open_stream(self, redis: Redis | RedisCluster, name: str, dead_letter_stream: str | None) -> None:
        from oncely.streams import DeadLetters

        letters = DeadLetters(redis, stream=name, dead_letter_stream=dead_letter_stream)
        if all(other.dead_letters.dead_letter_stream != letters.dead_letter_stream for other in self.streams):
            self.streams.append(Stream(name, redis, letters))

    def rooms(self) -> Rooms:
        place = self.place
        stored = [self.reached(*each) for each in self.stored]
        streams = [stream for stream in self.streams if place.has_stream(stream.name)]
        chosen: dict[tuple[str, int], Stored[Any]] = {
            (each.name, id(each.sessionmaker)): each
            for each in reversed(stored)
            if place.has_table(each.room.table.name, each.name)
        }
        by_name = list(reversed(chosen.values()))
        for name in place.tables:
            if not any(name in (each.room.table.name, each.name) for each in by_name):
                raise Failure(f"there is no table {name!r} of oncely's here")
        for name in place.streams:
            if name not in {stream.name for stream in streams}:
                raise Failure(f"there is no stream {name!r} here")
        if not by_name and not streams:
            raise Failure("there is nothing of oncely's here")

        def of(kind: type[Any]) -> list[Stored[Any]]:
            return [each for each in by_name if isinstance(each.room, kind)]

        return Rooms(
            outboxes=of(Outbox),
            keys=of(IdempotencyKeys),
            inboxes=of(Inbox),
            effects=of(Effects),
            webhooks=[each for each in by_name if is_webhooks(each.room)],
            streams=streams,
            ages=self.ages,
            services=self.services,
            worker=self.worker,
        )

    def reached(self, room: Room, own: Sessionmaker | None) -> Stored[Any]:
        sessionmaker = self.asked or own or self.beside() or self.ambient()
        if sessionmaker is None:
            raise Failure(
                f"{room.table.fullname} has no sessionmaker of its own: give --database-url or "
                "ONCELY_DATABASE_URL, or name a list with a sessionmaker in it",
                exit_code=WRONG_USE,
            )
        if isinstance(room, Effects):
            room = room.bind(sessionmaker)
        return Stored(room, sessionmaker)

    def beside(self) -> Sessionmaker | None:
        """The one sessionmaker of the target; with several, nobody can tell."""
        different = {id(sessionmaker): sessionmaker for sessionmaker in self.sessionmakers}
        return next(iter(different.values())) if len(different) == 1 else None

    def ambient(self) -> Sessionmaker | None:
        url = self.place.ambient_database_url
        return None if url is None else self.connect(url)

    async def close(self) -> None:
        engines: set[Engine] = set()
        for sessionmaker in self.sessionmakers:
            async with sessionmaker() as session:
                binds = [session.sync_session.bind]
            for room, own in self.stored:
                if own is sessionmaker:
                    binds.append(await bind_of(sessionmaker, room.table))
            engines.update(bind for bind in binds if isinstance(bind, Engine))
        for engine in engines:
            await AsyncEngine(engine).dispose()
        for stream in self.streams:
            await stream.redis.aclose()


def _redis(url: str) -> Redis:
    try:
        from redis.asyncio import Redis
    except ModuleNotFoundError:
        raise Failure("streams need redis: pip install 'oncely[redis]'") from None
    try:
        return Redis.from_url(url)
    except ValueError:
        raise Failure(
            "Redis's URL cannot be read; it has the form redis://user:password@host:6379/0",
            exit_code=WRONG_USE,
        ) from None


async def _discover(finds: _Finds) -> None:
    """Take what there is without a target: tables that are found, and streams that are named."""
    place = finds.place
    redis_url = place.redis_url or place.ambient_redis_url
    if place.streams:
        if redis_url is None:
            raise Failure("a stream needs --redis-url or ONCELY_REDIS_URL, or a target", exit_code=WRONG_USE)
        redis = _redis(redis_url)
        for name in place.streams:
            finds.open_stream(redis, name, None)
        if not place.tables:
            return
    sessionmaker = finds.asked or finds.ambient()
    if sessionmaker is None:
        raise Failure(
            "give a target (package.module:attribute), or --database-url or ONCELY_DATABASE_URL",
            exit_code=WRONG_USE,
        )
    for room in await discover(sessionmaker, schema=place.schema):
        finds.add(room, sessionmaker)
