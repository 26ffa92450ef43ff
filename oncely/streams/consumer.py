"""Events out of a stream, into handlers: at least once, in order per key, never lost without a word.

Redis is authoritative for all that matters: which entries are pending, who has them, and how often
each was delivered. A worker that dies leaves nothing else behind. An entry's life:

    unread ──read──▶ pending, attempt 1 ──handled──▶ acknowledged
                        │      ▲
                 failed or     │ due again after retry_after_ms, taken over by any worker,
                 worker died   │ counted when its handler starts, run alone
                        ▼      │
                     pending, attempt n ──Reject, or failed at max_attempts──▶ dead letter

Events of one key that a worker has read are handled one after another, also over failures: those
that follow a failed one wait until it is settled. Across workers of a group there is no such
promise: Redis hands entries to whoever asks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Literal, overload
from uuid import uuid4

from oncely.arguments import check_backoff, check_count, check_duration, check_name
from oncely.backoff import Backoff
from oncely.errors import PublisherUnavailable
from oncely.event import Handler
from oncely.loop import complete, one_at_a_time, run_loop
from oncely.streams.client import Client, check_client
from oncely.streams.deadletters import DeadLetters
from oncely.streams.due import due_times, tried_for
from oncely.streams.faults import BROKER_ERRORS, is_outage
from oncely.streams.group import Group
from oncely.streams.handling import Around, Handling, OnResult
from oncely.streams.in_flight import InFlight
from oncely.streams.lag import GroupLag, lag
from oncely.streams.letter import name_for
from oncely.streams.trimming import Trimmed, trim
from oncely.streams.watch import Watch
from oncely.streams.worker import Worker
from oncely.telemetry.observer import Observer, guarded
from oncely.telemetry.records import DeadLettersMeasured, StreamMeasured

__all__ = ["StreamConsumer"]

_COUNT = 50
_WAIT = 1.0  # seconds that a turn waits for new entries
_LULL = 0.01  # seconds
_LEAST_PATIENCE = timedelta(seconds=1)  # for giving back, which takes a few calls of Redis

logger = logging.getLogger("oncely.streams")


class StreamConsumer:
    """One worker of a consumer group on one stream.

        consumer = StreamConsumer(redis, stream="orders", group="mailer")

        @consumer.subscribe("order.*")
        async def send_mail(event: Event) -> None: ...

        await consumer.run(stop)

    `consumer` is this worker's name in the group. Names of workers that live at the same time must
    differ; the default is one of its own, chosen here: so make a consumer after a fork, not before. A
    worker that starts under the name of one that died or was stopped handles at once what that one left,
    before anything new: so one worker keeps the order of each key over its restarts.

    An entry that was not acknowledged for `retry_after_ms` is delivered again, `max_attempts` times
    in all, and is then moved to `dead_letter_stream` (default: the stream's name and `:dead`).
    `backoff_factor` makes each wait so many times as long as the one before, up to
    `backoff_maximum`. A handler that runs longer keeps its entry: it is renewed, without end unless
    there is a `handler_timeout`; one that takes longer than that is cancelled, and has failed.

    `concurrency` handlers run together. `around(event, call)` wraps each event's handling,
    `on_result(event, result, seconds, error)` is told how it ended, and so is the `observer`, which may
    also put the handlers into the trace in which the event was emitted (see `oncely.telemetry`).

    `count` entries are read at a time: what a worker has read waits there, so with slow handlers and
    several workers choose it near `concurrency`. Once stopped it reads nothing more, gives running
    handlers `grace` to end, cancels the rest, and gives back what was not handled: due at once for
    any worker, with no attempt counted. While Redis is away it tries again by `outage`.
    """

    def __init__(
        self,
        redis: Client,
        *,
        stream: str,
        group: str = "workers",
        consumer: str | None = None,
        retry_after_ms: int = 30_000,
        max_attempts: int = 5,
        concurrency: int = 16,
        dead_letter_stream: str | None = None,
        around: Around | None = None,
        on_result: OnResult | None = None,
        backoff_factor: float = 1.0,
        backoff_maximum: timedelta = timedelta(hours=1),
        count: int = _COUNT,
        grace: timedelta = timedelta(seconds=10),
        outage: Backoff = Backoff(first=timedelta(milliseconds=100), maximum=timedelta(seconds=10)),
        handler_timeout: timedelta | None = None,
        observer: Observer | None = None,
    ) -> None:
        check_name(stream, "stream")
        check_name(group, "group")
        if consumer is not None:
            check_name(consumer, "consumer")
        for name, value in (
            ("count", count),
            ("retry_after_ms", retry_after_ms),
            ("max_attempts", max_attempts),
            ("concurrency", concurrency),
        ):
            check_count(value, name, most=None)
        if not isinstance(backoff_factor, (int, float)):
            raise TypeError(f"backoff_factor must be a number, not {type(backoff_factor).__name__}")
        if backoff_factor < 1:
            raise ValueError(f"backoff_factor must be 1 or more, not {backoff_factor}")
        check_duration(backoff_maximum, "backoff_maximum")
        check_duration(grace, "grace")
        check_backoff(outage, "outage")
        check_client(redis)
        self.redis = redis
        self.stream = stream
        self.group = group
        self.consumer = consumer if consumer is not None else _own_name()
        self.retry_after_ms = retry_after_ms
        self.max_attempts = max_attempts
        self.concurrency = concurrency
        self.count = count
        self.grace = grace
        self.outage = outage
        self.handler_timeout = handler_timeout
        self.waits_for: Literal["broker"] | None = None
        """What the consumer waits for while it is away; of what its handlers need it knows nothing."""
        self.dead_letter_stream = name_for(redis, stream, dead_letter_stream)
        observed = guarded(observer)
        self._watch = None if observed is None else Watch(observed, stream=stream, group=group)
        self._handling = Handling(around, on_result, handler_timeout, self._watch)
        due = due_times(retry_after_ms, max_attempts, backoff_factor, backoff_maximum)
        self.tried_for = tried_for(due, max_attempts)
        """From a message's first attempt to its last, when each of them fails at once."""
        self._group = Group(redis, stream, group, self.consumer, self.dead_letter_stream, due)
        self._in_flight = InFlight(self._group, self._handling, max_attempts)
        self._worker = Worker(
            self._in_flight,
            retry_after=retry_after_ms / 1000,
            concurrency=lambda: self.concurrency,
        )
        self._turn = asyncio.Lock()

    @property
    def name(self) -> str:
        """What a worker's log and health call it."""
        return f"StreamConsumer {self.stream}/{self.group}"

    @property
    def last_success(self) -> datetime | None:
        """When Redis last answered, by this machine's clock. While handlers run that is at each renewal."""
        return self._in_flight.answered_at

    @property
    def handlers(self) -> tuple[Handler, ...]:
        """What was subscribed, in that order."""
        return self._handling.routes.handlers

    @overload
    def subscribe(self, topic: str, handler: None = None) -> Callable[[Handler], Handler]: ...
    @overload
    def subscribe(self, topic: str, handler: Handler) -> Handler: ...
    def subscribe(self, topic: str, handler: Handler | None = None) -> Handler | Callable[[Handler], Handler]:
        """Have events of this topic handled; also a decorator: `@consumer.subscribe("order.paid")`.

        A topic that ends with `*` is a prefix: `"order.*"`, `"*"`. Several handlers of an event run
        in the order in which they were subscribed, and a retry runs all of them again. An event
        that nobody subscribed to is acknowledged, and its topic logged: it is for other groups.
        """

        def subscribe(handler: Handler) -> Handler:
            self._handling.routes.add(topic, handler)
            return handler

        return subscribe if handler is None else subscribe(handler)

    async def run_once(self, *, count: int = _COUNT, block_ms: int | None = None) -> int:
        """Handle up to `count` events: first those that are due again, then new ones.

        Waits up to `block_ms` for new ones when there is nothing to do. Returns how many entries
        were settled: acknowledged, made dead letters, or found to have been trimmed away. Raises
        what Redis raises while it is away; what is pending then is taken over later. A consumer without
        handlers is refused, as by `run`.
        """
        self._check_handlers()
        check_count(count, "count")
        if block_ms is not None:
            check_count(block_ms, "block_ms", least=0)
        until = monotonic() + (block_ms or 0) / 1000
        async with self._turn:
            before = self._in_flight.settled
            try:
                while not await self._worker.turn(count, until=until) and monotonic() < until:
                    pass
            finally:
                await self._worker.close()
            return self._in_flight.settled - before

    @one_at_a_time
    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Handle events until `stop` is set or the task is cancelled.

        While Redis is away it is waited for; other errors of Redis end it. A consumer without
        handlers is refused (ValueError): it would acknowledge everything.
        """
        self._check_handlers()
        self._worker.stop = stop if stop is not None else asyncio.Event()

        async def tick() -> bool:
            begun = monotonic()
            async with self._turn:
                found = await self._worker.turn(self.count, until=begun + _WAIT, running=True)
            self.waits_for = None
            self._in_flight.answered_at = datetime.now(UTC)
            return found or monotonic() > begun + _LULL

        async def lull() -> None:
            await asyncio.sleep(_LULL)  # nothing to do and nothing to wait on

        try:
            await run_loop(
                tick,
                stop=self._worker.stop,
                idle=lull,
                grace=self.grace,
                backoff=self.outage,
                is_outage=is_outage,
                on_outage=self._note_outage,
            )
        finally:
            patience = max(self.grace, _LEAST_PATIENCE)
            await complete(self._leave(patience), patience=3 * patience)
            self._worker.stop = asyncio.Event()

    async def trim(self, *, keep: int = 100_000, force: bool = False) -> Trimmed:
        """Remove the oldest entries of the stream until `keep` are left, and none that is needed.

        Needed is what any group has not read, or read and not acknowledged. `force=True` removes
        that too; the result says how much of it, and whose it was.
        """
        check_count(keep, "keep", least=0, most=None)
        await self._group.make()
        return await trim(self._group.redis, self.stream, keep=keep, force=force)

    async def lag(self) -> dict[str, GroupLag]:
        """How far behind each group of the stream is, by the group's name."""
        return await lag(self._group.redis, self.stream)

    async def measure(self, sessionmaker: object = None) -> list[StreamMeasured | DeadLettersMeasured]:
        """One look at the stream's groups and dead letters, as `oncely.telemetry.Gauges` takes it."""
        try:
            groups, dead = await self.lag(), await self.dead_letters.length()
        except BROKER_ERRORS as error:
            if is_outage(error):
                raise PublisherUnavailable(f"Redis is away: {type(error).__name__}") from error
            raise
        return [
            StreamMeasured(
                stream=self.stream,
                group=group,
                unread=found.unread,
                pending=found.pending,
                oldest_pending=found.oldest_pending or timedelta(0),
            )
            for group, found in groups.items()
        ] + [DeadLettersMeasured(stream=self.stream, dead=dead)]

    @property
    def dead_letters(self) -> DeadLetters:
        """To list, show, replay and discard what no retry could mend."""
        return DeadLetters(self._group.redis, stream=self.stream, dead_letter_stream=self.dead_letter_stream)

    def _check_handlers(self) -> None:
        if not self._handling.routes:
            raise ValueError(
                "no handler is subscribed, so every event would be skipped: call subscribe() first"
            )

    async def _leave(self, patience: timedelta) -> None:
        """Ends what the loop has left behind: a last turn that gives back, and what is held."""
        try:
            async with asyncio.timeout(patience.total_seconds()):
                async with self._turn:
                    pass
        except TimeoutError:
            logger.warning("a handler or a call of Redis has not ended, and is left behind")
        try:
            async with asyncio.timeout(patience.total_seconds()):
                await self._worker.leave()
        except (*BROKER_ERRORS, TimeoutError) as error:
            logger.warning("left without giving everything back, which will be taken over: %r", error)
        finally:
            await self._worker.close()

    def _note_outage(self, error: Exception, delay: timedelta) -> None:
        self.waits_for = "broker"
        logger.warning("Redis is away (%s); trying again in %.1f s", error, delay.total_seconds())
        if self._watch is not None:
            self._watch.away(error, delay)


def _own_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
