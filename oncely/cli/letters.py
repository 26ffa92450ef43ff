"""Dead letters in one vocabulary: dead events, dead letters of streams, webhooks that ended badly.

    kind      id            topic    replay                      discard
    outbox    a UUID        topic    due at once                 deleted
    stream    1700000-0     topic    at the end of its stream    deleted
    webhook   a UUID        type     pending for a day           quarantined ones become rejected

Replaying and discarding take the ids that were looked for before, in batches, each in a transaction of
its own. What has changed in between (replayed by others, locked by somebody) is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, TypedDict
from uuid import UUID

from oncely.cli.failure import WRONG_USE, Failure
from oncely.cli.rooms import Rooms, Stored, Stream
from oncely.deadletters import DeadEvent
from oncely.outbox import Outbox

if TYPE_CHECKING:
    from oncely.streams import DeadLetter
    from oncely.webhooks import WebhookRecord, Webhooks

__all__ = ["BATCH", "Chosen", "Letter", "Letters", "letters_of"]

BATCH = 1_000
"""The most that one transaction replays or discards."""

_ENDED_BADLY = ("expired", "rejected", "quarantined")
_ENTRY = re.compile(r"[0-9]+-[0-9]+", re.ASCII)


class _Terms(TypedDict):
    error: str | None
    since: datetime | None
    until: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which dead letters: those that match all that is given. `since` and `until` bound the time of death."""

    ids: Sequence[str] | None = None
    topic: str | None = None
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        for each in self.ids or ():
            if _uuid(each) is None and not _ENTRY.fullmatch(each):
                hint = "; a target comes before the ids" if ":" in each else ""
                raise Failure(f"{each!r} is no id of a dead letter{hint}", exit_code=WRONG_USE)

    @property
    def is_everything(self) -> bool:
        return self == Chosen()

    def terms(self) -> _Terms:
        """What every room calls by the same name."""
        return {"error": self.error, "since": self.since, "until": self.until}

    def uuids(self) -> list[UUID] | None:
        """The ids that outboxes and webhooks have."""
        return None if self.ids is None else [id_ for each in self.ids if (id_ := _uuid(each)) is not None]

    def entries(self) -> list[str] | None:
        """The ids that streams have."""
        return None if self.ids is None else [each for each in self.ids if _ENTRY.fullmatch(each)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """One dead letter in a list. `state` is a webhook's; `error` the class and message, or "HTTP 410"."""

    kind: str
    where: str
    id: str
    topic: str | None
    state: str
    attempts: int
    error: str | None
    dead_at: datetime


class Letters(Protocol):
    """The dead letters of one room."""

    kind: str

    @property
    def name(self) -> str: ...

    async def list(self, chosen: Chosen, limit: int) -> Sequence[Letter]:
        """The chosen ones, oldest first."""
        ...

    async def ids(self, chosen: Chosen, limit: int, *, to_discard: bool) -> Sequence[str]:
        """The ids of those that replay, or discard, would take."""
        ...

    async def show(self, id_: str, *, payload: bool) -> dict[str, Any] | None:
        """All that is known of one."""
        ...

    async def replay(self, ids: Sequence[str]) -> int: ...

    async def discard(self, ids: Sequence[str]) -> int: ...


def letters_of(rooms: Rooms, *, group: str | None) -> list[Letters]:
    """The rooms that have dead letters."""
    return [
        *(OutboxLetters(at) for at in rooms.outboxes),
        *(StreamLetters(at, group) for at in rooms.streams),
        *(WebhookLetters(at) for at in rooms.webhooks),
    ]


class OutboxLetters:
    """Dead events."""

    kind = "outbox"

    def __init__(self, at: Stored[Outbox]) -> None:
        self.at = at
        self.name = at.name

    async def list(self, chosen: Chosen, limit: int) -> Sequence[Letter]:
        return [self._letter(event) for event in await self._dead(chosen, limit)]

    async def ids(self, chosen: Chosen, limit: int, *, to_discard: bool) -> Sequence[str]:
        async with self.at.sessionmaker() as session:
            found = await self.at.room.dead_ids(
                session, ids=chosen.uuids(), topic=chosen.topic, limit=limit, **chosen.terms()
            )
        return [str(each) for each in found]

    async def show(self, id_: str, *, payload: bool) -> dict[str, Any] | None:
        found = await self._dead(Chosen(ids=[id_]), 1)
        if not found:
            return None
        event = found[0]
        facts = _facts(self._letter(event)) | {"key": event.key, "created_at": event.created_at}
        return facts | ({"payload": event.payload_json} if payload else {})

    async def replay(self, ids: Sequence[str]) -> int:
        async with self.at.sessionmaker() as session, session.begin():
            return await self.at.room.replay(session, ids=map(UUID, ids))

    async def discard(self, ids: Sequence[str]) -> int:
        async with self.at.sessionmaker() as session, session.begin():
            return await self.at.room.discard(session, ids=map(UUID, ids))

    async def _dead(self, chosen: Chosen, limit: int) -> Sequence[DeadEvent]:
        async with self.at.sessionmaker() as session:
            return await self.at.room.dead(
                session, ids=chosen.uuids(), topic=chosen.topic, limit=limit, **chosen.terms()
            )

    def _letter(self, event: DeadEvent) -> Letter:
        return Letter(
            kind=self.kind,
            where=self.name,
            id=str(event.id),
            topic=event.topic,
            state="dead",
            attempts=event.attempts,
            error=event.error,
            dead_at=event.dead_at,
        )


class StreamLetters:
    """The dead letters of a stream, of all its groups or of one."""

    kind = "stream"

    def __init__(self, at: Stream, group: str | None) -> None:
        self.letters = at.dead_letters
        self.name = at.name
        self.group = group

    async def list(self, chosen: Chosen, limit: int) -> Sequence[Letter]:
        return [self._letter(letter) for letter in await self._dead(chosen, limit)]

    async def ids(self, chosen: Chosen, limit: int, *, to_discard: bool) -> Sequence[str]:
        return await self.letters.ids(
            ids=chosen.entries(), topic=chosen.topic, group=self.group, limit=limit, **chosen.terms()
        )

    async def show(self, id_: str, *, payload: bool) -> dict[str, Any] | None:
        found = await self._dead(Chosen(ids=[id_]), 1)
        if not found:
            return None
        letter = found[0]
        event = letter.event
        facts = _facts(self._letter(letter)) | {
            "group": letter.group,
            "entry": letter.entry,
            "event_id": None if event is None else event.id,
            "key": None if event is None else event.key,
            "created_at": None if event is None else event.created_at,
        }
        if not payload:
            return facts
        fields = [field.decode(errors="replace") for field in letter.fields]
        return facts | ({"fields": fields} if event is None else {"payload": event.payload_json})

    async def replay(self, ids: Sequence[str]) -> int:
        return await self.letters.replay(ids=ids)

    async def discard(self, ids: Sequence[str]) -> int:
        return await self.letters.discard(ids=ids)

    async def _dead(self, chosen: Chosen, limit: int) -> Sequence[DeadLetter]:
        return await self.letters.list(
            ids=chosen.entries(), topic=chosen.topic, group=self.group, limit=limit, **chosen.terms()
        )

    def _letter(self, letter: DeadLetter) -> Letter:
        return Letter(
            kind=self.kind,
            where=self.name,
            id=letter.id,
            topic=None if letter.event is None else letter.event.topic,
            state="dead",
            attempts=letter.attempts,
            error=letter.error,
            dead_at=letter.dead_at,
        )


class WebhookLetters:
    """Expired, rejected and quarantined webhooks. What is sealed in them is never opened."""

    kind = "webhook"

    def __init__(self, at: Stored[Webhooks]) -> None:
        self.at = at
        self.name = at.name

    async def list(self, chosen: Chosen, limit: int) -> Sequence[Letter]:
        return [self._letter(record) for record in await self._dead(chosen, limit)]

    async def ids(self, chosen: Chosen, limit: int, *, to_discard: bool) -> Sequence[str]:
        states = ["quarantined"] if to_discard else _ENDED_BADLY
        return [str(record.id) for record in await self._dead(chosen, limit, states)]

    async def show(self, id_: str, *, payload: bool) -> dict[str, Any] | None:
        found = await self._dead(Chosen(ids=[id_]), 1)
        if not found:
            return None
        record = found[0]
        return _facts(self._letter(record)) | {
            "origin": record.origin,
            "caller": record.caller,
            "account": record.account,
            "key": record.key,
            "created_at": record.created_at,
            "retry_until": record.retry_until,
        }

    async def replay(self, ids: Sequence[str]) -> int:
        chosen = [UUID(each) for each in ids]
        async with self.at.sessionmaker() as session, session.begin():
            retried = await self.at.room.retry(session, ids=chosen)
            return retried + await self.at.room.release(session, ids=chosen)

    async def discard(self, ids: Sequence[str]) -> int:
        async with self.at.sessionmaker() as session, session.begin():
            return await self.at.room.discard(session, ids=[UUID(each) for each in ids])

    async def _dead(
        self, chosen: Chosen, limit: int, states: Sequence[str] = _ENDED_BADLY
    ) -> Sequence[WebhookRecord]:
        from oncely.webhooks import State  # its extra is there: the room is

        async with self.at.sessionmaker() as session:
            return await self.at.room.dead(
                session,
                states=map(State, states),
                ids=chosen.uuids(),
                type=chosen.topic,
                limit=limit,
                **chosen.terms(),
            )

    def _letter(self, record: WebhookRecord) -> Letter:
        return Letter(
            kind=self.kind,
            where=self.name,
            id=str(record.id),
            topic=record.type,
            state=record.state.value,
            attempts=record.attempts,
            error=record.last_error,
            dead_at=record.finished_at or record.due_at,
        )


def _facts(letter: Letter) -> dict[str, Any]:
    return {name: getattr(letter, name) for name in Letter.__slots__}


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
