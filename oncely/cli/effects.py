"""`oncely effects`: the calls to the outside that are open, and what a person has found out about them."""

from __future__ import annotations

import asyncio
import json as json_
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from oncely.cli.failure import WRONG_USE, Failure
from oncely.cli.output import (
    Json,
    Yes,
    confirm,
    print_facts,
    print_json,
    print_line,
    print_table,
    print_warning,
)
from oncely.cli.place import Place, placed
from oncely.cli.rooms import Rooms, Stored, open_rooms
from oncely.effects import EffectRecord, Effects, Status

__all__ = ["effects"]

effects = typer.Typer(
    help="Look at calls to the outside, and resolve those in doubt.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@effects.command("list")
@placed
def list_(
    place: Place,
    status: Annotated[
        list[Status] | None, typer.Option(help="Only these; without it the open ones: pending and unknown.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="At most so many.")] = 100,
    json: Json = False,
) -> None:
    """List effects, newest first in each table, without their results.

    --json gives {"effects": [{where, key, status, attempts, error, created_at, updated_at, expires_at}],
    "more": false}.
    """

    async def work() -> None:
        async with open_rooms(place) as rooms:
            found = [
                (at.name, record)
                for at in _stored(rooms)
                for record in await at.room.records(status or None, limit + 1)
            ]
        more = len(found) > limit
        rows = [_facts(name, record) for name, record in found[:limit]]
        if json:
            print_json({"effects": rows, "more": more})
            return
        if not rows:
            wanted = " or ".join(one.value for one in status or (Status.PENDING, Status.UNKNOWN))
            print_line(f"no effect is {wanted}")
            return
        names = ["key", "where", "status", "attempts", "created_at", "updated_at", "error"]
        print_table(
            [name.replace("_", " ") for name in names], [[row[name] for name in names] for row in rows]
        )
        if more:
            print_warning(f"there are more than {limit:,}; see --limit")

    asyncio.run(work())


@effects.command()
@placed
def show(
    place: Place,
    key: str,
    result: Annotated[bool, typer.Option("--result", help="Also what the call returned.")] = False,
    json: Json = False,
) -> None:
    """Show how an effect stands.

    The provider token is what the provider knows the call by.
    --json gives the fields of list and provider_token; with --result also result, as JSON.
    """

    async def work() -> None:
        async with open_rooms(place) as rooms:
            one = await _find(rooms, key)
        facts = _facts(one.at.name, one.record) | {"provider_token": one.record.provider_token}
        if json:
            print_json(facts | ({"result": one.record.result} if result else {}))
        else:
            print_facts(facts | ({"result": one.record.result_json} if result else {}))

    asyncio.run(work())


@effects.command()
@placed
def resolve(
    place: Place,
    key: str,
    done: Annotated[bool, typer.Option("--done", help="The call has happened.")] = False,
    result: Annotated[
        str | None,
        typer.Option(help="With --done: what it returned, as JSON; null without.", show_default=False),
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="It has not, and never shall.")] = False,
    error: Annotated[str, typer.Option(help="With --failed: why.")] = "resolved by hand",
    forget: Annotated[
        bool, typer.Option("--forget", help="It has not: the next run makes it, under a new provider token.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Say what became of a call that is in doubt.

    Later runs go by that. Ask the provider first: by the provider token, which show shows. --done and
    --failed are for effects that are unknown, and --forget also for finished ones. A call that its owner
    is making now is left to its owner.
    """
    if done + failed + forget != 1:
        raise Failure("say one of --done, --failed and --forget", exit_code=WRONG_USE)
    if result is not None and not done:
        raise Failure("--result goes with --done", exit_code=WRONG_USE)
    value = _json(result)

    async def work() -> None:
        async with open_rooms(place) as rooms:
            one = await _find(rooms, key)
            record, room = one.record, one.at.room
            if record.status is Status.PENDING:
                raise Failure(f"effect {record.key!r} is being made by its owner, until {record.expires_at}")
            if record.status.is_finished and not forget:
                raise Failure(f"effect {record.key!r} is {record.status} already")
            will = "be forgotten: its next run makes the call" if forget else "be recorded as "
            will += "" if forget else ("done" if done else "failed")
            confirm(f"effect {record.key!r}, now {record.status}, will {will}.", yes=yes)
            if forget:
                went = await _forget(room, record)
            elif done:
                went = await room.take(record, Status.DONE, result=value) is not None
            else:
                went = await room.take(record, Status.FAILED, error=error) is not None
            if not went:
                raise Failure(f"effect {record.key!r} has changed in between; nothing was done")
        print_line(f"{record.key}: {'forgotten' if forget else 'done' if done else 'failed'}")

    asyncio.run(work())


@dataclass(frozen=True, slots=True)
class _One:
    at: Stored[Effects]
    record: EffectRecord


def _stored(rooms: Rooms) -> list[Stored[Effects]]:
    if not rooms.effects:
        raise Failure("there are no effects here; a target shows what it holds, --database-url alone all")
    return list(rooms.effects)


async def _find(rooms: Rooms, key: str) -> _One:
    found = [_One(at, record) for at in _stored(rooms) if (record := await at.room.get(key)) is not None]
    if not found:
        raise Failure(f"there is no effect {key!r}")
    if len(found) > 1:
        names = ", ".join(one.at.name for one in found)
        raise Failure(
            f"there is an effect {key!r} in each of {names}; choose by --table", exit_code=WRONG_USE
        )
    return found[0]


async def _forget(room: Effects, record: EffectRecord) -> bool:
    """Delete the record if it is still as it was read."""
    if record.status.is_finished:
        return await room.delete(record.key)
    # Taken first, which only one can do, so that nobody's new call is forgotten.
    token = await room.take(record, Status.PENDING)
    return token is not None and await room.delete(record.key, token=token)


def _facts(name: str, record: EffectRecord) -> dict[str, Any]:
    return {
        "where": name,
        "key": record.key,
        "status": record.status.value,
        "attempts": record.attempts,
        "error": record.error,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
        "expires_at": record.expires_at,
    }


def _json(text: str | None) -> object:
    if text is None:
        return None
    try:
        return json_.loads(text)
    except ValueError as error:
        raise Failure(f"--result is no JSON: {error}", exit_code=WRONG_USE) from None
