"""A batch: lanes of entries, run by a bounded set of tasks, and looked after while they run.

A *lane* is a list of entries that run one after another: those of one key, in stream order, or a
single one without a key. When an entry fails, what is left of its lane is held until it is settled.

The tasks come one by one: each task that begins a lane makes the next, up to `concurrency`, while
lanes are left. So handlers that never wait cost two tasks a batch, not one an entry. A handler that
changed context variables ends its task, so that no other handler sees them.

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
from time import monotonic

from oncely.streams.desk import Desk
from oncely.streams.entry import Entry
from oncely.streams.faults import BROKER_ERRORS, is_outage

__all__ = ["Batch", "Lane", "lanes_of"]

Lane = list[Entry]
_PAUSE = 0.05  # seconds that an acknowledgement may wait for others, and between two looks for more

logger = logging.getLogger("oncely.streams")


def lanes_of(entries: Iterable[Entry]) -> list[Lane]:
    """One lane for each key, in the order given, and one for each entry that has none."""
    lanes: list[Lane] = []
    by_key: dict[str, Lane] = {}
    for entry in entries:
        key = entry.event.key
        if key is None:
            lanes.append([entry])
        elif key in by_key:
            by_key[key].append(entry)
        else:
            by_key[key] = lane = [entry]
            lanes.append(lane)
    return lanes


class Batch:
    """`renew_every` is in seconds; `stopping` is asked before each entry.

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
        stopping: Callable[[], bool],
        more: Callable[[], Awaitable[list[Lane] | None]] | None = None,
    ) -> None:
        self._desk = desk
        self._concurrency = concurrency
        self._renew_every = renew_every
        self._renew_at = monotonic() + renew_every
        self._stopping = stopping
        self._more = more
        self._more_at = 0.0
        self._lanes: deque[Lane] = deque()
        self._open_lanes: dict[str, Lane] = {}
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
        try:
            while self._tasks:
                await asyncio.wait(self._tasks, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                if self._tasks:
                    await self._look_after()
            if self._bug is not None:
                raise self._bug
        except BaseException:
            await self._break_off()
            raise
        await self._put_away()
        if self._outage is not None:
            raise self._outage

    def _add_lanes(self, lanes: Iterable[Lane]) -> None:
        for lane in lanes:
            self._entries += lane
            key = lane[0].event.key
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
        if not task.cancelled() and task.exception() is not None:
            self._bug = task.exception()
            self._lanes.clear()

    async def _work(self) -> None:
        alone = True
        while self._lanes and self._outage is None and not self._stopping():
            lane = self._lanes.popleft()
            if alone and self._lanes and len(self._tasks) < self._concurrency:
                alone = False
                self._add_task()
            await self._run_lane(lane)
            if self._is_soiled():
                if self._lanes:
                    self._add_task()
                return

    async def _run_lane(self, lane: Lane) -> None:
        desk, key = self._desk, lane[0].event.key
        for place, entry in enumerate(lane):  # the lane may grow meanwhile
            if place and self._stopping():
                return
            try:
                mine = not entry.stolen and (entry.counted or await desk.begin(entry))
            except BROKER_ERRORS as error:
                self._outage = error
                return
            if not mine:
                if entry.trimmed:
                    continue
                entry.open = False
                self._hold(lane, place)
                return
            entry.begun = True
            begun = monotonic()
            failure: BaseException
            try:
                await desk.handling.handle(entry.event)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                failure = error  # the handler's own, no reason for the worker to end
            except Exception as error:  # noqa: BLE001  whatever a handler raises is its attempt's failure
                failure = error
            else:
                desk.ok(entry, monotonic() - begun)
                if key is not None and place + 1 < len(lane) and self._is_soiled():
                    self._lanes.appendleft(lane[place + 1 :])
                    self._open_lanes[key] = self._lanes[0]
                    return
                continue
            if not await desk.failed(entry, failure, monotonic() - begun):
                self._hold(lane, place)
                return
        if key is not None:
            self._open_lanes.pop(key, None)

    def _is_soiled(self) -> bool:
        """Whether a handler has left context variables behind in this task."""
        return contextvars.copy_context() != self._context

    def _hold(self, lane: Lane, place: int) -> None:
        key = lane[place].event.key
        if key is not None:
            self._open_lanes.pop(key, None)
            self._desk.held.hold(key, lane[place].id, lane[place + 1 :])

    async def _look_after(self) -> None:
        """Acknowledges, renews, asks for more; an outage must not end handlers that run."""
        try:
            await self._desk.flush()
            now = monotonic()
            if now >= self._renew_at:
                self._renew_at = now + self._renew_every
                self._entries = [entry for entry in self._entries if entry.open]
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
            and not self._stopping()
        )

    async def _ask_for_more(self, now: float) -> None:
        assert self._more is not None  # noqa: S101  _has_room was asked
        lanes = await self._more()
        if lanes is None:
            self._more = None
        elif lanes:
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
            await self._desk.release(entry for entry in self._entries if entry.open and not entry.begun)
            while self._tasks:
                await asyncio.wait(self._tasks)
            await self._put_away()
        except BROKER_ERRORS:
            logger.exception("could not give back what was not handled; it will be taken over")

    async def _put_away(self) -> None:
        await self._desk.flush()
        left = [entry for entry in self._entries if entry.open]
        if left:
            await self._desk.release(left)
