"""Emission: new events become rows, in line, in the caller's transaction.

A transaction that emits has its transaction id before it takes a place in line: the floor of the
relays (see `floor`) rests on that. Everything that can be refused is refused before any SQL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, Interval, Table, Text, Uuid
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.types import TypeEngine

from oncely.arguments import LONGEST, check_kind, check_wait
from oncely.errors import DedupKeyReused, InvalidKey, RowsHidden
from oncely.event import NewEvent, uuid7
from oncely.statement import Statement
from oncely.storable import check_key, encode_json
from oncely.telemetry.commit import tell_when_committed
from oncely.telemetry.observer import GuardedObserver
from oncely.telemetry.records import EventsEmitted
from oncely.transaction import Caller, execute, join, says_what_is_missing

__all__ = ["Emission"]


class Emission:
    """Writes the events of one outbox table. `max_payload_bytes` bounds a payload's JSON in UTF-8."""

    def __init__(
        self, events: Table, *, max_payload_bytes: int | None, observer: GuardedObserver | None = None
    ) -> None:
        self._events = events
        self._max_payload_bytes = max_payload_bytes
        self._observer = observer
        tables = {"outbox": events}
        self._one = Statement(_ONE, tables, _EVENT)
        self._many = Statement(_MANY, tables, _EVENTS)
        self._unique = Statement(_UNIQUE, tables, _UNIQUE_EVENTS)
        self._find_first = Statement(_FIND_FIRST, tables, dict.fromkeys(_NAMES_AND_CONTENT, ARRAY(Text)))

    async def emit(self, session: Caller, event: NewEvent) -> UUID:
        """Write one event; its id, or that of the first event with its dedup_key."""
        row = self._row(event, "", self._trace())
        event_id: UUID = row["id"]
        if event.dedup_key is not None:
            [event_id] = await self._emit_unique(await join(session, self._events), [row])
        else:
            await execute(session, self._events, self._one, row)
        if self._observer is not None:
            self._tell(self._observer, session, [row], [event_id])
        return event_id

    async def emit_many(self, session: Caller, events: Iterable[NewEvent]) -> list[UUID]:
        """Write all of the events or none, in the order given; their ids."""
        check_kind(events, Iterable, "events")
        trace = self._trace()
        rows = [self._row(event, f"events[{index}] ", trace) for index, event in enumerate(events)]
        if not rows:
            return []
        ids: list[UUID] = [row["id"] for row in rows]
        if all(row["dedup_key"] is None for row in rows):
            await execute(session, self._events, self._many, _columns(rows, _EVENTS))
        else:
            connection = await join(session, self._events)
            async with connection.begin_nested():
                ids = await self._emit_unique(connection, rows)
        if self._observer is not None:
            self._tell(self._observer, session, rows, ids)
        return ids

    def _trace(self) -> Mapping[str, str] | None:
        """The headers that carry the trace that is current, if there is any."""
        return None if self._observer is None else self._observer.headers()

    def _tell(
        self,
        observer: GuardedObserver,
        session: Caller,
        rows: Sequence[Mapping[str, Any]],
        ids: Sequence[UUID],
    ) -> None:
        """One record for each topic, once it is true."""
        counts: dict[str, list[int]] = {}
        for row, event_id in zip(rows, ids, strict=True):
            counts.setdefault(row["topic"], [0, 0])[row["id"] != event_id] += 1
        for topic, (count, repeated) in counts.items():
            record = EventsEmitted(outbox=self._events.fullname, topic=topic, count=count, repeated=repeated)
            tell_when_committed(session, observer, record)

    def _row(self, event: NewEvent, place: str, trace: Mapping[str, str] | None) -> dict[str, Any]:
        """The event's parameters, checked and encoded. `place` begins the message of a refusal."""
        if not isinstance(event, NewEvent):
            raise TypeError(f"{place.rstrip()} must be a NewEvent, not {type(event).__name__}")
        check_key(event.topic, f"{place}topic")
        if not event.topic:
            raise InvalidKey(f"{place}topic is empty")
        for name, value in (("key", event.key), ("dedup_key", event.dedup_key)):
            if value is not None:
                check_key(value, f"{place}{name}")
        if event.delay is not None:
            check_wait(event.delay, f"{place}delay")
            if event.delay > LONGEST:
                raise ValueError(f"{place}delay is above 100 years: {event.delay}")
        payload = encode_json(event.payload, what=f"{place}payload")
        if self._max_payload_bytes is not None and len(payload.encode()) > self._max_payload_bytes:
            raise ValueError(
                f"{place}payload has {len(payload.encode()):,} bytes; max_payload_bytes is "
                f"{self._max_payload_bytes:,}"
            )
        headers = None
        if event.headers is not None:
            if not isinstance(event.headers, Mapping):
                raise TypeError(f"{place}headers must be a mapping, not {type(event.headers).__name__}")
            pairs = event.headers.items()
            wrong = [pair[0] for pair in pairs if not all(isinstance(text, str) for text in pair)]
            if wrong:
                raise ValueError(f"{place}headers: {wrong[0]!r}: names and values are strings")
            headers = encode_json(dict(event.headers), what=f"{place}headers")
        if trace and not any(name.lower() == "traceparent" for name in event.headers or ()):
            headers = encode_json({**trace, **(event.headers or {})}, what=f"{place}headers")
        return {
            "id": uuid7(),
            "topic": event.topic,
            "key": event.key,
            "payload": payload,
            "headers": headers,
            "delay": event.delay or None,
            "dedup_key": event.dedup_key,
        }

    async def _emit_unique(self, connection: AsyncConnection, rows: Sequence[dict[str, Any]]) -> list[UUID]:
        """Insert what is new and find the first event of what is not; ids in the order of the rows."""
        ids: dict[int, UUID] = {}
        left = list(range(len(rows)))
        for _ in range(_MOST_TRIES):
            given = [rows[index] for index in left]
            with says_what_is_missing(self._events):
                result = await connection.execute(self._unique, _columns(given, _UNIQUE_EVENTS))
            inserted = set(result.scalars())
            ids |= {index: rows[index]["id"] for index in left if rows[index]["id"] in inserted}
            left = [index for index in left if index not in ids]
            if not left:
                return [ids[index] for index in range(len(rows))]
            given = [rows[index] for index in left]
            result = await connection.execute(self._find_first, _columns(given, _NAMES_AND_CONTENT))
            for line, first, same in result:
                index = left[line - 1]
                if not same:
                    raise DedupKeyReused(rows[index]["topic"], rows[index]["dedup_key"], first)
                ids[index] = first
            # What is left was deleted between the two statements: insert it after all.
            left = [index for index in left if index not in ids]
            if not left:
                return [ids[index] for index in range(len(rows))]
        raise RowsHidden(self._events.fullname)


