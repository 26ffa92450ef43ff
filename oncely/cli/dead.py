"""`oncely dead`: list, show, replay and discard what no retry could mend, wherever it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from oncely.cli.failure import WRONG_USE, Failure
from oncely.cli.letters import BATCH, Chosen, Letters, letters_of
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
from oncely.cli.rooms import open_rooms
from oncely.cli.times import moment

__all__ = ["dead"]

dead = typer.Typer(
    help="""Look at dead letters; send them again, or give them up.

    Dead letters are the dead events of an outbox, the dead letters of a stream, and webhooks that have
    expired, were rejected or are quarantined. A webhook's topic is its type.
    """,
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Topic = Annotated[str | None, typer.Option(help="Only this topic, or type of webhook.", show_default=False)]
_Error = Annotated[
    str | None,
    typer.Option(
        help='Only this error: a class ("ValueError"), a webhook\'s "HTTP 410".', show_default=False
    ),
]
_After = Annotated[
    str | None,
    typer.Option(help="Only those that died since then: 2026-01-31T12:00Z, or 2h ago.", show_default=False),
]
_Before = Annotated[
    str | None,
    typer.Option(help="Only those that died before then, given in the same way.", show_default=False),
]
_All = Annotated[bool, typer.Option("--all", help="All of them: needed where nothing else says which.")]
_Most = Annotated[int, typer.Option("--limit", min=1, max=1_000_000, help="At most so many.")]


@dead.command("list")
@placed
def list_(
    place: Place,
    topic: _Topic = None,
    error: _Error = None,
    after: _After = None,
    before: _Before = None,
    limit: _Most = 100,
    json: Json = False,
) -> None:
    """List dead letters, table by table, stream by stream, oldest first in each.

    Keys and payloads are not in the list: show has them. --json gives {"dead": [{kind, where, id, topic,
    state, attempts, error, dead_at}], "more": false}.
    """
    chosen = _chosen([], topic, error, after, before)

    async def work() -> None:
        async with open_rooms(place) as rooms:
            found = [
                letter
                for letters in letters_of(rooms, group=place.group)
                for letter in await letters.list(chosen, limit + 1)
            ]
        more = len(found) > limit
        del found[limit:]
        if json:
            print_json({"dead": found, "more": more})
            return
        if not found:
            print_line("no dead letters")
            return
        print_table(
            ["id", "where", "topic", "state", "attempts", "dead since", "error"],
            [
                [
                    each.id,
                    each.where,
                    each.topic,
                    each.state,
                    each.attempts,
                    each.dead_at,
                    _one_line(each.error),
                ]
                for each in found
            ],
        )
        if more:
            print_warning(f"there are more than {limit:,}; see --limit")

    asyncio.run(work())


@dead.command()
@placed
def show(
    place: Place,
    ids: list[str],
    payload: Annotated[bool, typer.Option("--payload", help="Also the payload; never a webhook's.")] = False,
    json: Json = False,
) -> None:
    """Show dead letters by their ids.

    That is all that is known of them, their key included, and with --payload also what they say. --json
    gives {"dead": [{…}]}: the fields of list, key, created_at, and those of its kind. The exit code is 1
    when one of them is not there.
    """
    if not ids:
        raise Failure("say which: give an id", exit_code=WRONG_USE)
    Chosen(ids=ids)  # refuses what cannot be an id

    async def work() -> None:
        found: list[dict[str, Any]] = []
        async with open_rooms(place) as rooms:
            for letters in letters_of(rooms, group=place.group):
                for each in ids:
                    shown = await letters.show(each, payload=payload)
                    if shown is not None:
                        found.append(shown)
        if json:
            print_json({"dead": found})
        else:
            for facts in found:
                print_facts(facts)
        _complain(ids, [facts["id"] for facts in found])

    asyncio.run(work())


@dead.command()
@placed
def replay(
    place: Place,
    ids: list[str],
    topic: _Topic = None,
    error: _Error = None,
    after: _After = None,
    before: _Before = None,
    all_: _All = False,
    limit: _Most = 100_000,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Send dead letters again.

    It says how many there are, and asks. They keep their ids. An event is due at once; a stream's letter
    goes to the end of its stream, for the group that gave up on it; a webhook has at least a day from
    now. --json gives {"asked": 3, "done": 3, "by": [{kind, where, asked, done}]}: what was found, and
    what was then done. It may be less, when others were quicker.
    """
    chosen = _chosen(ids, topic, error, after, before)
    _change(place, chosen, _REPLAY, everything=all_, limit=limit, yes=yes, json=json)


