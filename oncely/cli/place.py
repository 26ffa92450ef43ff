"""The place of a command: a target, or a database and a Redis, and which of their tables and streams."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from oncely.cli.failure import WRONG_USE, Failure, add_parameters, reported

__all__ = ["AppDir", "Place", "Target", "placed"]

Target = Annotated[
    str | None,
    typer.Argument(help="package.module:attribute", metavar="[TARGET]", show_default=False),
]
AppDir = Annotated[
    Path, typer.Option(help="Look for the target's module here first.", file_okay=False, exists=True)
]
_DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        help="Use this database, whatever the target says. ONCELY_DATABASE_URL is for where it says nothing.",
        show_default=False,
    ),
]
_Schema = Annotated[
    str | None, typer.Option(help="Without a target: look for tables in this schema.", show_default=False)
]
_Tables = Annotated[list[str] | None, typer.Option("--table", help="Only this table; more than once: these.")]
_RedisUrl = Annotated[
    str | None,
    typer.Option(
        help="Use this Redis, whatever the target says. ONCELY_REDIS_URL is for where it says nothing.",
        show_default=False,
    ),
]
_Streams = Annotated[
    list[str] | None, typer.Option("--stream", help="Only this stream; more than once: these.")
]
_Group = Annotated[
    str | None, typer.Option(help="Of the streams, only this consumer group.", show_default=False)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a command works. When tables or streams are named, it works on those and no others.

    `database_url` and `redis_url` are what was asked for, before what the target says; the ambient
    ones, from the environment, come after it.
    """

    target: str | None = None
    app_dir: Path = Path()
    database_url: str | None = None
    schema: str | None = None
    tables: Sequence[str] = ()
    redis_url: str | None = None
    streams: Sequence[str] = ()
    group: str | None = None
    ambient_database_url: str | None = None
    ambient_redis_url: str | None = None

    def has_table(self, name: str, fullname: str) -> bool:
        """Whether this table is one to work on."""
        if not self.tables:
            return not self.streams
        return name in self.tables or fullname in self.tables

    def has_stream(self, name: str) -> bool:
        """Whether this stream is one to work on."""
        return name in self.streams if self.streams else not self.tables


def placed(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of a Place in the place of its parameter `place`; see also `reported`.

    The target is the first word. A command that takes words of its own calls them `ids` (none of which
    has a colon, so a first word that has one is the target) or `key` (one: the last word).
    """
    words = next((name for name in ("ids", "key") if name in inspect.signature(command).parameters), None)

    @functools.wraps(command)
    def run(**options: Any) -> None:
        if words is not None:
            options["target"], options[words] = _SPLIT[words](list(options["target"] or ()))
        place = Place(
            target=options.pop("target"),
            app_dir=options.pop("app_dir"),
            database_url=options.pop("database_url"),
            schema=options.pop("schema"),
            tables=tuple(options.pop("tables") or ()),
            redis_url=options.pop("redis_url"),
            streams=tuple(options.pop("streams") or ()),
            group=options.pop("group"),
            ambient_database_url=os.environ.get("ONCELY_DATABASE_URL") or None,
            ambient_redis_url=os.environ.get("ONCELY_REDIS_URL") or None,
        )
        command(place=place, **options)

    options = dict(_OPTIONS)
    if words is not None:
        options["target"] = (_WORDS[words], None if words == "ids" else inspect.Parameter.empty)
    parameters = add_parameters(command, options, instead_of=("place", words))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    return reported(run)


_WORDS = {
    "ids": Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET] [ID]", help="Ids, after the target if there is one.", show_default=False
        ),
    ],
    "key": Annotated[
        list[str], typer.Argument(metavar="[TARGET] KEY", help="The key, after the target if there is one.")
    ],
}
_OPTIONS: dict[str, tuple[object, object]] = {
    "target": (Target, None),
    "app_dir": (AppDir, Path()),
    "database_url": (_DatabaseUrl, None),
    "schema": (_Schema, None),
    "tables": (_Tables, None),
    "redis_url": (_RedisUrl, None),
    "streams": (_Streams, None),
    "group": (_Group, None),
}


def _split_ids(words: list[str]) -> tuple[str | None, list[str]]:
    if words and ":" in words[0]:
        return words[0], words[1:]
    return None, words


def _split_key(words: list[str]) -> tuple[str | None, str]:
    if not 1 <= len(words) <= 2:
        raise Failure(f"give a target, if any, and one key, not {len(words)} words", exit_code=WRONG_USE)
    return (words[0] if len(words) == 2 else None), words[-1]


_SPLIT: dict[str, Callable[[list[str]], tuple[str | None, Any]]] = {"ids": _split_ids, "key": _split_key}
