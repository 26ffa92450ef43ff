"""An error, in a line: what is wrong and with what, and nothing that was secret in it."""

from __future__ import annotations

import errno

import pytest
from redis.exceptions import ConnectionError as RedisAway
from redis.exceptions import ResponseError
from sqlalchemy.exc import ArgumentError, OperationalError, ProgrammingError

from oncely.cli.failure import Failure, explain
from oncely.errors import TablesMissing


class Refused(Exception):
    sqlstate = "42501"


class Away(OSError):
    pass


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (Failure("say --yes"), "say --yes"),
        (TablesMissing("outbox"), str(TablesMissing("outbox"))),
        (
            OperationalError("SELECT 'hush'", {"p": "hush"}, Refused("permission denied\nmore")),
            "the database says: permission denied (42501)",
        ),
        (
            ProgrammingError("SELECT 'hush'", {}, Exception("out of order")),
            "the database says: out of order",
        ),
        (
            OperationalError("SELECT 1", {}, Away("refused"), connection_invalidated=True),
            "the database cannot be reached: refused",
        ),
        (ConnectionRefusedError("refused"), "the database cannot be reached: refused"),
        (OSError(errno.ENOSPC, "No space left"), "nothing more can be written: [Errno 28] No space left"),
        (RedisAway("gone"), "Redis cannot be reached: gone"),
        (ResponseError("WRONGTYPE of a key"), "Redis says: WRONGTYPE of a key"),
        (ArgumentError("no such option"), "ArgumentError: no such option"),
        (ValueError("limit is below one\nmore"), "limit is below one"),
        (ValueError(), "ValueError"),
        (LookupError("colour"), "LookupError: colour (--verbose shows where)"),
    ],
)
def test_an_error_is_explained_in_a_line(error: Exception, line: str) -> None:
    assert explain(error) == line
