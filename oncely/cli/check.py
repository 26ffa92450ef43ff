"""`oncely check`: what is wrong, or could be better, before it hurts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Annotated, Any

import typer
from sqlalchemy import Connection, Engine, Table
from sqlalchemy.ext.asyncio import AsyncConnection

from oncely.check import (
    Finding,
    check_dead_events,
    check_dead_letters,
    check_horizon,
    check_schema,
    check_settings,
    check_upkeep,
)
from oncely.cli.failure import WRONG, explain
from oncely.cli.output import Json, print_json, print_line
from oncely.cli.place import Place, placed
from oncely.cli.rooms import Rooms, Stored, open_rooms
from oncely.cli.times import age
from oncely.loop import within
from oncely.outbox import Outbox
from oncely.transaction import Sessionmaker, bind_of, is_unavailable

__all__ = ["check"]

_PATIENCE = timedelta(seconds=30)
"""For one check of one database, or of a stream's dead letters."""


@placed
def check(
    place: Place,
    open_for: Annotated[
        str, typer.Option(metavar="AGE", help="Name transactions that have been open for longer.")
    ] = "1m",
    json: Json = False,
) -> None:
    """Compare the database and the settings with what oncely needs.

    The tables against the code's: columns, constraints, indexes with their predicates. Transactions,
    prepared transactions and replication slots that keep PostgreSQL from cleaning up, by process and
    application. What autovacuum was told. Of a target also: settings that contradict each other, with the
    arithmetic. Each finding comes with the SQL that mends it, where SQL does.

    It changes nothing. The tables are compared by making the code's as temporary ones, in a transaction
    that is rolled back. The exit code is 1 when something is wrong; advice alone leaves it 0. --json gives
    {"ok": false, "findings": [{severity, about, message, remedy}]}.
    """
    findings = asyncio.run(_check(place, age(open_for, "--open-for")))
    wrong = any(finding.severity == "wrong" for finding in findings)
    if json:
        print_json({"ok": not wrong, "findings": findings})
    else:
        _print(findings)
    if wrong:
        raise typer.Exit(WRONG)


async def _check(place: Place, open_for: timedelta) -> list[Finding]:
    findings = []
    async with open_rooms(place) as rooms:
        forgotten_after = _forgotten_after(rooms)
        for sessionmaker, tables in await _by_engine(rooms):
            findings += await _check_database(sessionmaker, tables, open_for, forgotten_after)
        if forgotten_after is not None:
            for stream in rooms.streams:
                look = partial(check_dead_letters, [stream.dead_letters], forgotten_after=forgotten_after)
                findings += (await _looked(stream.dead_letters.dead_letter_stream, look))[0]
        findings += await check_settings(rooms.services, worker=rooms.worker)
    return _distinct(findings)


async def _check_database(
    sessionmaker: Sessionmaker,
    tables: Sequence[Table],
    open_for: timedelta,
    forgotten_after: timedelta | None,
) -> list[Finding]:
    outboxes = [table for table in tables if table.info.get("oncely") == "outbox"]
    looks: list[tuple[Sequence[Table], Callable[[AsyncConnection], Awaitable[list[Finding]]]]] = [
        (tables, partial(check_schema, tables=tables))
    ]
    is_postgresql = (await bind_of(sessionmaker, tables[0])).dialect.name == "postgresql"
    if is_postgresql:
        looks += [
            (tables, partial(check_horizon, outboxes=outboxes, longer_than=open_for)),
            (tables, partial(check_upkeep, tables=tables)),
        ]
    if forgotten_after is not None and outboxes:
        dead_events = partial(check_dead_events, outboxes=outboxes, forgotten_after=forgotten_after)
        looks.append((outboxes, dead_events))
    findings: list[Finding] = []
    for looked_at, look in looks:
        about = ", ".join(table.fullname for table in looked_at)
        on_connection = partial(_on_connection, sessionmaker, tables[0], look, is_postgresql=is_postgresql)
        found, was_answered = await _looked(about, on_connection)
        findings += found
        if not was_answered:
            break
    return findings


async def _on_connection(
    sessionmaker: Sessionmaker,
    table: Table,
    look: Callable[[AsyncConnection], Awaitable[list[Finding]]],
    *,
    is_postgresql: bool,
) -> list[Finding]:
    # Whatever the engine says: in autocommit nothing could be rolled back.
    options = {"isolation_level": "READ COMMITTED"} if is_postgresql else {}
    async with sessionmaker() as session:
        return await look(
            await session.connection(bind_arguments={"clause": table}, execution_options=options)
        )


async def _looked(
    about: str, look: Callable[[], Coroutine[Any, Any, list[Finding]]]
) -> tuple[list[Finding], bool]:
    """What a check finds, and whether the server has answered; that it cannot look is a finding too."""
    try:
        return await within(look(), _PATIENCE), True
    except TimeoutError:
        return [_unseen(about, f"no answer within {_PATIENCE.seconds} s")], False
    except Exception as error:  # noqa: BLE001  it is reported, and the others are looked at
        return [_unseen(about, explain(error))], not is_unavailable(error)


def _forgotten_after(rooms: Rooms) -> timedelta | None:
    """When the most forgetful inbox forgets; None when none is told to."""
    ages = [
        rooms.ages[at.room.table.fullname] for at in rooms.inboxes if at.room.table.fullname in rooms.ages
    ]
    return min(ages, default=None)


async def _by_engine(rooms: Rooms) -> list[tuple[Sessionmaker, list[Table]]]:
    """The tables that are reached by the same engine, each once, and sessions that reach them."""
    found: dict[Engine | Connection, tuple[Sessionmaker, list[Table]]] = {}
    kinds: list[Sequence[Stored[Any]]] = [rooms.outboxes, rooms.keys, rooms.inboxes, rooms.effects]
    for at in chain(*kinds, rooms.webhooks):
        bind = await bind_of(at.sessionmaker, at.room.table)
        _, tables = found.setdefault(bind, (at.sessionmaker, []))
        of_room = [at.room.table, at.room.claims] if isinstance(at.room, Outbox) else [at.room.table]
        tables += [table for table in of_room if table not in tables]
    return list(found.values())


def _distinct(findings: Sequence[Finding]) -> list[Finding]:
    """Each once: engines that lead to one server see the same, and the times in what they say differ."""
    by_remedy: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        by_remedy.setdefault((finding.about, finding.remedy or finding.message), finding)
    return list(by_remedy.values())


def _unseen(about: str, reason: str) -> Finding:
    return Finding("wrong", about, f"cannot be checked: {reason}")


def _print(findings: Sequence[Finding]) -> None:
    for finding in findings:
        print_line(f"{finding.severity}: {finding.about}: {finding.message}")
        for line in (finding.remedy or "").splitlines():
            print_line(f"    {line}")
    wrong = sum(finding.severity == "wrong" for finding in findings)
    print_line(f"{wrong} wrong, {len(findings) - wrong} to consider")
