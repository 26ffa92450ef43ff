"""How Redis is asked: one command or one script at a time, its reply raw, on any client of redis-py.

A script does in one step what its steps apart would get wrong. Its keys share a hash slot, so a
cluster takes it. Errors inside come back as Redis wrote them (`pcall`), so that their code word is
to be found on every server version. A script that a server does not have any more (SCRIPT FLUSH,
failover) is sent again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any, TypeAlias

from redis import Redis as BlockingRedis
from redis import RedisCluster as BlockingCluster
from redis.asyncio import Redis, RedisCluster
from redis.client import NEVER_DECODE
from redis.exceptions import ConnectionError, NoScriptError, ResponseError  # noqa: A004  Redis's own, no OSError

from oncely.streams.faults import is_demoted

__all__ = ["Client", "Script", "check_client", "execute", "leave_demoted"]

Client: TypeAlias = "Redis | RedisCluster"

_POOL_PATIENCE = 5.0  # seconds
_POOL_PAUSE = 0.002  # seconds


def check_client(redis: object) -> None:
    """Raise TypeError for a client that is not to be awaited, and for what is none, such as a URL."""
    if isinstance(redis, (BlockingRedis, BlockingCluster)) or not hasattr(redis, "execute_command"):
        raise TypeError(
            "redis must be a client of redis.asyncio, such as redis.asyncio.Redis.from_url(…), "
            f"not {type(redis).__module__}.{type(redis).__qualname__}"
        )


class Script:
    """A Lua script, run by its digest. Replies are raw: lists, ints, bytes, None."""

    __slots__ = ("digest", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, redis: Client, keys: Sequence[str], arguments: Iterable[str | bytes | int]) -> Any:
        rest = (len(keys), *keys, *arguments)
        try:
            return await execute(redis, "EVALSHA", self.digest, *rest)
        except NoScriptError:
            return await execute(redis, "EVAL", self.text, *rest)


async def execute(redis: Client, command: str, *words: str | bytes | int) -> Any:
    """The raw reply to a command, as the server sent it, whatever the client's settings.

    Nothing in it is decoded to text, and redis-py knows nothing to do with the reply to a command
    whose name is bytes (on a cluster it needs the name to find the node, and the reply is parsed).

    A pool that has no connection free just now is waited for, as a blocking pool would: consumers
    and publishers that share a small one use it in turn.

    A cancellation that comes meanwhile goes on. redis-py sends inside of `asyncio.wait_for`, which
    before Python 3.12 forgets about one that comes just when the sending ends.
    """
    task = asyncio.current_task()
    cancelled_before = task.cancelling() if task is not None else 0
    name = command if isinstance(redis, RedisCluster) else command.encode()
    patience = monotonic() + _POOL_PATIENCE
    while True:
        if _is_free(redis) or monotonic() >= patience:
            try:
                reply = await redis.execute_command(name, *words, **{NEVER_DECODE: True})
                if task is not None and task.cancelling() > cancelled_before:
                    raise asyncio.CancelledError
                return reply
            except ResponseError as error:
                if is_demoted(error):
                    await leave_demoted(redis)
                raise
            except ConnectionError:
                if _is_free(redis) or monotonic() >= patience:
                    raise
        await asyncio.sleep(_POOL_PAUSE)


async def leave_demoted(redis: Client) -> None:
    """Closes the idle connections of a client whose server is a replica now.

    After a failover its name leads to another server, which only new connections find. (A client
    of a cluster or a sentinel finds out by itself, and loses nothing by this.)
    """
    if isinstance(redis, Redis):
        await redis.connection_pool.disconnect(inuse_connections=False)


def _is_free(redis: Client) -> bool:
    if isinstance(redis, RedisCluster) or redis.connection is not None:
        return True
    return bool(redis.connection_pool.can_get_connection())
