"""`oncely prune`: delete what is finished and old, in bounded batches."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from oncely.check.length import spell
from oncely.cli.failure import WRONG_USE, Failure
from oncely.cli.output import Json, Yes, confirm, print_json, print_line
from oncely.cli.place import Place, placed
from oncely.cli.rooms import Rooms, Stored, open_rooms
from oncely.cli.times import age
from oncely.effects import Effects
from oncely.idempotency import IdempotencyKeys
from oncely.inbox import Inbox
from oncely.outbox import Outbox

if TYPE_CHECKING:
    from oncely.webhooks import Webhooks

__all__ = ["prune"]

BATCH = 1_000
"""The most that one transaction deletes."""

_COUNTED = 100_000
_KINDS = ("outbox", "keys", "inbox", "webhooks", "effects")


@placed
def prune(
    place: Place,
    older_than: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[KIND=]AGE",
            help="12h, 7d, 4w: of all, or of outbox=, keys=, inbox=, webhooks=, effects=; may be repeated.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many rows of each table.")] = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Delete what is finished and old.

    It says how much there is, and asks. Finished are published events, keys (those with a ttl when it is
    over, whatever their age), handled messages, effects that are done or failed, and webhooks that ended
    (seven days after their last possible retry at the earliest). Never an event that was not published,
    an effect in doubt or a quarantined webhook. Without --older-than, a target's Retention says how old.
    A key, a message or an effect that comes again after that is new: its work is done, its call made again.

    Each transaction deletes 1,000 rows at most and passes over what somebody has locked. --json gives
    {"asked": 3, "done": 3, "by": [{where, older_than_seconds, asked, done}]}; a count of 100,000 before
    the question is that many or more.
    """
    ages = _ages(older_than or [])

    async def work() -> None:
        async with open_rooms(place) as rooms:
            tasks = _tasks(rooms, ages)
            if not tasks:
                raise Failure(
                    "say how old: --older-than 7d, or --older-than outbox=7d",
                    exit_code=WRONG_USE,
                )
            for task in tasks:
                task.asked = await task.count(min(_COUNTED, limit or _COUNTED))
            total = sum(task.asked for task in tasks)
            if total:
                by_table = ", ".join(f"{task.where} {_at_least(task.asked)}" for task in tasks if task.asked)
                confirm(f"{_rows(total)} will be deleted ({by_table}).", yes=yes)
            try:
                if total:
                    await _delete(tasks, limit)
            finally:  # also when the database goes away half-way: what was done is done
                _print(tasks, json=json)

    asyncio.run(work())


@dataclass(slots=True)
class _Task:
    """One table to prune; `count(at_most)` and `delete(limit)` are its room's."""

    where: str
    older_than: timedelta
    count: Callable[[int], Awaitable[int]]
    delete: Callable[[int], Awaitable[int]]
    asked: int = 0
    done: int = 0


def _ages(given: Sequence[str]) -> dict[str, timedelta]:
    """The age for each kind; for all of them by the name ""."""
    ages: dict[str, timedelta] = {}
    for each in given:
        kind, equals, text = each.rpartition("=")
        if equals and kind not in _KINDS:
            raise Failure(f"--older-than: {kind!r} is not one of {', '.join(_KINDS)}", exit_code=WRONG_USE)
        ages[kind] = age(text, "--older-than")
    return ages


def _tasks(rooms: Rooms, ages: Mapping[str, timedelta]) -> list[_Task]:
    def age_of(kind: str, name: str) -> timedelta | None:
        """What was asked for; a Retention's word when nothing was."""
        return ages.get(kind, ages.get("")) if ages else rooms.ages.get(name)

    kinds: dict[str, Sequence[Stored[Outbox] | Stored[IdempotencyKeys] | Stored[Inbox] | Stored[Webhooks]]]
    kinds = {"outbox": rooms.outboxes, "keys": rooms.keys, "inbox": rooms.inboxes, "webhooks": rooms.webhooks}
    tasks = [
        _of_stored(at, older_than)
        for kind, stored in kinds.items()
        for at in stored
        if (older_than := age_of(kind, at.name)) is not None
    ]
    tasks += [
        _of_effects(effects, older_than)
        for effects in rooms.effects
        if (older_than := age_of("effects", effects.name)) is not None
    ]
    return tasks


def _of_stored(
    at: Stored[Outbox] | Stored[IdempotencyKeys] | Stored[Inbox] | Stored[Webhooks], older_than: timedelta
) -> _Task:
    async def count(at_most: int) -> int:
        async with at.sessionmaker() as session:
            return await at.room.prunable(session, older_than=older_than, at_most=at_most)

    async def delete(limit: int) -> int:
        async with at.sessionmaker() as session, session.begin():
            return await at.room.prune(session, older_than=older_than, limit=limit)

    return _Task(at.name, older_than, count, delete)


def _of_effects(at: Stored[Effects], older_than: timedelta) -> _Task:
    async def count(at_most: int) -> int:
        return await at.room.purgeable(older_than, at_most=at_most)

    async def delete(limit: int) -> int:
        return await at.room.purge(older_than, limit=limit)

    return _Task(at.name, older_than, count, delete)


async def _delete(tasks: Sequence[_Task], limit: int | None) -> None:
    unseen = not sys.stderr.isatty()
    console = Console(stderr=True, quiet=unseen)  # rich before 14.1 ends even a disabled Progress with a line
    with Progress(console=console, transient=True, disable=unseen) as progress:
        for task in tasks:
            shown = progress.add_task(task.where, total=task.asked)
            while limit is None or task.done < limit:
                size = BATCH if limit is None else min(BATCH, limit - task.done)
                deleted = await task.delete(size)
                task.done += deleted
                progress.update(shown, completed=task.done, total=max(task.asked, task.done))
                if deleted < size:
                    break


def _print(tasks: Sequence[_Task], *, json: bool) -> None:
    if json:
        by = [
            {
                "where": task.where,
                "older_than_seconds": task.older_than,
                "asked": task.asked,
                "done": task.done,
            }
            for task in tasks
        ]
        asked, done = sum(task.asked for task in tasks), sum(task.done for task in tasks)
        print_json({"asked": asked, "done": done, "by": by})
        return
    for task in tasks:
        older = spell(task.older_than)
        print_line(f"{task.where}: {task.done:,} deleted, older than {older}")


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{_at_least(count)} rows"


def _at_least(count: int) -> str:
    return f"{count:,}" + (" or more" if count >= _COUNTED else "")
