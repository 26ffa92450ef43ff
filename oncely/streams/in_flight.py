"""What a worker has taken and not yet put away: results on their way to Redis, and what it must keep.

Nothing is reported before it is true: "ok" when the acknowledgement was accepted, "dead" when the
dead letter was written. What cannot be told to Redis stays here: acknowledgements for the next try,
everything else pending, to be taken over and found as it is.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from oncely.errors import Reject
from oncely.event import Event
from oncely.streams.entry import Entry, Stage
from oncely.streams.faults import BROKER_ERRORS
from oncely.streams.group import Begun, Group, Taken
from oncely.streams.handling import Handling
from oncely.streams.held import HeldKeys
from oncely.streams.letter import compose
from oncely.streams.wire import NotAnEvent, decode

__all__ = ["InFlight"]

logger = logging.getLogger("oncely.streams")


class InFlight:
    """`settled` counts what was acknowledged, buried or found lost, ever.

    `answered_at` is when Redis last answered, by this machine's clock.
    """

    def __init__(self, group: Group, handling: Handling, max_attempts: int) -> None:
        self.group = group
        self.handling = handling
        self.max_attempts = max_attempts
        self.held = HeldKeys()
        self.settled = 0
        self.answered_at: datetime | None = None
        self.name = group.name.encode()
        self._done: list[bytes] = []  # handled, and to be acknowledged
        self._ok: list[tuple[Event, float]] = []  # to be reported then, with the seconds it took
        self._told: deque[tuple[Event, float]] = deque()  # acknowledged, and to be reported
        self._back: dict[bytes, Entry] = {}  # not handled, and to be given back

    async def open_taken(self, taken: Sequence[Taken]) -> list[Entry]:
        """Entries taken over; what was trimmed, or has had all its attempts, is put away.

        A held one may be among them when nobody renewed it: it is still held, and young again.
        """
        opened = []
        if self.handling.watch is not None:
            self.handling.watch.taken_over(sum(entry.id not in self.held for entry in taken))
        for entry_id, deliveries, fields in taken:
            if entry_id in self.held:
                continue
            if fields is None:
                logger.warning("entry %s was trimmed away while it was pending", entry_id.decode())
                await self._lost(None)
                continue
            counted = deliveries == 0  # given back uncounted, and counted when it was taken over
            entry = Entry(entry_id, fields, 1 if counted else deliveries + 1, counted=counted)
            if deliveries < self.max_attempts:
                opened.append(entry)
                continue
            entry.attempt = deliveries
            error = RuntimeError(
                f"delivered {deliveries} times: its workers died, or its dead letter could not be written"
            )
            await self._bury(entry, self._event(entry), error, 0.0)
        return opened

    def handled(self, entry: Entry, event: Event | None, seconds: float) -> None:
        """Its handlers have ended well, or it is for another group: to be acknowledged, and reported."""
        entry.stage = Stage.ENDED
        self._done.append(entry.id)
        if event is not None and self.handling.reports:
            self._ok.append((event, seconds))

    async def failed(self, entry: Entry, event: Event, error: BaseException, seconds: float) -> bool:
        """An attempt has failed; True when the entry is settled by that, and its key may go on."""
        entry.stage = Stage.ENDED
        if entry.gone == "trimmed":
            await self._lost(event, seconds, error)
            return True
        if isinstance(error, Reject) or entry.attempt >= self.max_attempts:
            return await self._bury(entry, event, error, seconds)
        logger.warning(
            "attempt %d of %d on %r failed", entry.attempt, self.max_attempts, event, exc_info=error
        )
        await self.handling.report(event, "retry", seconds, error)
        return False

    async def refuse(self, entry: Entry, error: NotAnEvent) -> bool:
        """The entry is no event, which no retry can mend; True when it is a dead letter now."""
        entry.stage = Stage.ENDED
        return await self._bury(entry, None, error, 0.0)

    async def begin(self, entry: Entry) -> None:
        """Counts the delivery of an entry that was taken over, or finds that it is gone."""
        begun = await self.group.begin(entry.id, entry.attempt)
        if begun is Begun.STOLEN:
            entry.gone = "stolen"
        elif begun is Begun.TRIMMED:
            entry.gone = "trimmed"  # it is in hand still, so it is handled

    async def flush(self) -> None:
        """Acknowledges what was handled, gives back what was released. Keeps both while Redis is away."""
        while self._done:
            done, ok = self._done, self._ok
            self._done, self._ok = [], []
            try:
                await self.group.acknowledge(done)
            except BaseException:
                self._done = done + self._done
                self._ok = ok + self._ok
                raise
            self.settled += len(done)
            self.answered_at = datetime.now(UTC)
            self._told += ok
        while self._told:
            event, seconds = self._told.popleft()
            await self.handling.report(event, "ok", seconds)
        while self._back:
            back = self._back.copy()
            trimmed = await self.group.release((entry.id, entry.attempt - 1) for entry in back.values())
            for entry_id, entry in back.items():
                self._back.pop(entry_id, None)
                if entry_id in trimmed:
                    await self._lost(self._event(entry))

    async def renew(self, entries: Iterable[Entry]) -> None:
        """Keeps these entries, and the held ones, from being taken over; marks those it cannot."""
        kept = {entry.id: entry for entry in entries if entry.gone is None}
        ids = [*kept, *(entry.id for entry in self.held.followers)]
        if not ids:
            return
        stolen, trimmed = await self.group.renew(ids)
        self.answered_at = datetime.now(UTC)
        for entry in kept.values():
            if entry.stage is not Stage.ENDED and (entry.id in stolen or entry.id in trimmed):
                entry.gone = "stolen" if entry.id in stolen else "trimmed"
                logger.warning("entry %s was %s while this worker had it", entry.id.decode(), entry.gone)
        self.held.stolen(stolen)
        for entry in self.held.dropped(trimmed):
            await self._lost(self._event(entry))

    async def release(self, entries: Iterable[Entry]) -> None:
        """Gives entries back that were not handled: due at once, and no attempt counted."""
        for entry in entries:
            entry.stage = Stage.ENDED
            if entry.gone is None:
                self._back[entry.id] = entry
        await self.flush()

    async def let_go(self) -> None:
        """Gives back what is held, young: not to be taken over before the failed ones it waits for."""
        held = {entry.id: entry for entry in self.held.clear()}
        counts = [(entry.id, entry.attempt - 1) for entry in held.values()]
        for entry_id in await self.group.release(counts, young=True):
            await self._lost(self._event(held[entry_id]))

    async def check_heads(self) -> None:
        """Finds out which keys need not wait any more, and that what waited there is still ours."""
        if self.held.heads:
            heads = self.held.heads
            self.held.settled(set(heads) - await self.group.still_pending(heads))
        if self.held.ready:
            await self.renew(())

    def _event(self, entry: Entry) -> Event | None:
        try:
            return decode(entry.fields, entry.attempt, self.name)
        except NotAnEvent:
            return None

    async def _bury(self, entry: Entry, event: Event | None, error: BaseException, seconds: float) -> bool:
        """True when the entry is a dead letter now. When it cannot be made one, it stays pending."""
        what = repr(event) if event is not None else f"entry {entry.id.decode()}"
        words = compose(entry.fields, error, attempts=entry.attempt, group=self.group.name, entry=entry.id)
        try:
            buried = await self.group.bury(entry.id, words)
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