@dead.command()
@placed
def discard(
    place: Place,
    ids: list[str],
    topic: _Topic = None,
    error: _Error = None,
    after: _After = None,
    before: _Before = None,
    all_: _All = False,
    limit: _Most = 100_000,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Give dead letters up, for good.

    It says how many there are, and asks. Events and letters of streams are deleted. Quarantined webhooks
    become rejected, and go when webhooks are pruned; expired and rejected ones are given up already.
    --json as in replay.
    """
    chosen = _chosen(ids, topic, error, after, before)
    _change(place, chosen, _DISCARD, everything=all_, limit=limit, yes=yes, json=json)


def _chosen(
    ids: list[str], topic: str | None, error: str | None, after: str | None, before: str | None
) -> Chosen:
    return Chosen(
        ids=ids or None,
        topic=topic,
        error=error,
        since=moment(after, "--after"),
        until=moment(before, "--before"),
    )


@dataclass(frozen=True, slots=True)
class _Decision:
    will: str
    was: str
    to_discard: bool


_REPLAY = _Decision("will be sent again", "sent again", to_discard=False)
_DISCARD = _Decision("will be given up, for good", "given up", to_discard=True)


def _change(
    place: Place, chosen: Chosen, decision: _Decision, *, everything: bool, limit: int, yes: bool, json: bool
) -> None:
    if chosen.is_everything and not everything:
        raise Failure(
            "say which: give ids, --topic, --error, --after, --before or --all", exit_code=WRONG_USE
        )

    async def work() -> None:
        async with open_rooms(place) as rooms:
            changes: list[_Change] = []
            left = limit
            for letters in letters_of(rooms, group=place.group):
                if left and (found := await letters.ids(chosen, left, to_discard=decision.to_discard)):
                    changes.append(_Change(letters, found))
                    left -= len(found)
            if changes:
                by_room = ", ".join(f"{change.letters.name} {len(change.ids):,}" for change in changes)
                more = "" if left else "; there may be more, see --limit"
                confirm(f"{_number(limit - left)} {decision.will} ({by_room}{more}).", yes=yes)
            try:
                for change in changes:
                    for at in range(0, len(change.ids), BATCH):
                        batch = change.ids[at : at + BATCH]
                        change.done += await (
                            change.letters.discard(batch)
                            if decision.to_discard
                            else change.letters.replay(batch)
                        )
            finally:  # also when a database goes away half-way: what was done is done
                _print_changes(changes, was=decision.was, json=json)
        if chosen.ids is not None:
            _complain(chosen.ids, [each for change in changes for each in change.ids])

    asyncio.run(work())


@dataclass(slots=True)
class _Change:
    letters: Letters
    ids: Sequence[str]
    done: int = 0


def _print_changes(changes: Sequence[_Change], *, was: str, json: bool) -> None:
    asked, done = sum(len(change.ids) for change in changes), sum(change.done for change in changes)
    if json:
        by = [
            {
                "kind": change.letters.kind,
                "where": change.letters.name,
                "asked": len(change.ids),
                "done": change.done,
            }
            for change in changes
        ]
        print_json({"asked": asked, "done": done, "by": by})
    elif not changes:
        print_line("no dead letters")
    else:
        for change in changes:
            print_line(f"{change.letters.name}: {change.done:,} of {len(change.ids):,} {was}")


def _complain(wanted: Sequence[str], found: Sequence[str]) -> None:
    """Say which ids are not there, and exit with 1 for it."""
    missing = [each for each in wanted if each.lower() not in found]
    if missing:
        raise Failure(f"not among these dead letters: {', '.join(missing)}")


def _number(count: int) -> str:
    return "1 dead letter" if count == 1 else f"{count:,} dead letters"


def _one_line(error: str | None) -> str | None:
    return None if error is None else " ".join(error.split())
