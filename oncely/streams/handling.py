"""One event's handling: its handlers in turn, wrapped by `around`, and the report of how it went.

The handlers of a topic run one after another, in the order in which they were subscribed, and the
first that fails ends the attempt. A retry begins with the first again: what an earlier one did
outside of a transaction is done again unless it guards itself (`Inbox`, `Effects`). Work that must
not wait for the other's retries belongs in a group of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeAlias

from oncely.arguments import check_async, check_callable, check_duration, check_kind, check_takes
from oncely.event import Event, Handler
from oncely.loop import is_cancelled
from oncely.streams.watch import Around, Result, Watch

__all__ = ["Around", "Handling", "OnResult", "Result", "Routes"]

OnResult: TypeAlias = Callable[[Event | None, Result, float, BaseException | None], object]
"""Told of each result with the seconds that it took; plain or async. The event is None when there
is none to show: the entry was trimmed away or could not be decoded."""

_INSTEAD = "; inbox.handler(sessionmaker, handle, consumer=…) makes a handler of handle(session, event)"
_REMEMBERED = 1000  # topics; they are the application's, so a few

logger = logging.getLogger("oncely.streams")


class Handling:
    """What is to be done with an event, how long it may take, and who wants to know how it went."""

    def __init__(
        self,
        around: Around | None,
        on_result: OnResult | None,
        timeout: timedelta | None,
        watch: Watch | None = None,
    ) -> None:
        if around is not None:
            check_async(around, "around")
        if on_result is not None:
            check_callable(on_result, "on_result")
        if timeout is not None:
            check_duration(timeout, "handler_timeout")
        self.routes = Routes()
        self.reports = on_result is not None or watch is not None
        self.watch = watch
        self._around = around if watch is None else watch.around(around)
        self._on_result = on_result
        self._timeout = timeout

    async def handle(self, event: Event) -> None:
        """Calls the event's handlers. Raises what one of them, or `around`, raises, and TimeoutError."""
        if self._timeout is None:
            await self._handle(event)
            return
        limit = asyncio.timeout(self._timeout.total_seconds())
        try:
            async with limit:
                await self._handle(event)
        except TimeoutError as error:
            if limit.expired():
                raise TimeoutError(f"not handled within {self._timeout}") from error
            raise

    async def report(
        self, event: Event | None, result: Result, seconds: float = 0.0, error: BaseException | None = None
    ) -> None:
        """Tells `on_result`. It cannot change the result, so its errors are logged and end here."""
        if self.watch is not None:
            self.watch.ended(event, result, seconds, error)
        if self._on_result is None:
            return
        try:
            answer = self._on_result(event, result, seconds, error)
            if inspect.isawaitable(answer):
                await asyncio.ensure_future(answer)  # what cancels its own task cancels only that
        except (Exception, asyncio.CancelledError) as failure:
            if isinstance(failure, asyncio.CancelledError) and is_cancelled():
                raise
            logger.exception("on_result failed on %r of %r", result, event)

    async def _handle(self, event: Event) -> None:
        if self._around is None:
            await self._call(event)
        else:
            await self._around(event, partial(self._call, event))

    async def _call(self, event: Event) -> None:
        for handler in self.routes.find(event.topic):
            await handler(event)


class Routes:
    """Handlers by topic. `"order.*"` stands for every topic that begins with `order.`, `"*"` for all."""

    def __init__(self) -> None:
        self._routes: list[tuple[str, Handler]] = []
        self._found: dict[str, tuple[Handler, ...]] = {}

    def add(self, topic: str, handler: Handler) -> None:
        check_kind(topic, str, "a topic")
        if not topic or "*" in topic[:-1]:
            raise ValueError(f"a topic is a name or a prefix that ends with '*', not {topic!r}")
        check_async(handler, "a handler")
        check_takes(handler, "a handler", "event", instead=_INSTEAD)
        self._routes.append((topic, handler))
        self._found.clear()

    def __bool__(self) -> bool:
        """Whether any handler is subscribed."""
        return bool(self._routes)

    @property
    def handlers(self) -> tuple[Handler, ...]:
        """All of them, in the order in which they were subscribed."""
        return tuple(handler for _, handler in self._routes)

    def find(self, topic: str) -> tuple[Handler, ...]:
        """The topic's handlers, in the order in which they were subscribed."""
        found = self._found.get(topic)
        if found is None:
            found = tuple(handler for route, handler in self._routes if _covers(route, topic))
            if len(self._found) < _REMEMBERED:
                self._found[topic] = found
                if not found:  # said once for each topic that is remembered
                    logger.warning("no handler for topic %r: its events are acknowledged and skipped", topic)
        return found


def _covers(route: str, topic: str) -> bool:
    return topic.startswith(route[:-1]) if route.endswith("*") else topic == route