_MOST_TRIES = 10
"""Each but the first is for a row that was deleted in this very moment."""


def _columns(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    """The rows turned into one array per name."""
    return {name: [row[name] for row in rows] for name in names}


_EVENT: dict[str, TypeEngine[Any] | type[TypeEngine[Any]]] = {
    "id": Uuid,
    "topic": Text,
    "key": Text,
    "payload": Text,
    "headers": Text,
    "delay": Interval,
}
_EVENTS = {name: ARRAY(type_) for name, type_ in _EVENT.items()}
_UNIQUE_EVENTS = _EVENTS | {"dedup_key": ARRAY(Text)}
_NAMES_AND_CONTENT = ("topic", "dedup_key", "key", "payload")

# The WHERE gives the transaction its id before the event takes its place in line.
_ONE = """
INSERT INTO {outbox} (id, topic, key, payload, headers, due_at)
SELECT :id, :topic, :key, CAST(:payload AS jsonb), CAST(:headers AS jsonb), statement_timestamp() + :delay
WHERE pg_current_xact_id() IS NOT NULL
"""

_MANY = """
INSERT INTO {outbox} (id, topic, key, payload, headers, due_at)
SELECT id, topic, key, payload::jsonb, headers::jsonb, statement_timestamp() + delay
FROM unnest(:id, :topic, :key, :payload, :headers, :delay)
    WITH ORDINALITY AS given (id, topic, key, payload, headers, delay, line)
WHERE pg_current_xact_id() IS NOT NULL
ORDER BY line
"""

_UNIQUE = """
INSERT INTO {outbox} (id, topic, key, payload, headers, due_at, dedup_key)
SELECT id, topic, key, payload::jsonb, headers::jsonb, statement_timestamp() + delay, dedup_key
FROM unnest(:id, :topic, :key, :payload, :headers, :delay, :dedup_key)
    WITH ORDINALITY AS given (id, topic, key, payload, headers, delay, dedup_key, line)
WHERE pg_current_xact_id() IS NOT NULL
ORDER BY line
ON CONFLICT (topic, dedup_key) WHERE dedup_key IS NOT NULL DO NOTHING
RETURNING id
"""

_FIND_FIRST = """
SELECT given.line, event.id,
       event.key IS NOT DISTINCT FROM given.key AND event.payload = given.payload::jsonb AS same
FROM unnest(:topic, :dedup_key, :key, :payload)
    WITH ORDINALITY AS given (topic, dedup_key, key, payload, line)
JOIN {outbox} AS event ON event.topic = given.topic AND event.dedup_key = given.dedup_key
"""
