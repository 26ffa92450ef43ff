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
import os
import socket
from collections.abc import Callable, Coroutine, Iterable
from datetime import timedelta
from time import monotonic
from typing import Any, overload
from uuid import uuid4

from oncely.event import Handler
from oncely.streams.batch import Batch
from oncely.streams.desk import Desk
from oncely.streams.entry import Entry
from oncely.streams.group import Group, Took
from oncely.streams.handling import Around, Handling, OnResult
from oncely.streams.reader import Reader
from oncely.streams.scripts import Client
from oncely.streams.wire import RawEntry

__all__ = ["StreamConsumer"]

_MOST_HELD = 10_000  # entries behind failed ones; with so many, nothing new is read


class StreamConsumer:
    """One worker of a consumer group on one stream.

        consumer = StreamConsumer(redis, stream="orders", group="mailer")

        @consumer.subscribe("order.*")
        async def send_mail(event: Event) -> None: ...

        await consumer.run(stop)

    `consumer` is this worker's name in the group. Names of workers that live at the same time must
    differ; the default is one of its own. A worker that starts under the name of one that died
    handles what that one left at once.

    An entry that was not acknowledged for `retry_after_ms` is delivered again, `max_attempts` times
    in all, and is then moved to `dead_letter_stream` (default: the stream's name and `:dead`).
    `backoff_factor` makes each wait so many times as long as the one before, up to
    `backoff_maximum`. A handler that runs longer keeps its entry: it is renewed.

    `concurrency` handlers run together. `around(event, call)` wraps each event's handling,
    `on_result(event, result, seconds, error)` is told how it ended.
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
    ) -> None:
        for name, value in (
            ("retry_after_ms", retry_after_ms),
            ("max_attempts", max_attempts),
            ("concurrency", concurrency),
            ("backoff_factor", backoff_factor),
        ):
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value}")
        self.stream = stream
        self.group = group
        self.consumer = consumer if consumer is not None else _own_name()
        self.retry_after_ms = retry_after_ms
        self.max_attempts = max_attempts
        self.concurrency = concurrency
        self.dead_letter_stream = dead_letter_stream if dead_letter_stream is not None else f"{stream}:dead"
        self._handling = Handling(around, on_result)
        due = _due_times(retry_after_ms, max_attempts, backoff_factor, backoff_maximum)
        self._group = Group(redis, stream, group, self.consumer, self.dead_letter_stream, due)
        self._desk = Desk(self._group, self._handling, max_attempts)
        self._reader = Reader(self._group)
        self._turn = asyncio.Lock()

    @overload
    def subscribe(self, topic: str, handler: None = None) -> Callable[[Handler], Handler]: ...
    @overload
    def subscribe(self, topic: str, handler: Handler) -> Handler: ...
    def subscribe(self, topic: str, handler: Handler | None = None) -> Handler | Callable[[Handler], Handler]:
        """Have events of this topic handled; also a decorator: `@consumer.subscribe("order.paid")`.

        A topic that ends with `*` is a prefix: `"order.*"`, `"*"`. Several handlers of an event run
        in the order in which they were subscribed, and a retry runs all of them again. An event
        that nobody subscribed to is acknowledged: it is for other groups.
        """

        def subscribe(handler: Handler) -> Handler:
            self._handling.routes.add(topic, handler)
            return handler

        return subscribe if handler is None else subscribe(handler)

    async def run_once(self, *, count: int = 50, block_ms: int | None = None) -> int:
        """Handle up to `count` events: first those that are due again, then new ones.

        Waits up to `block_ms` for new ones when there is nothing to do. Returns how many entries
        were settled: acknowledged, made dead letters, or found to have been trimmed away. Raises
        what Redis raises while it is away; what is pending then is taken over later.
        """
        if count < 1:
            raise ValueError(f"count must be 1 or more, not {count}")
        until = monotonic() + (block_ms or 0) / 1000
        async with self._turn:
            try:
                while True:
                    settled, found = await self._tick(count, until)
                    if found or monotonic() >= until:
                        return settled
            finally:
                await self._reader.close()

    async def _tick(self, count: int, until: float) -> tuple[int, bool]:
        """One pass: how many entries were settled, and whether any was found."""
        desk = self._desk
        before = desk.settled
        await desk.flush()
        await desk.check_heads()
        took = await self._unbroken(self._group.take(count, new=self._room(count)))
        found = bool(took.over)
        if took.over:
            await self._run_again(await desk.open_taken(took.over))
            await desk.check_heads()
            left = count - len(took.over)
            if left and not self._stopping():
                took = await self._unbroken(self._group.take(1, over=False, new=self._room(left)))
        elif not took.new and not desk.held.ready and not self._stopping():
            seconds = until - monotonic()
            if seconds > 0 and self._room(count):
                took = await self._unbroken(self._wait(count, seconds))
        lanes = desk.held.pop_ready()
        lanes += self._lanes(await self._open_new(took.new))
        await self._run(lanes, self.concurrency)
        return desk.settled - before, found or bool(took.new or lanes)

    async def _run_again(self, entries: list[Entry]) -> None:
        """Runs what was delivered before, one at a time.

        Whichever of them ends the process, it ends alone: no neighbour is charged with an attempt.
        Those delivered least often go first, so that it does not keep the others waiting either.
        What was given back without an attempt is as good as new.
        """
        lanes = sorted(self._lanes(entries), key=lambda lane: lane[0].attempt)
        new = [lane for lane in lanes if all(entry.counted for entry in lane)]
        tried = [lane for lane in lanes if not all(entry.counted for entry in lane)]
        try:
            await self._run(new, self.concurrency)
        except asyncio.CancelledError:
            await self._desk.release(entry for lane in tried for entry in lane)
            raise
        await self._run(tried, 1)

    async def _wait(self, count: int, seconds: float) -> Took:
        return Took([], await self._reader.read(count, seconds))

    async def _open_new(self, raw: list[RawEntry]) -> list[Entry]:
        try:
            return await self._desk.open_new(raw)
        except asyncio.CancelledError:
            await self._group.release([(entry.id, 0) for entry in raw])
            raise

    async def _unbroken(self, taking: Coroutine[Any, Any, Took]) -> Took:
        """What was taken. It is not broken off: entries taken in that moment would be nobody's.

        Who cancels waits for its end, and what was taken is given back.
        """
        task = asyncio.ensure_future(taking)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is None:
                took = task.result()
                back = [(entry.id, entry.deliveries) for entry in took.over]
                await self._group.release(back + [(entry.id, 0) for entry in took.new])
            raise

    def _lanes(self, entries: Iterable[Entry]) -> list[list[Entry]]:
        """One lane for each key, in stream order, and one for each entry that has none."""
        lanes: list[list[Entry]] = []
        by_key: dict[str, list[Entry]] = {}
        held = self._desk.held
        for entry in entries:
            key = entry.event.key
            if key is None:
                lanes.append([entry])
            elif held and held.keeps(entry):
                continue
            elif key in by_key:
                by_key[key].append(entry)
            else:
                by_key[key] = lane = [entry]
                lanes.append(lane)
        return lanes

    async def _run(self, lanes: list[list[Entry]], concurrency: int) -> None:
        batch = Batch(
            self._desk,
            lanes,
            concurrency=concurrency,
            renew_every=self.retry_after_ms / 3000,
            stopping=self._stopping,
        )
        await batch.run()

    def _room(self, count: int) -> int:
        return count if self._desk.held.waiting < _MOST_HELD else 0

    def _stopping(self) -> bool:
        return False


def _own_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"


def _due_times(first_ms: int, attempts: int, factor: float, maximum: timedelta) -> list[int]:
    """How long an entry that was delivered 0, 1, 2, … times stays with whoever has it."""
    longest = max(maximum // timedelta(milliseconds=1), first_ms)
    times = [first_ms, first_ms]
    for _ in range(attempts - 1):
        times.append(int(min(times[-1] * factor, longest)))
    return times
