"""Whose fault an error of Redis is: the server's as a whole, the group that is gone, or this command's.

Decided by the class of the error and by its code word, the first word of what the server wrote.
"""

from __future__ import annotations

import re

from redis.exceptions import (
    ClusterError,
    ConnectionError,  # noqa: A004  Redis's own, no OSError
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,  # noqa: A004  Redis's own, no OSError
    TryAgainError,
)

__all__ = ["BROKER_ERRORS", "code_word", "is_demoted", "is_lost_group", "is_outage"]

BROKER_ERRORS = (RedisError, RedisClusterException, OSError)
"""All that a command can raise for Redis's sake."""

_AWAY = (
    ConnectionError,
    TimeoutError,
    OSError,
    ReadOnlyError,
    OutOfMemoryError,
    TryAgainError,
    ClusterError,
    RedisClusterException,
)

# A server that answers and cannot serve now: a failover, a full disk, a script that hogs it.
_AWAY_WORDS = frozenset(
    {"BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "OOM", "READONLY", "TRYAGAIN"}
)

# Before Redis 7, a script's error begins with its place, and the word may have a dash before it.
_PLACE = re.compile(r"^(?:Error running script \(call to f_[0-9a-f]+\): )?(?:@user_script: ?\d+: )+-?")

# The stream was deleted, flushed or lost in a failover, and its groups with it. UNBLOCKED is what
# servers before Redis 7.2 tell a reader that was waiting on it.
_GROUP_WORDS = frozenset({"NOGROUP", "UNBLOCKED"})


def is_outage(error: BaseException) -> bool:
    """Whether the server is away for everybody: to be waited out, and nobody's attempt."""
    if isinstance(error, _AWAY):
        return True
    return isinstance(error, ResponseError) and code_word(str(error)) in _AWAY_WORDS


def is_demoted(error: ResponseError | str) -> bool:
    """Whether the server says that it is a replica: it was the master before, or nobody would write to it.

    By an error, or by the text of one that a script has passed on.
    """
    if isinstance(error, (ReadOnlyError, MasterDownError)):
        return True  # redis-py has cut its code word off
    return code_word(str(error)) in ("READONLY", "MASTERDOWN")


def is_lost_group(error: ResponseError) -> bool:
    """Whether the group has to be made (again)."""
    return code_word(str(error)) in _GROUP_WORDS


def code_word(text: str) -> str:
    """The code word of a server's error; ERR when it has none (clients drop that one)."""
    word = _PLACE.sub("", text, count=1).partition(" ")[0]
    return word if word.isupper() and word.isalpha() else "ERR"
