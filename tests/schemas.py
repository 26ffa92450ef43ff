"""Schemas for one test, in a database that may be the user's."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import sql

from tests.database import Database

__all__ = ["schemas_of_their_own"]


@contextmanager
def schemas_of_their_own(database: Database, *names: str) -> Iterator[list[str]]:
    """Empty schemas, dropped after, whose names begin with those given. Nothing else has their names."""
    made = [f"{name} {uuid.uuid4().hex[:12]}" for name in names]
    with psycopg.connect(database.dsn(), autocommit=True) as connection:
        for name in made:
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
        try:
            yield made
        finally:
            for name in made:
                connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))
