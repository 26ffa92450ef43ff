"""A worker's turns: what it takes next, and in what company it runs.

A turn takes over what is due again, or else reads what is new. What was delivered before runs alone,
so that an event that ends the process is charged for that and its neighbours are not. What is new
runs together; while a slow handler runs, more is read for the places that are free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from time import monotonic
from typing import Any

from oncely.streams.batch import Batch, Lane, lanes_of
from oncely.streams.desk import Desk
from oncely.streams.entry import Entry
from oncely.streams.group import Taken, Took
from oncely.streams.reader import Reader
from oncely.streams.wire import RawEntry

__all__ = ["Worker"]

_MOST_HELD = 10_000  # entries behind failed ones; with so many, nothing new is read
_STALE = 10  # times retry_after: so long a worker's name may be silent

logger = logging.getLogger("oncely.streams")


class Worker:
    """`concurrency` is asked anew for each batch; `stopping` before whatever is begun."""

    def __init__(
        self, desk: Desk, *, retry_after: float, concurrency: Callable[[], int], stopping: Callable[[], bool]
    ) -> None:
        self._desk = desk
        self._group = desk.group
        self._reader = Reader(desk.group)
        self._retry_after = retry_after  # seconds
        self._concurrency = concurrency
        self._stopping = stopping
        self._taken: list[Taken] = []  # taken over while others ran: they are the next turn's
        self._look_at = 0.0
        self._reap_at = 0.0

    async def turn(self, count: int, *, until: float = 0.0, running: bool = False) -> bool:
        """Handles up to `count` entries, and more that come meanwhile when `running`.

        Waits for new ones until the monotonic time `until`, when nothing is there. Returns whether
        anything was.
        """
        desk = self._desk
        await desk.flush()
        await desk.check_heads()
        await self._reap()
        took = await self._take(count, over=not running or self._looks())
        found = bool(took.over)
        if took.over:
            self._look_at = 0.0  # there may be more
            await self._run_again(await self._open_taken(took.over))
            await desk.check_heads()
            left = count - len(took.over)
            took = await self._take(left, over=False) if left > 0 else Took([], [])
        elif not took.new and not desk.held.ready:
            took = await self._wait(count, until - monotonic())
        lanes = desk.held.pop_ready() + self._lanes(await self._open_new(took.new))
        await self._run(lanes, self._concurrency(), (lambda: self._more(count)) if running else None)
        return found or bool(took.new or lanes)

    async def leave(self) -> None:
        """Gives back what is held and not handled, and takes this worker's name out of the group."""
        taken, self._taken = self._taken, []
        await self._group.release([(entry.id, entry.deliveries) for entry in taken])
        await self._desk.release(self._desk.held.clear())
        await self._desk.flush()
        await self._group.retire()

    async def close(self) -> None:
        """Closes the connection that it waits on."""
        await self._reader.close()

    def _looks(self) -> bool:
        """Whether it is time to look for what is due again; a busy worker need not at every turn."""
        if self._taken or monotonic() >= self._look_at:
            self._look_at = monotonic() + min(0.5, self._retry_after / 4)
            return True
        return False

    async def _take(self, count: int, *, over: bool) -> Took:
        if self._taken:
            taken, self._taken = self._taken, []
            return Took(taken, [])
        room = 0 if self._stopping() or self._desk.held.waiting >= _MOST_HELD else count
        return await self._unbroken(self._group.take(count, over=over, new=room))

    async def _wait(self, count: int, seconds: float) -> Took:
        if seconds <= 0 or self._stopping() or self._desk.held.waiting >= _MOST_HELD:
            return Took([], [])

        async def read() -> Took:
            return Took([], await self._reader.read(count, min(seconds, self._retry_after)))

        return await self._unbroken(read())

    async def _more(self, count: int) -> list[Lane] | None:
        """Lanes for a batch that has places free; None when something is due that must run alone."""
        took = await self._take(count, over=self._looks())
        if took.over:
            self._taken = took.over
            return None
        return self._lanes(await self._open_new(took.new))

    async def _run_again(self, entries: list[Entry]) -> None:
        """Runs what was delivered before, one at a time; those delivered least often go first, so
        that one that ends the process does not keep the others waiting for ever.

        What was given back without an attempt is as good as new.
        """
        lanes = sorted(self._lanes(entries), key=lambda lane: lane[0].attempt)
        new = [lane for lane in lanes if all(entry.counted for entry in lane)]
        tried = [lane for lane in lanes if not all(entry.counted for entry in lane)]
        try:
            await self._run(new, self._concurrency())
        except asyncio.CancelledError:
            await self._desk.release(entry for lane in tried for entry in lane)
            raise
        await self._run(tried, 1)

    async def _open_taken(self, taken: list[Taken]) -> list[Entry]:
        try:
            return await self._desk.open_taken(taken)
        except asyncio.CancelledError:
            await self._group.release([(entry.id, entry.deliveries) for entry in taken])
            raise

    async def _open_new(self, raw: list[RawEntry]) -> list[Entry]:
        try:
            return await self._desk.open_new(raw)
        except asyncio.CancelledError:
            await self._group.release([(entry.id, 0) for entry in raw])
            raise

    def _lanes(self, entries: Iterable[Entry]) -> list[Lane]:
        held = self._desk.held
        return lanes_of(entries if not held else [entry for entry in entries if not held.keeps(entry)])

    async def _run(
        self,
        lanes: list[Lane],
        concurrency: int,
        more: Callable[[], Coroutine[Any, Any, list[Lane] | None]] | None = None,
    ) -> None:
        batch = Batch(
            self._desk,
            lanes,
            concurrency=concurrency,
            renew_every=self._retry_after / 3,
            stopping=self._stopping,
            more=more,
        )
        await batch.run()

    async def _reap(self) -> None:
        if monotonic() < self._reap_at:
            return
        stale = self._retry_after * _STALE
        self._reap_at = monotonic() + stale
        reaped = await self._group.reap(int(stale * 1000))
        if reaped:
            logger.info("removed %d names of workers that are gone", len(reaped))

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
