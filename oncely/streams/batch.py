"""A batch: lanes of entries, run by a bounded set of tasks, and looked after while they run.

A *lane* is a list of entries that run one after another: those of one key, in stream order, or a
single one without a key. When an entry fails, what is left of its lane is held until it is settled.

The tasks come as they are needed: each task that begins makes two more, up to `concurrency`, while
lanes are left. So handlers that never wait cost three tasks a batch, not one an entry. A handler
that changed context variables ends its task, so that no other handler sees them.

Meanwhile the batch acknowledges what is done, several at a time, renews what is not, so that nobody
takes it over, and asks for more when a slow handler would keep the other places empty. A batch that
is cancelled, or told to stop, gives back what has not ended with the count it had before. What it
cannot tell Redis because Redis is away it raises at its end.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from math import inf
from time import monotonic

from oncely.loop import complete
from oncely.streams.desk import Desk
from oncely.streams.entry import Entry, Stage
from oncely.streams.faults import BROKER_ERRORS, is_outage
from oncely.streams.wire import NotAnEvent, decode

__all__ = ["Batch", "Lane", "lanes_of"]

Lane = list[Entry]
_PAUSE = 0.05  # seconds that an acknowledgement may wait for others, and between two looks for more
_PATIENCE = timedelta(days=1)  # as a task group would, a batch waits for a handler that will not end

logger = logging.getLogger("oncely.streams")


def lanes_of(entries: Iterable[Entry]) -> list[Lane]:
    """One lane for each key, in the order given, and one for each entry that has none."""
    lanes: list[Lane] = []
    by_key: dict[bytes, Lane] = {}
    for entry in entries:
        key = entry.key
        if key is None:
            lanes.append([entry])
        elif key in by_key:
            by_key[key].append(entry)
        else:
            by_key[key] = lane = [entry]
            lanes.append(lane)
    return lanes


class Batch:
    """`renew_every` is in seconds. Once `stop` is set no handler is called any more, and after the
    monotonic time `until` no lane is begun; what is left then is given back.

    `more` is awaited when places are empty and all lanes are begun; it returns further lanes, or
    None when there will be none. Entries of keys that are still running line up behind those.
    """

    def __init__(
        self,
        desk: Desk,
        lanes: Iterable[Lane],
        *,
        concurrency: int,
        renew_every: float,
        stop: asyncio.Event,
        until: float = inf,
        more: Callable[[], Awaitable[list[Lane] | None]] | None = None,
    ) -> None:
        self._desk = desk
        self._concurrency = concurrency
        self._renew_every = renew_every
        self._renew_at = monotonic() + renew_every
        self._stop = stop
        self._until = until
        self._more = more
        self._more_at = 0.0
        self._flush_at = monotonic() + _PAUSE
        self._place_is_free = asyncio.Event()
        self._lanes: deque[Lane] = deque()
        self._open_lanes: dict[bytes, Lane] = {}
        self._entries: list[Entry] = []
        self._context = contextvars.copy_context()
        self._tasks: set[asyncio.Task[None]] = set()
        self._bug: BaseException | None = None
        self._outage: Exception | None = None
        self._add_lanes(lanes)

    async def run(self) -> None:
        """Returns when all has ended or was given back."""
        if not self._lanes:
            return
        self._add_task()
        pause = min(_PAUSE, self._renew_every)
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  a coroutine runs in a task
        cancelled_before = task.cancelling()
        try:
            while self._tasks:
                self._place_is_free.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._place_is_free.wait()
                if self._tasks:
                    await self._look_after()
                if task.cancelling() > cancelled_before:  # and on_result has swallowed it
                    raise asyncio.CancelledError
            if self._bug is not None:
                raise self._bug
        except BaseException:
            await complete(self._break_off(), patience=_PATIENCE)
            raise
        await self._put_away()
        if self._outage is not None:
            raise self._outage

    def _add_lanes(self, lanes: Iterable[Lane]) -> None:
        for lane in lanes:
            self._entries += lane
            key = lane[0].key
            if key is not None:
                running = self._open_lanes.get(key)
                if running is not None:
                    running += lane
                    continue
                self._open_lanes[key] = lane
            self._lanes.append(lane)

    def _add_task(self) -> None:
        task = asyncio.create_task(self._work(), context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._place_is_free.set()
        if not task.cancelled() and task.exception() is not None:
            self._bug = task.exception()
            self._lanes.clear()

    async def _work(self) -> None:
        """One task: runs lanes until none is left. All that every entry needs is in this loop."""
        lanes, desk, stop = self._lanes, self._desk, self._stop
        handling, group, done, ok = desk.handling, desk.name, desk.done, desk.ok
        find, around, timed = handling.routes.find, handling.around, handling.reports
        begun, ended = Stage.BEGUN, Stage.ENDED
        failure: BaseException
        is_first, since = True, 0.0
        while lanes and self._outage is None and not stop.is_set() and monotonic() < self._until:
            lane = lanes.popleft()
            if is_first:
                is_first = False
                for _ in range(min(2, len(lanes), self._concurrency - len(self._tasks))):
                    self._add_task()
            for place, entry in enumerate(lane):  # the lane may grow meanwhile
                if place and (stop.is_set() or self._outage is not None):
                    return
                if (not entry.counted or entry.gone is not None) and not await self._begin(lane, place):
                    break
                try:
                    event = decode(entry.fields, entry.attempt, group)
                except NotAnEvent as error:
                    if await desk.refuse(entry, error):
                        continue
                    self._hold(lane, place)
                    break
                entry.stage = begun
                if timed:
                    since = monotonic()
                try:
                    if event is None:
                        pass  # it is for another group
                    elif around is None:
                        for handler in find(event.topic):
                            await handler(event)
                    else:
                        await handling.wrapped(event)
                except asyncio.CancelledError as error:
                    task = asyncio.current_task()
                    if task is not None and task.cancelling():
                        raise
                    failure = error  # the handler's own, no reason for the worker to end
                except Exception as error:  # noqa: BLE001  whatever a handler raises: its attempt has failed
                    failure = error
                else:
                    entry.stage = ended
                    done.append(entry.id)
                    if timed and event is not None:
                        ok.append((event, monotonic() - since))
                    if contextvars.copy_context() != self._context:
                        self._replace_task(lane, place)
                        return
                    continue
                assert event is not None  # noqa: S101  something was called for it, and failed
                if not await desk.failed(entry, event, failure, monotonic() - since if timed else 0.0):
                    self._hold(lane, place)
                    break
                if contextvars.copy_context() != self._context:
                    self._replace_task(lane, place)
                    return
            else:
                if lane[0].key is not None:
                    self._open_lanes.pop(lane[0].key, None)

    async def _begin(self, lane: Lane, place: int) -> bool:
        """Counts the delivery of an entry that was taken over; False when it may not be handled.

        It may be the one that ends the process, so what was handled before is acknowledged first.
        """
        entry = lane[place]
        if entry.gone is None:
            try:
                await self._desk.flush()
                await self._desk.begin(entry)
            except BROKER_ERRORS as error:
                self._outage = error
                return False
        if entry.gone == "stolen":
            entry.stage = Stage.ENDED
            self._hold(lane, place)
            return False
        return True

    def _replace_task(self, lane: Lane, place: int) -> None:
        """A handler has left context variables behind: what comes next runs in another task."""
        key, rest = lane[place].key, lane[place + 1 :]
        if rest:
            self._lanes.appendleft(rest)
        if key is not None:
            self._open_lanes.pop(key, None)
            if rest:
                self._open_lanes[key] = rest
        if self._lanes:
            self._add_task()

    def _hold(self, lane: Lane, place: int) -> None:
        key = lane[place].key
        if key is not None:
            self._open_lanes.pop(key, None)
            self._desk.held.hold(key, lane[place].id, lane[place + 1 :])

    async def _look_after(self) -> None:
        """Acknowledges, renews, asks for more; an outage must not end handlers that run."""
        try:
            now = monotonic()
            if now >= self._flush_at:
                self._flush_at = now + _PAUSE
                await self._desk.flush()
            if now >= self._renew_at:
                self._renew_at = now + self._renew_every
                self._entries = [entry for entry in self._entries if entry.stage is not Stage.ENDED]
                await self._desk.renew(self._entries)
            if not self._lanes and now >= self._more_at and self._has_room():
                await self._ask_for_more(now)
        except BROKER_ERRORS as error:
            if not is_outage(error):
                raise
            self._outage = error

    def _has_room(self) -> bool:
        return (
            self._more is not None
            and len(self._tasks) < self._concurrency
            and self._outage is None
            and not self._stop.is_set()
        )

    async def _ask_for_more(self, now: float) -> None:
        assert self._more is not None  # noqa: S101  _has_room was asked
        lanes = await self._more()
        if lanes is None:
            self._more = None
        elif lanes:
            self._entries = [entry for entry in self._entries if entry.stage is not Stage.ENDED]
            self._add_lanes(lanes)
            if self._lanes:
                self._add_task()
        else:
            self._more_at = now + _PAUSE

    async def _break_off(self) -> None:
        """Cancels the handlers and gives everything back, what was not begun before all else."""
        for task in self._tasks:
            task.cancel()
        try:
            await self._desk.release(entry for entry in self._entries if entry.stage is Stage.WAITING)
            while self._tasks:
                await asyncio.wait(self._tasks)
            await self._put_away()
        except BROKER_ERRORS:
            logger.exception("could not give back what was not handled; it will be taken over")

    async def _put_away(self) -> None:
        await self._desk.release(entry for entry in self._entries if entry.stage is not Stage.ENDED)
