"""`oncely status`: one look at everything, with no payload, key or secret in it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oncely.cli.failure import WRONG, Failure, explain
from oncely.cli.output import Json, print_json, print_line, print_table, print_warning
from oncely.cli.place import Place, placed
from oncely.cli.rooms import Rooms, Stored, Stream, open_rooms
from oncely.effects import Effects
from oncely.idempotency import IdempotencyKeys
from oncely.inbox import Inbox
from oncely.outbox import Outbox

if TYPE_CHECKING:
    from oncely.webhooks import Webhooks

__all__ = ["status"]

_PATIENCE = 10  # seconds for one room
_AT_MOST = 100_000


@placed
def status(
    place: Place,
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
) -> None:
    """Show how far behind everything is.

    Counts are exact up to 100,000; "100,000+" is that many or more. The exit code is 1 when something
    cannot be looked at: its database or Redis is away, its tables are not there.

    --json gives one document: at, at_most, and lists named outboxes, streams, inboxes, keys, effects,
    webhooks, errors. With --watch it is one document on each line.
    """
    looking = _watch(place, interval, as_json=json) if watch else _once(place, as_json=json)
    if not asyncio.run(looking):
        raise typer.Exit(WRONG)


@dataclass(frozen=True, slots=True)
class Look:
    """One look: for each kind of room, the facts of each by name; `errors` are about those that failed."""

    at: datetime
    at_most: int
    outboxes: list[dict[str, Any]] = field(default_factory=list)
    streams: list[dict[str, Any]] = field(default_factory=list)
    inboxes: list[dict[str, Any]] = field(default_factory=list)
    keys: list[dict[str, Any]] = field(default_factory=list)
    effects: list[dict[str, Any]] = field(default_factory=list)
    webhooks: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, str]] = field(default_factory=list)


async def _once(place: Place, *, as_json: bool) -> bool:
    async with open_rooms(place) as rooms:
        seen = await look(rooms, group=place.group)
    if as_json:
        print_json(seen)
    else:
        _print(seen)
    return not seen.errors


async def _watch(place: Place, interval: float, *, as_json: bool) -> bool:
    went_well = True
    async with open_rooms(place) as rooms:
        try:
            while True:
                seen = await look(rooms, group=place.group)
                went_well = not seen.errors
                if as_json:
                    print_json(seen, on_one_line=True)
                else:
                    if sys.stdout.isatty():
                        typer.echo("\033[H\033[2J", nl=False)
                    _print(seen)
                sys.stdout.flush()
                await asyncio.sleep(interval)
        except asyncio.CancelledError:  # Ctrl-C, which is how a watch ends
            return went_well


async def look(rooms: Rooms, *, group: str | None = None) -> Look:
    """One look at all rooms, each for ten seconds at most; one that fails does not hide the others."""
    seen = Look(at=datetime.now(UTC), at_most=_AT_MOST)
    looks: list[tuple[list[dict[str, Any]], str, Callable[[], Awaitable[dict[str, Any]]]]] = [
        *((seen.outboxes, at.name, partial(_counts, at)) for at in rooms.outboxes),
        *((seen.streams, at.name, partial(_stream, at, group)) for at in rooms.streams),
        *((seen.inboxes, at.name, partial(_counts, at)) for at in rooms.inboxes),
        *((seen.keys, at.name, partial(_counts, at)) for at in rooms.keys),
        *((seen.effects, at.name, partial(_effects, at)) for at in rooms.effects),
        *((seen.webhooks, at.name, partial(_webhooks, at)) for at in rooms.webhooks),
    ]
    for found, name, find in looks:
        try:
            async with asyncio.timeout(_PATIENCE):
                found.append({"name": name} | await find())
        except TimeoutError:
            seen.errors.append({"name": name, "error": f"no answer within {_PATIENCE} s"})
        except Exception as error:  # noqa: BLE001  it is reported, and the other rooms are looked at
            seen.errors.append({"name": name, "error": explain(error)})
    return seen


async def _counts(at: Stored[Outbox] | Stored[Inbox] | Stored[IdempotencyKeys]) -> dict[str, Any]:
    async with at.sessionmaker() as session:
        return asdict(await at.room.stats(session, at_most=_AT_MOST))


async def _effects(at: Stored[Effects]) -> dict[str, Any]:
    return asdict(await at.room.stats(at_most=_AT_MOST))


async def _webhooks(at: Stored[Webhooks]) -> dict[str, Any]:
    async with at.sessionmaker() as session:
        return asdict(await at.room.stats(session))


async def _stream(at: Stream, group: str | None) -> dict[str, Any]:
    from oncely.streams.lag import lag

    groups = await lag(at.redis, at.name)
    if group is not None and group not in groups:
        raise Failure(f"stream {at.name!r} has no group {group!r}")
    return {
        "dead_letters": await at.dead_letters.length(),
        "groups": [
            {
                "group": name,
                "unread": found.unread,
                "pending": found.pending,
                "oldest_pending_seconds": found.oldest_pending,
            }
            for name, found in sorted(groups.items())
            if group in (None, name)
        ],
    }


def _print(seen: Look) -> None:
    states = ("ready", "deferred", "in_flight", "retrying", "dead", "lag_seconds")
    _print_table("outbox", states, seen.outboxes)
    facts = ("group", "unread", "pending", "oldest_pending_seconds")
    groups = [
        stream | group | ({"dead_letters": None} if number else {})  # the stream's, and so said once
        for stream in seen.streams
        for number, group in enumerate(stream["groups"] or [dict.fromkeys(facts)])
    ]
    _print_table("stream", (*facts, "dead_letters"), groups)
    _print_table("inbox", ("handled", "oldest_at", "newest_at"), seen.inboxes)
    _print_table("keys", ("stored", "unanswered", "oldest_at"), seen.keys)
    _print_table("effects", ("pending", "unknown", "failed", "done"), seen.effects)
    counts = ("pending", "in_flight", "failing", "expired", "rejected", "quarantined", "oldest_seconds")
    _print_table("webhooks", counts, seen.webhooks)
    _print_table(
        "webhooks to",
        ("pending", "failing", "oldest_seconds"),
        [origin | {"name": origin["origin"]} for webhooks in seen.webhooks for origin in webhooks["origins"]],
    )
    for failed in seen.errors:
        print_warning(f"{failed['name']}: {failed['error']}")


def _print_table(kind: str, facts: Sequence[str], rows: list[dict[str, Any]]) -> None:
    if rows:
        names = [fact.removesuffix("_seconds").removesuffix("_at").replace("_", " ") for fact in facts]
        print_table([kind, *names], [[row["name"], *(_shown(row[fact]) for fact in facts)] for row in rows])
        print_line()


def _shown(value: object) -> object:
    return f"{value:,}+" if value == _AT_MOST and isinstance(value, int) else value
