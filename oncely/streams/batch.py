"""A batch: lanes of entries, run by a bounded set of tasks, and looked after while they run.

A *lane* is a list of entries that run one after another: those of one key, in stream order, or a
single one without a key. When an entry fails, what is left of its lane is held until it is settled.

The tasks come as they are needed: each task that begins makes two more, up to `concurrency`, while
lanes are left.

Meanwhile the batch acknowledges what is done, several at a time, renews what is not, so that nobody
takes it over, and asks for more when a slow handler would keep the other places empty. A batch that
is cancelled, or told to stop, gives back what has not ended with the count it had before. What it
cannot tell Redis because Redis is away it raises at its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from math import inf
from time import monotonic

from oncely.event import Event
from oncely.loop import complete, is_cancelled
from oncely.streams.entry import Entry, Stage
from oncely.streams.faults import BROKER_ERRORS, is_outage
from oncely.streams.in_flight import InFlight
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
        in_flight: InFlight,
        lanes: Iterable[Lane],
        *,
        concurrency: int,
        renew_every: float,
        stop: asyncio.Event,
        until: float = inf,
        more: Callable[[], Awaitable[list[Lane] | None]] | None = None,
    ) -> None:
        self._in_flight = in_flight
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
        await self._give_back(self._entries)
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
        task = asyncio.create_task(self._work())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._place_is_free.set()
        if not task.cancelled() and task.exception() is not None:
            self._bug = task.exception()
            self._lanes.clear()

    async def _work(self) -> None:
        """One task: runs lanes until none is left."""
        lanes, is_first = self._lanes, True
        while lanes and not self._ends() and monotonic() < self._until:
            lane = lanes.popleft()
            if is_first:
                is_first = False
                for _ in range(min(2, len(lanes), self._concurrency - len(self._tasks))):
                    self._add_task()
            for place, entry in enumerate(lane):  # the lane may grow meanwhile
                if place and self._ends():
                    return
                if not await self._handle(entry):
                    if entry.stage is Stage.ENDED:
                        self._hold(lane, place)
                    break
            else:
                if lane[0].key is not None:
                    self._open_lanes.pop(lane[0].key, None)

    def _ends(self) -> bool:
        """Whether nothing more is begun. A task that was cancelled lives on while its handler does."""
        return self._stop.is_set() or self._outage is not None or is_cancelled()

    async def _handle(self, entry: Entry) -> bool:
        """True when the entry is settled by that, so that what follows of its key may be handled."""
        in_flight = self._in_flight
        if (not entry.counted or entry.gone is not None) and not await self._begin(entry):
            return False
        try:
            event = decode(entry.fields, entry.attempt, in_flight.name)
        except NotAnEvent as error:
            return await in_flight.refuse(entry, error)
        since = monotonic()
        if event is not None:  # or it is for another group
            entry.stage = Stage.BEGUN
            failure = await self._call(event)
            if failure is not None:
                if isinstance(failure, SystemExit):  # it ends the process, and that was its attempt
                    entry.stage = Stage.ENDED
                    return False
                if is_cancelled():
                    return False  # the cancellation's doing, whatever it looks like: it is given back
                return await in_flight.failed(entry, event, failure, monotonic() - since)
        in_flight.handled(entry, event, monotonic() - since)
        return True

    async def _call(self, event: Event) -> BaseException | None:
        """What the event's handlers raised.

        They run in a task of their own: a handler that cancels its task (a leaked timeout), or leaves
        context variables behind, does so to nobody else.
        """
        handling = asyncio.create_task(self._in_flight.handling.handle(event))
        try:
            await handling
        except asyncio.CancelledError as error:
            if not is_cancelled():
                return error  # the handler's own, no reason for the worker to end
            if handling.done() and not handling.cancelled():
                return handling.exception()  # it ended in the very moment
            raise
        except Exception as error:  # noqa: BLE001  whatever a handler raises: its attempt has failed
            return error
        return None

    async def _begin(self, entry: Entry) -> bool:
        """Counts the delivery of an entry that was taken over; False when it may not be handled.

        It may be the one that ends the process, so what was handled before is acknowledged first.
        """
        if entry.gone is None:
            try:
                await self._in_flight.flush()
                await self._in_flight.begin(entry)
            except BROKER_ERRORS as error:
                self._outage = error
                return False
        if entry.gone == "stolen":
            entry.stage = Stage.ENDED
            return False
        return True

    def _hold(self, lane: Lane, place: int) -> None:
        key = lane[place].key
        if key is not None:
            self._open_lanes.pop(key, None)
            self._in_flight.held.hold(key, lane[place].id, lane[place + 1 :])

    async def _look_after(self) -> None:
        """Acknowledges, renews, asks for more; an outage must not end handlers that run."""
        try:
            now = monotonic()
            if now >= self._flush_at:
                self._flush_at = now + _PAUSE
                await self._in_flight.flush()
            if now >= self._renew_at:
                self._renew_at = now + self._renew_every
                self._entries = [entry for entry in self._entries if entry.stage is not Stage.ENDED]
                await self._in_flight.renew(self._entries)
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
            await self._give_back(entry for entry in self._entries if entry.stage is Stage.WAITING)
            while self._tasks:
                await asyncio.wait(self._tasks)
            await self._give_back(self._entries)
        except BROKER_ERRORS:
            logger.exception("could not give back what was not handled; it will be taken over")

    async def _give_back(self, entries: Iterable[Entry]) -> None:
        """Gives back those that have not ended. What comes later of their keys must not get past them."""
        back = [entry for entry in entries if entry.stage is not Stage.ENDED]
        for entry in back:
            if entry.key is not None:
                self._in_flight.held.hold(entry.key, entry.id, ())
        await self._in_flight.release(back)
