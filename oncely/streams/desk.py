"""What a worker has taken and not yet put away: results on their way to Redis, and what it must keep.

Nothing is reported before it is true: "ok" when the acknowledgement was accepted, "dead" when the
dead letter was written. What cannot be told to Redis stays here: acknowledgements for the next try,
everything else pending, to be taken over and found as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from oncely.errors import Reject
from oncely.event import Event
from oncely.streams.entry import Entry
from oncely.streams.faults import BROKER_ERRORS
from oncely.streams.group import Begun, Group, Taken
from oncely.streams.handling import Handling
from oncely.streams.held import HeldKeys
from oncely.streams.letter import compose
from oncely.streams.wire import Fields, NotAnEvent, RawEntry, decode

__all__ = ["Desk"]

logger = logging.getLogger("oncely.streams")


class Desk:
    """`settled` counts what was acknowledged, buried or found lost, ever."""

    def __init__(self, group: Group, handling: Handling, max_attempts: int) -> None:
        self.group = group
        self.handling = handling
        self.max_attempts = max_attempts
        self.held = HeldKeys()
        self.settled = 0
        self._name = group.name.encode()
        self._done: list[tuple[bytes, Event | None, float]] = []  # handled, not yet acknowledged

    async def open_new(self, raw: Iterable[RawEntry]) -> list[Entry]:
        """New entries, decoded; what is no event goes to the dead letters."""
        opened = []
        for entry_id, fields in raw:
            entry = await self._open(entry_id, fields or (), 1, counted=True)
            if entry is not None:
                opened.append(entry)
        return opened

    async def open_taken(self, taken: Iterable[Taken]) -> list[Entry]:
        """Entries taken over; what was trimmed, is no event or has had its attempts is put away.

        A held one may be among them when nobody renewed it: it is still held, and young again.
        """
        opened = []
        for entry_id, count, fields in taken:
            if entry_id in self.held:
                continue
            if fields is None:
                logger.warning("entry %s was trimmed away while it was pending", entry_id.decode())
                await self._lost(None)
                continue
            counted = count == 0  # given back uncounted, and counted again when it was taken over
            entry = await self._open(entry_id, fields, 1 if counted else count + 1, counted=counted)
            if entry is None:
                continue
            if count < self.max_attempts:
                opened.append(entry)
            else:
                entry.event.attempt = entry.attempt = count
                await self._bury_entry(entry, RuntimeError(f"delivered {count} times, and no attempt ended"))
        return opened

    def ok(self, entry: Entry, seconds: float) -> None:
        """The entry was handled: it is acknowledged with the next flush."""
        entry.open = False
        self._done.append((entry.id, entry.event, seconds))

    async def failed(self, entry: Entry, error: BaseException, seconds: float) -> bool:
        """An attempt has failed; True when the entry is settled by that, and its key may go on."""
        entry.open = False
        if entry.trimmed:
            await self._lost(entry.event, seconds, error)
            return True
        if isinstance(error, Reject) or entry.attempt >= self.max_attempts:
            return await self._bury_entry(entry, error, seconds)
        logger.warning(
            "attempt %d of %d on %r failed", entry.attempt, self.max_attempts, entry.event, exc_info=error
        )
        await self.handling.report(entry.event, "retry", seconds, error)
        return False

    async def begin(self, entry: Entry) -> bool:
        """Counts the delivery of an entry that was taken over; False when it may not be handled."""
        begun = await self.group.begin(entry.id, entry.attempt)
        entry.open = begun is Begun.YES
        entry.stolen = begun is Begun.STOLEN
        if begun is Begun.TRIMMED:
            entry.trimmed = True
            await self._lost(entry.event)
        return entry.open

    async def flush(self) -> None:
        """Acknowledges what was handled. Raises what Redis raises, and keeps it then."""
        while self._done:
            done = self._done[:]
            await self.group.acknowledge([entry_id for entry_id, _, _ in done])
            self.settled += len(done)
            del self._done[: len(done)]
            if self.handling.reports:
                for _, event, seconds in done:
                    if event is not None:
                        await self.handling.report(event, "ok", seconds)

    async def renew(self, entries: Iterable[Entry]) -> None:
        """Keeps these entries, and the held ones, from being taken over; marks those it cannot."""
        running = [entry for entry in entries if entry.open and not entry.stolen and not entry.trimmed]
        ids = [entry.id for entry in running] + [entry.id for entry in self.held.followers]
        if not ids:
            return
        stolen, trimmed = await self.group.renew(ids)
        for entry in running:
            entry.stolen = entry.id in stolen
            entry.trimmed = entry.id in trimmed
            if entry.stolen or entry.trimmed:
                logger.warning("%r is no longer this worker's while it is handled here", entry.event)
        self.held.stolen(stolen)
        for entry in self.held.dropped(trimmed):
            await self._lost(entry.event)

    async def release(self, entries: Iterable[Entry]) -> None:
        """Gives entries back that were not handled, with no attempt counted."""
        mine = {entry.id: entry for entry in entries if not entry.stolen}
        for entry in mine.values():
            entry.open = False
        for entry_id in await self.group.release([(entry.id, entry.attempt - 1) for entry in mine.values()]):
            await self._lost(mine[entry_id].event)

    async def check_heads(self) -> None:
        """Finds out which keys need not wait any more, and that what waited there is still ours."""
        if self.held.heads:
            heads = self.held.heads
            self.held.settled(set(heads) - await self.group.still_pending(heads))
        if self.held.ready:
            await self.renew(())

    async def _open(self, entry_id: bytes, fields: Fields, attempt: int, *, counted: bool) -> Entry | None:
        try:
            event = decode(fields, attempt, self._name)
        except NotAnEvent as error:
            await self._bury(entry_id, fields, None, attempt, error)
            return None
        if event is None:  # for another group: nothing to do, and nothing to report
            self._done.append((entry_id, None, 0.0))
            return None
        return Entry(entry_id, fields, event, counted=counted)

    async def _bury_entry(self, entry: Entry, error: BaseException, seconds: float = 0.0) -> bool:
        return await self._bury(entry.id, entry.fields, entry.event, entry.attempt, error, seconds)

    async def _bury(
        self,
        entry_id: bytes,
        fields: Fields,
        event: Event | None,
        attempts: int,
        error: BaseException,
        seconds: float = 0.0,
    ) -> bool:
        """True when the entry is a dead letter now. When it cannot be made one, it stays pending."""
        what = repr(event) if event is not None else f"entry {entry_id.decode()}"
        words = compose(fields, error, attempts=attempts, group=self.group.name, entry=entry_id)
        try:
            buried = await self.group.bury(entry_id, words)
        except BROKER_ERRORS:
            logger.exception("%s stays pending: no dead letter could be written", what)
            buried = False
        if not buried:
            await self.handling.report(event, "retry", seconds, error)
            return False
        self.settled += 1
        logger.error("%s is a dead letter now", what, exc_info=error)
        await self.handling.report(event, "dead", seconds, error)
        return True

    async def _lost(
        self, event: Event | None, seconds: float = 0.0, error: BaseException | None = None
    ) -> None:
        self.settled += 1
        await self.handling.report(event, "lost", seconds, error)
