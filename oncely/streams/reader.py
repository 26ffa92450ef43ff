"""Waiting for new entries, on a connection that is taken from nobody.

A blocking read holds its connection for as long as it waits. On the client's own pool, which may be
small, a few waiting consumers would leave none for the publisher. So it waits on one of its own,
made as the pool makes them. The wait is cut into slices below the client's socket timeout, which
would otherwise end it as a failure.
"""

from __future__ import annotations

from typing import Any

from redis.client import NEVER_DECODE
from redis.exceptions import ResponseError

from oncely.streams.faults import is_lost_group
from oncely.streams.group import Group
from oncely.streams.wire import RawEntry, entries_in

__all__ = ["Reader"]

_SLICE = 0.5  # seconds


class Reader:
    """Use it `async with`, or call `close`, or its connection stays open."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._connection: Any = None  # redis-py's classes of connections share no typed base

    async def read(self, count: int, seconds: float) -> list[RawEntry]:
        """New entries, or none after one slice of at most so many seconds."""
        pool = getattr(self._group.redis, "connection_pool", None)
        if pool is not None and self._connection is None:
            self._connection = pool.make_connection()
        seconds = min(seconds, _SLICE)
        limit = getattr(self._connection, "socket_timeout", None)
        if limit:
            seconds = min(seconds, limit / 2)
        try:
            return entries_in(await self._send(count, max(1, int(seconds * 1000))))
        except ResponseError as error:
            if not is_lost_group(error):
                raise
            return []  # the next take finds that out, too, and makes the group
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.disconnect()

    async def _send(self, count: int, milliseconds: int) -> Any:
        group = self._group
        command = (
            *("XREADGROUP", "GROUP", group.name, group.consumer, "COUNT", count),
            *("BLOCK", milliseconds, "STREAMS", group.stream, ">"),
        )
        if self._connection is None:  # a cluster: its nodes have connections enough
            return await group.redis.execute_command(*command, **{NEVER_DECODE: True})
        await self._connection.connect()
        await self._connection.send_command(*command)
        return await self._connection.read_response(disable_decoding=True)
