"""What an observer is told of one worker's messages, and the trace that its handlers continue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Literal, TypeAlias

from oncely.event import Event
from oncely.telemetry.observer import GuardedObserver
from oncely.telemetry.records import MessageHandled, MessagesTakenOver, Outage

__all__ = ["Around", "Result", "Watch"]

Result: TypeAlias = Literal["ok", "retry", "dead", "lost"]
"""ok: handled and acknowledged. retry: failed, will be tried again. dead: moved to the dead letters.
lost: it was trimmed away while it was pending, nobody will handle it."""

Around: TypeAlias = Callable[[Event, Callable[[], Awaitable[object]]], Awaitable[object]]
"""Wraps the handling of each event: `async def around(event, call): ...; await call(); ...`."""


class Watch:
    """Tells `observer` of one group of one stream."""

    def __init__(self, observer: GuardedObserver, *, stream: str, group: str) -> None:
        self._observer = observer
        self._stream = stream
        self._group = group

    def around(self, around: Around | None) -> Around | None:
        """The same inside of what the observer's tracer, if it has one, stands around each event."""
        if not self._observer.traces:
            return around

        async def traced(event: Event, call: Callable[[], Awaitable[object]]) -> None:
            with self._observer.handling(self._stream, self._group, event):
                await (call() if around is None else around(event, call))

        return traced

    def ended(self, event: Event | None, result: Result, seconds: float, error: BaseException | None) -> None:
        """A delivery has ended."""
        self._observer(
            MessageHandled(
                stream=self._stream,
                group=self._group,
                topic="" if event is None else event.topic,
                result=result,
                attempt=0 if event is None else event.attempt,
                error="" if error is None else type(error).__name__,
                duration=timedelta(seconds=seconds),
            )
        )

    def taken_over(self, count: int) -> None:
        """Messages that were delivered before are in this worker's hands."""
        if count:
            self._observer(MessagesTakenOver(stream=self._stream, group=self._group, count=count))

    def away(self, error: Exception, delay: timedelta) -> None:
        """Redis is away."""
        self._observer(
            Outage(
                service="consumer",
                name=self._stream,
                waits_for="broker",
                error=type(error).__name__,
                retry_in=delay,
            )
        )
