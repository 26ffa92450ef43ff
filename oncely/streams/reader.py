"""Waiting for new entries, on a connection that is taken from nobody.

A blocking read holds its connection for as long as it waits. On the client's own pool, which may be
small, a few waiting consumers would leave none for the publisher. So it waits on one of its own,
made as the pool makes them. The wait is cut into slices, which end well before the client's socket
timeout would end them as a failure, and between which a worker can look at other things.
"""

from __future__ import annotations

from time import monotonic
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import ResponseError, TimeoutError  # noqa: A004  Redis's own, no OSError

from oncely.streams.client import execute
from oncely.streams.faults import is_lost_group
from oncely.streams.group import Group
from oncely.streams.wire import RawEntry, entries_in

__all__ = ["Reader"]

_SLICE = 0.25  # seconds; a stop waits for its end
_LATE = 5.0  # seconds that the answer may take beyond the wait


class Reader:
    """Use it `async with`, or call `close`, or its connection stays open."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._connection: Any = None  # redis-py's classes of connections share no typed base

    async def read(self, count: int, seconds: float) -> list[RawEntry]:
        """New entries, or none after one slice of at most so many seconds."""
        seconds = min(seconds, _SLICE)
        try:
            if isinstance(self._group.redis, RedisCluster):
                reply = await self._read_on_cluster(self._group.redis, count, seconds)
            else:
                reply = await self._read(self._group.redis, count, seconds)
        except ResponseError as error:
            if not is_lost_group(error):
                await self.close()  # after a failover the name leads elsewhere
                raise
            return []  # the next take finds that out, too, and makes the group
        except BaseException:
            await self.close()
            raise
        return entries_in(reply)

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.disconnect()

    async def _read(self, client: Redis, count: int, seconds: float) -> Any:
        if self._connection is None:
            self._connection = client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        await self._connection.connect()
        await self._connection.send_command("XREADGROUP", *self._words(count, seconds))
        patience = seconds + _LATE
        begun = monotonic()
        reply = await self._connection.read_response(disable_decoding=True, timeout=patience)
        if reply is None and monotonic() - begun >= patience:  # or it is the server's "nothing"
            raise TimeoutError(f"no answer to a read of {seconds:g} s within {patience:g} s")
        return reply

    async def _read_on_cluster(self, client: RedisCluster, count: int, seconds: float) -> Any:
        """On one of the node's connections; clusters make as many as are asked for."""
        limit = client.connection_kwargs.get("socket_timeout")
        if limit:
            seconds = min(seconds, limit / 4)
        return await execute(client, "XREADGROUP", *self._words(count, seconds))

    def _words(self, count: int, seconds: float) -> tuple[str | int, ...]:
        group = self._group
        return (
            *("GROUP", group.name, group.consumer, "COUNT", count),
            *("BLOCK", max(1, int(seconds * 1000)), "STREAMS", group.stream, ">"),
        )
