"""`oncely keys`: what is stored of an idempotency key, and making it free."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from oncely.cli.failure import WRONG_USE, Failure
from oncely.cli.output import Json, Yes, confirm, print_facts, print_json, print_line
from oncely.cli.place import Place, placed
from oncely.cli.rooms import Rooms, Stored, open_rooms
from oncely.idempotency import IdempotencyKeys, KeyRecord

__all__ = ["keys"]

keys = typer.Typer(
    help="Look at idempotency keys, and forget them.", no_args_is_help=True, rich_markup_mode=None
)

_Scope = Annotated[str, typer.Option(help="Whose key it is.")]


@keys.command()
@placed
def show(
    place: Place,
    key: str,
    scope: _Scope,
    answer: Annotated[bool, typer.Option("--answer", help="Also the stored headers and body.")] = False,
    json: Json = False,
) -> None:
    """Show what is stored of a key.

    Its state is answered, expired (free for the next request) or unanswered: it was committed without an
    answer, and is refused until it is forgotten. --json gives where, scope, key, state, status,
    created_at, expires_at; with --answer also headers and body (bytes as hexadecimal, which without
    --json are shown as text where they are UTF-8).
    """

    async def work() -> None:
        async with open_rooms(place) as rooms:
            at, record = await _find(rooms, scope, key)
        facts = _facts(at.name, record, answer=answer)
        if json:
            print_json(facts)
        else:
            print_facts(facts | ({"body": _legible(record)} if answer else {}))

    asyncio.run(work())


@keys.command()
@placed
def forget(place: Place, key: str, scope: _Scope, yes: Yes = False) -> None:
    """Make a key free, as if it had never come.

    The next request of it does the work again. Check first what its work did. A key that is being worked
    on is waited for.
    """

    async def work() -> None:
        async with open_rooms(place) as rooms:
            at, record = await _find(rooms, scope, key)
            confirm(
                f"key {record.key!r} of scope {record.scope!r}, {_state(record)}, will be forgotten.", yes=yes
            )
            async with at.sessionmaker() as session, session.begin():
                forgotten = await at.room.forget(session, scope=record.scope, key=record.key)
            if not forgotten:
                raise Failure(f"key {record.key!r} was not there any more; nothing was done")
        print_line(f"{record.key}: forgotten")

    asyncio.run(work())


async def _find(rooms: Rooms, scope: str, key: str) -> tuple[Stored[IdempotencyKeys], KeyRecord]:
    if not rooms.keys:
        raise Failure(
            "there are no idempotency keys here; a target shows what it holds, --database-url alone all"
        )
    found = []
    for at in rooms.keys:
        async with at.sessionmaker() as session:
            record = await at.room.record(session, scope=scope, key=key)
        if record is not None:
            found.append((at, record))
    if not found:
        raise Failure(f"there is no key {key!r} of scope {scope!r}")
    if len(found) > 1:
        names = ", ".join(at.name for at, _ in found)
        raise Failure(f"there is a key {key!r} in each of {names}; choose by --table", exit_code=WRONG_USE)
    return found[0]


def _state(record: KeyRecord) -> str:
    if record.expired:
        return "expired"
    return "unanswered" if record.answer is None else "answered"


def _legible(record: KeyRecord) -> str | None:
    """The body for a person: bytes as the text that they nearly always are."""
    body = None if record.answer is None else record.answer.body
    if not isinstance(body, bytes):
        return body
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body.hex()


def _facts(name: str, record: KeyRecord, *, answer: bool) -> dict[str, Any]:
    stored = record.answer
    facts = {
        "where": name,
        "scope": record.scope,
        "key": record.key,
        "state": _state(record),
        "status": None if stored is None else stored.status,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
    }
    if not answer:
        return facts
    body = None if stored is None else stored.body
    return facts | {
        "headers": [] if stored is None else [list(pair) for pair in stored.headers],
        "body": body.hex() if isinstance(body, bytes) else body,
    }
