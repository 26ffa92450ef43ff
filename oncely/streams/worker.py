"""A worker's turns: what it takes next, and in what company it runs.

A turn takes over what is due again, or else reads what is new. What was delivered before runs alone,
so that an event that ends the process is charged for that and its neighbours are not. What is new
runs together; while a slow handler runs, more is read for the places that are free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from datetime import timedelta
from math import inf
from time import monotonic
from typing import Any

from oncely.loop import complete
from oncely.streams.batch import Batch, Lane, lanes_of
from oncely.streams.entry import Entry
from oncely.streams.group import Taken
from oncely.streams.in_flight import InFlight
from oncely.streams.reader import Reader
from oncely.streams.wire import RawEntry

__all__ = ["Worker"]

_ALONE = 1.0  # seconds that retries, which run alone, keep what is new waiting
_MOST_HELD = 10_000  # entries behind failed ones; with so many, nothing new is read
_PATIENCE = timedelta(seconds=30)  # to end a call of Redis whose caller was cancelled
_STALE = 10  # times retry_after: so long a worker's name may be silent

logger = logging.getLogger("oncely.streams")


class Worker:
    """`concurrency` is asked anew for each batch. Once `stop` is set nothing more is begun."""

    def __init__(self, in_flight: InFlight, *, retry_after: float, concurrency: Callable[[], int]) -> None:
        self.stop = asyncio.Event()
        self._in_flight = in_flight
        self._group = in_flight.group
        self._reader = Reader(in_flight.group)
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
        in_flight = self._in_flight
        await in_flight.flush()
        await self._tend()
        taken = await self._take_over(count) if not running or self._looks() else []
        if taken:
            self._look_at = 0.0  # there may be more
            opened = await complete(in_flight.open_taken(taken), patience=_PATIENCE, undo=in_flight.release)
            await self._run_again(self._lanes(opened), until=monotonic() + _ALONE if running else inf)
            await in_flight.check_heads()
        ready = in_flight.held.pop_ready()
        await self._run_again(ready)
        raw = await self._read(count if running else count - len(taken))
        if not raw and not taken and not ready:
            raw = await self._wait(count, until - monotonic())
        more = (lambda: self._more(count)) if running else None
        await self._run(self._lanes(_new(raw)), self._concurrency(), more=more)
        return bool(taken or ready or raw)

    async def leave(self) -> None:
        """Gives back what is held and not handled, and takes this worker's name out of the group."""
        taken, self._taken = self._taken, []
        await self._in_flight.flush()
        await self._group.release(map(_as_it_was, taken))
        await self._in_flight.let_go()
        await self._group.retire()

    async def close(self) -> None:
        """Closes the connection that it waits on."""
        await self._reader.close()

    def _looks(self) -> bool:
        """Whether it is time to look for what is due again; a busy worker need not at every turn."""
        if self._taken or self._group.has_past or monotonic() >= self._look_at:
            self._look_at = monotonic() + min(0.5, self._retry_after / 4)
            return True
        return False

    async def _take_over(self, count: int) -> list[Taken]:
        if self._taken:
            taken, self._taken = self._taken, []
            return taken

        def back(taken: list[Taken]) -> Awaitable[object]:
            return self._group.release(map(_as_it_was, taken))

        # What failed here is pending under this name as well, and has to wait until it is due.
        failed = set(self._in_flight.held.heads) if self._group.has_past else ()
        taken = await complete(self._group.take_over(count), patience=_PATIENCE, undo=back)
        return [entry for entry in taken if entry.id not in failed]

    async def _read(self, count: int) -> list[RawEntry]:
        if count <= 0 or not self._reads():
            return []
        return await self._answer(self._group.read(count))

    async def _wait(self, count: int, seconds: float) -> list[RawEntry]:
        if seconds <= 0 or not self._reads():
            return []
        longest = self._retry_after / 3 if self._in_flight.held else self._retry_after
        return await self._answer(self._reader.read(count, min(seconds, longest)))

    async def _answer(self, reading: Coroutine[Any, Any, list[RawEntry]]) -> list[RawEntry]:
        """What was read. When the answer got lost, it is looked for before anything newer is read."""
        try:
            return await complete(reading, patience=_PATIENCE, undo=self._back)
        except Exception:
            self._group.look_back()
            raise

    def _back(self, raw: list[RawEntry]) -> Awaitable[object]:
        """What was read in the very moment of a cancellation would be pending, and nobody's."""
        return self._group.release((entry_id, 0) for entry_id, _ in raw)

    def _reads(self) -> bool:
        """Whether new entries may be read now: not before what may be its own already."""
        too_many = self._in_flight.held.waiting >= _MOST_HELD
        return not self.stop.is_set() and not too_many and not self._group.has_past

    async def _more(self, count: int) -> list[Lane] | None:
        """Lanes for a batch that has places free; None when something is due that must run alone."""
        if self._looks():
            await self._tend()
            self._taken = await self._take_over(count)
            if self._taken:
                return None
        if not _is_new(self._in_flight.held.ready):
            return None
        raw = await self._read(count)
        return self._in_flight.held.pop_ready() + self._lanes(_new(raw))

    async def _run_again(self, lanes: list[Lane], *, until: float = inf) -> None:
        """Runs what was delivered before, one at a time; those delivered least often go first, so
        that one that ends the process does not keep the others waiting for ever.

        What was given back without an attempt is as good as new.
        """
        lanes = sorted(lanes, key=lambda lane: lane[0].attempt)
        tried = [lane for lane in lanes if not _is_new(lane)]
        try:
            await self._run([lane for lane in lanes if _is_new(lane)], self._concurrency())
        except asyncio.CancelledError:
            release = self._in_flight.release(entry for lane in tried for entry in lane)
            await complete(release, patience=_PATIENCE)
            raise
        await self._run(tried, 1, until=until)

    def _lanes(self, entries: Iterable[Entry]) -> list[Lane]:
        held = self._in_flight.held
        return lanes_of(entries if not held else [entry for entry in entries if not held.keeps(entry)])

    async def _run(
        self,
        lanes: list[Lane],
        concurrency: int,
        *,
        until: float = inf,
        more: Callable[[], Coroutine[Any, Any, list[Lane] | None]] | None = None,
    ) -> None:
        batch = Batch(
            self._in_flight,
            lanes,
            concurrency=concurrency,
            renew_every=self._retry_after / 3,
            stop=self.stop,
            until=until,
            more=more,
        )
        await batch.run()

    async def _tend(self) -> None:
        """Looks after what waits behind failed entries, and after the names of other workers."""
        now = monotonic()
        await self._in_flight.check_heads()
        if now >= self._renew_at:
            self._renew_at = now + self._retry_after / 3
            await self._in_flight.renew(())
        if now >= self._reap_at:
            stale = self._retry_after * _STALE
            self._reap_at = now + stale
            reaped = await self._group.reap(int(stale * 1000))
            if reaped:
                logger.info("removed %d names of workers that are gone", len(reaped))


def _new(raw: list[RawEntry]) -> list[Entry]:
    return [Entry(entry_id, fields or (), 1, counted=True) for entry_id, fields in raw]


def _is_new(lane: Iterable[Entry]) -> bool:
    """Whether no entry of it may have been handled before."""
    return all(entry.counted for entry in lane)


def _as_it_was(entry: Taken) -> tuple[bytes, int]:
    return entry.id, entry.deliveries
