"""One event's handling: its handlers in turn, wrapped by `around`, and the report of how it went.

The handlers of a topic run one after another, in the order in which they were subscribed, and the
first that fails ends the attempt. A retry begins with the first again: what an earlier one did
outside of a transaction is done again unless it guards itself (`Inbox`, `Effects`). Work that must
not wait for the other's retries belongs in a group of its own.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

from oncely.event import Event
from oncely.streams.routes import Routes

__all__ = ["Around", "Handling", "OnResult", "Result"]

Result: TypeAlias = Literal["ok", "retry", "dead", "lost"]
"""ok: handled and acknowledged. retry: failed, will be tried again. dead: moved to the dead letters.
lost: it was trimmed away while it was pending, nobody will handle it."""

Around: TypeAlias = Callable[[Event, Callable[[], Awaitable[object]]], Awaitable[object]]
"""Wraps the handling of each event: `async def around(event, call): ...; await call(); ...`."""

OnResult: TypeAlias = Callable[[Event | None, Result, float, BaseException | None], object]
"""Told of each result with the seconds that it took; plain or async. The event is None when there
is none to show: the entry was trimmed away or could not be decoded."""

logger = logging.getLogger("oncely.streams")


class Handling:
    """What is to be done with an event, and who wants to know how it went."""

    def __init__(self, around: Around | None, on_result: OnResult | None) -> None:
        self.routes = Routes()
        self.reports = on_result is not None
        self.around = around
        self._on_result = on_result

    async def wrapped(self, event: Event) -> None:
        """Handles an event inside of `around`. Raises what a handler, or `around`, raises."""
        assert self.around is not None  # noqa: S101  asked by the batch, which else calls the handlers itself

        async def call() -> None:
            for handler in self.routes.find(event.topic):
                await handler(event)

        await self.around(event, call)

    async def report(
        self, event: Event | None, result: Result, seconds: float = 0.0, error: BaseException | None = None
    ) -> None:
        """Tells `on_result`. It cannot change the result, so its errors are logged and end here."""
        if self._on_result is None:
            return
        try:
            answer = self._on_result(event, result, seconds, error)
            if inspect.isawaitable(answer):
                await answer
        except Exception:
            logger.exception("on_result failed on %r of %r", result, event)
