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
from typing import Any, TypeVar

from oncely.streams.batch import Batch, Lane, lanes_of
from oncely.streams.desk import Desk
from oncely.streams.entry import Entry
from oncely.streams.group import Taken
from oncely.streams.reader import Reader
from oncely.streams.wire import RawEntry

__all__ = ["Worker"]

_Got = TypeVar("_Got")
_MOST_HELD = 10_000  # entries behind failed ones; with so many, nothing new is read
_STALE = 10  # times retry_after: so long a worker's name may be silent

logger = logging.getLogger("oncely.streams")


class Worker:
    """`concurrency` is asked anew for each batch. Once `stop` is set nothing more is begun."""

    def __init__(self, desk: Desk, *, retry_after: float, concurrency: Callable[[], int]) -> None:
        self.stop = asyncio.Event()
        self._desk = desk
        self._group = desk.group
        self._reader = Reader(desk.group)
        self._retry_after = retry_after  # seconds
        self._concurrency = concurrency
        self._taken: list[Taken] = []  # taken over while others ran: they are the next turn's
        self._look_at = 0.0
        self._renew_at = 0.0
        self._reap_at = 0.0

    async def turn(self, count: int, *, until: float = 0.0, running: bool = False) -> bool:
        """Handles up to `count` entries, and more that come meanwhile when `running`.

        Waits for new ones until the monotonic time `until`, when nothing is there. Returns whether
        anything was.
        """
        desk = self._desk
        await desk.flush()
        await self._tend()
        taken = await self._take_over(count) if not running or self._looks() else []
        if taken:
            self._look_at = 0.0  # there may be more
            await self._run_again(await self._open_taken(taken))
            await desk.check_heads()
        raw = await self._read(count - len(taken))
        if not raw and not taken and not desk.held.ready:
            raw = await self._wait(count, until - monotonic())
        lanes = desk.held.pop_ready() + self._lanes(_new(raw))
        await self._run(lanes, self._concurrency(), (lambda: self._more(count)) if running else None)
        return bool(taken or raw or lanes)

    async def leave(self) -> None:
        """Gives back what is held and not handled, and takes this worker's name out of the group."""
        taken, self._taken = self._taken, []
        await self._group.release(map(_as_it_was, taken))
        # Young, so that they are not taken over before the failed ones that they wait for.
        await self._desk.release(self._desk.held.clear(), young=True)
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

    async def _take_over(self, count: int) -> list[Taken]:
        if self._taken:
            taken, self._taken = self._taken, []
            return taken
        return await self._unbroken(self._group.take_over(count), _as_it_was)

    async def _read(self, count: int) -> list[RawEntry]:
        if count <= 0 or not self._reads():
            return []
        return await self._unbroken(self._group.read(count), _unread)

    async def _wait(self, count: int, seconds: float) -> list[RawEntry]:
        if seconds <= 0 or not self._reads():
            return []
        longest = self._retry_after / 3 if self._desk.held else self._retry_after
        return await self._unbroken(self._reader.read(count, min(seconds, longest)), _unread)

    def _reads(self) -> bool:
        return not self.stop.is_set() and self._desk.held.waiting < _MOST_HELD

    async def _more(self, count: int) -> list[Lane] | None:
        """Lanes for a batch that has places free; None when something is due that must run alone."""
        if self._looks():
            await self._tend()
            self._taken = await self._take_over(count)
            if self._taken:
                return None
        raw = await self._read(count)
        return self._desk.held.pop_ready() + self._lanes(_new(raw))

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
            await self._group.release(map(_as_it_was, taken))
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
            stop=self.stop,
            more=more,
        )
        await batch.run()

    async def _tend(self) -> None:
        """Looks after what waits behind failed entries, and after the names of other workers."""
        now = monotonic()
        await self._desk.check_heads()
        if now >= self._renew_at:
            self._renew_at = now + self._retry_after / 3
            await self._desk.renew(())
        if now >= self._reap_at:
            stale = self._retry_after * _STALE
            self._reap_at = now + stale
            reaped = await self._group.reap(int(stale * 1000))
            if reaped:
                logger.info("removed %d names of workers that are gone", len(reaped))

    async def _unbroken(
        self, getting: Coroutine[Any, Any, list[_Got]], back: Callable[[_Got], tuple[bytes, int]]
    ) -> list[_Got]:
        """What was got. It is not broken off: entries given in that moment would be nobody's.

        Who cancels waits for its end, and what was got is given back: `back` tells each one's id
        and the count it had.
        """
        task = asyncio.ensure_future(getting)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is None:
                await self._group.release(map(back, task.result()))
            raise


def _new(raw: list[RawEntry]) -> list[Entry]:
    return [Entry(entry_id, fields or (), 1, counted=True) for entry_id, fields in raw]


def _unread(entry: RawEntry) -> tuple[bytes, int]:
    return entry[0], 0


def _as_it_was(entry: Taken) -> tuple[bytes, int]:
    return entry.id, entry.deliveries
