"""Which commands of a Redis client are steps of a consumer, seen on the connections that it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from redis.asyncio import Redis

from oncely.streams import scripts

__all__ = ["watch_commands"]


def watch_commands(redis: Redis, reached: Callable[[str], object]) -> None:
    """Call `reached` before and after each step that `redis` makes on connections it has yet to open."""
    if not isinstance(redis, Redis):
        raise TypeError(f"an AsyncEngine or a Redis client is watched, not {type(redis).__name__}")
    pool = redis.connection_pool
    pool.connection_class = _watched(pool.connection_class, reached)


def _watched(connection_class: type[Any], reached: Callable[[str], object]) -> type[Any]:
    """The same class of connections, watched."""

    class Watched(connection_class):  # type: ignore[misc]  # redis-py's classes share no typed base
        _step: str | None = None
        """Of the command whose reply is awaited."""

        async def send_command(self, *words: Any, **options: Any) -> None:
            step = _step_of(words)
            # A script that the server did not know is sent again, as a whole: that is one step.
            if step is not None and words[0] != b"EVAL":
                reached(f"{step}.before")
            await super().send_command(*words, **options)
            self._step = step

        async def read_response(self, *arguments: Any, **options: Any) -> Any:
            step, self._step = self._step, None
            reply = await super().read_response(*arguments, **options)
            if step is not None and _did_something(step, reply):
                reached(f"{step}.after")
            return reply

    return Watched


def _step_of(words: tuple[Any, ...]) -> str | None:
    name = words[0].decode() if isinstance(words[0], bytes) else words[0]
    if name in ("EVALSHA", "EVAL"):
        return _SCRIPTS.get(words[1])
    return _COMMANDS.get(name)


def _did_something(step: str, reply: Any) -> bool:
    if step == "consumer.read":
        return bool(reply)
    return bool(reply[1]) if step == "consumer.take_over" else True


_COMMANDS: Mapping[str, str] = {"XREADGROUP": "consumer.read", "XACK": "consumer.acknowledge"}
_SCRIPTS: Mapping[str, str] = {
    name: step
    for script, step in (
        (scripts.TAKE_OVER, "consumer.take_over"),
        (scripts.BEGIN, "consumer.begin"),
        (scripts.BURY, "consumer.bury"),
        (scripts.RELEASE, "consumer.release"),
    )
    for name in (script.digest, script.text)
}
