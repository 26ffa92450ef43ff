"""`oncely check`: what is wrong, or could be better, before it hurts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Annotated, Any

import typer
from sqlalchemy import Table

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
from oncely.outbox import Outbox
from oncely.transaction import Sessionmaker

__all__ = ["check"]

_PATIENCE = 30  # seconds for one database


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
        for sessionmaker, tables in _by_database(rooms):
            try:
                async with asyncio.timeout(_PATIENCE):
                    findings += await _check_database(sessionmaker, tables, open_for, forgotten_after)
            except TimeoutError:
                findings.append(_unseen(tables, f"no answer within {_PATIENCE} s"))
            except Exception as error:  # noqa: BLE001  it is reported, and the other databases are looked at
                findings.append(_unseen(tables, explain(error)))
        if forgotten_after is not None:
            letters = [stream.dead_letters for stream in rooms.streams]
            findings += await check_dead_letters(letters, forgotten_after=forgotten_after)
        findings += await check_settings(rooms.services, worker=rooms.worker)
    return findings


async def _check_database(
    sessionmaker: Sessionmaker,
    tables: Sequence[Table],
    open_for: timedelta,
    forgotten_after: timedelta | None,
) -> list[Finding]:
    async with sessionmaker() as session:
        connection = await session.connection(bind_arguments={"clause": tables[0]})
        if connection.dialect.name != "postgresql":
            return []
        findings = await check_schema(connection, tables)
    async with sessionmaker() as session:
        connection = await session.connection(bind_arguments={"clause": tables[0]})
        outboxes = [table for table in tables if table.info.get("oncely") == "outbox"]
        findings += await check_horizon(connection, outboxes, longer_than=open_for)
        findings += await check_upkeep(connection, tables)
        if forgotten_after is not None:
            findings += await check_dead_events(connection, outboxes, forgotten_after=forgotten_after)
    return findings


def _forgotten_after(rooms: Rooms) -> timedelta | None:
    """When the most forgetful inbox forgets; None when none is told to."""
    ages = [
        rooms.ages[at.room.table.fullname] for at in rooms.inboxes if at.room.table.fullname in rooms.ages
    ]
    return min(ages, default=None)


def _by_database(rooms: Rooms) -> list[tuple[Sessionmaker, list[Table]]]:
    """The tables that are reached by the same sessions, each once."""
    found: dict[int, tuple[Sessionmaker, list[Table]]] = {}
    kinds: list[Sequence[Stored[Any]]] = [rooms.outboxes, rooms.keys, rooms.inboxes, rooms.effects]
    for at in chain(*kinds, rooms.webhooks):
        _, tables = found.setdefault(id(at.sessionmaker), (at.sessionmaker, []))
        of_room = [at.room.table, at.room.claims] if isinstance(at.room, Outbox) else [at.room.table]
        tables += [table for table in of_room if table not in tables]
    return list(found.values())


def _unseen(tables: Sequence[Table], reason: str) -> Finding:
    return Finding("wrong", ", ".join(table.fullname for table in tables), f"cannot be checked: {reason}")


def _print(findings: Sequence[Finding]) -> None:
    for finding in findings:
        print_line(f"{finding.severity}: {finding.about}: {finding.message}")
        for line in (finding.remedy or "").splitlines():
            print_line(f"    {line}")
    wrong = sum(finding.severity == "wrong" for finding in findings)
    print_line(f"{wrong} wrong, {len(findings) - wrong} to consider")
