"""The one hook: an observer is called with each record, at once, in the task that did the work.

It must be quick and must not wait: it stands between an event and the next. Whatever it raises is logged
and changes nothing of the work.
"""

from __future__ import annotations

import inspect
import logging
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Protocol, runtime_checkable

from oncely.event import Event
from oncely.storable import encode_json
from oncely.telemetry.records import Record

__all__ = ["GuardedObserver", "Observer", "Tracer", "guarded", "observers"]

_log = logging.getLogger("oncely.telemetry")

_ERRORS = (Exception, CancelledError)
"""What an observer raises. It does not wait, so a cancellation in it is of what it asked, not its task's."""


class Observer(Protocol):
    """Told of all that happens: any callable that takes a record, and is no coroutine function."""

    def __call__(self, record: Record, /) -> object: ...


@runtime_checkable
class Tracer(Protocol):
    """What an observer may do beyond that: carry a trace from where an event is emitted to its handler."""

    def headers(self) -> Mapping[str, str]:
        """What is written to the headers of an event that is emitted now, such as `traceparent`.

        Nothing of it, when the event was given a `traceparent` by hand.
        """
        ...

    def publishing(self, outbox: str, events: Sequence[Event], /) -> AbstractContextManager[object]:
        """Stands around a call of the publisher with these events."""
        ...

    def handling(self, stream: str, group: str, event: Event, /) -> AbstractContextManager[object]:
        """Stands around the handlers of an event."""
        ...


def observers(*several: Observer) -> Observer:
    """One observer that passes everything on to several; what one raises does not keep it from the next."""
    return _Several(several)


def guarded(observer: Observer | None) -> GuardedObserver | None:
    """The observer in a form that never raises; None stays None. TypeError for what cannot be one."""
    if observer is None or isinstance(observer, GuardedObserver):
        return observer
    return GuardedObserver(observer)


class GuardedObserver:
    """An observer, and the tracer in it if there is one, that cannot harm the work.

    What it raises is logged: the first error of a class, at a kind of record, with its traceback, and
    the same again at DEBUG.
    """

    def __init__(self, observer: Observer) -> None:
        if not callable(observer):
            raise TypeError(f"an observer is a callable that takes a record, not {type(observer).__name__}")
        if inspect.iscoroutinefunction(observer) or inspect.iscoroutinefunction(type(observer).__call__):
            raise TypeError("an observer is called, and not awaited: it must not be async")
        self._observer = observer
        self._tracer = observer if isinstance(observer, Tracer) else None
        self._logged: set[tuple[str, type[BaseException]]] = set()

    def __call__(self, record: Record) -> None:
        try:
            self._observer(record)
        except _ERRORS as error:  # it is logged, and must not end the work
            self.note(type(record).__name__, error)

    @property
    def traces(self) -> bool:
        """Whether there is a tracer in it; the three below do nothing without one."""
        return self._tracer is not None

    def headers(self) -> Mapping[str, str]:
        """As the tracer says."""
        try:
            headers = {} if self._tracer is None else dict(self._tracer.headers())
            # What cannot be stored must not fail the emit.
            encode_json(headers, what="the tracer's headers")
            if not all(isinstance(text, str) for pair in headers.items() for text in pair):
                raise TypeError("a header's name and value are strings")
            return headers
        except _ERRORS as error:  # as above
            self.note("headers", error)
            return {}

    def publishing(self, outbox: str, events: Sequence[Event]) -> AbstractContextManager[None]:
        """As the tracer says."""
        tracer = self._tracer
        make = None if tracer is None else lambda: tracer.publishing(outbox, events)
        return _Around(self, "publishing", make)

    def handling(self, stream: str, group: str, event: Event) -> AbstractContextManager[None]:
        """As the tracer says."""
        tracer = self._tracer
        make = None if tracer is None else lambda: tracer.handling(stream, group, event)
        return _Around(self, "handling", make)

    def note(self, what: str, error: BaseException) -> None:
        """Log an error of the observer's."""
        is_new = (what, type(error)) not in self._logged
        self._logged.add((what, type(error)))
        _log.log(
            logging.ERROR if is_new else logging.DEBUG,
            "the observer failed on %s, which changes nothing else",
            what,
            exc_info=error,
        )


class _Around(AbstractContextManager[None]):
    """A tracer's context manager that neither raises nor swallows anything."""

    def __init__(
        self, owner: GuardedObserver, what: str, make: Callable[[], AbstractContextManager[object]] | None
    ) -> None:
        self._owner = owner
        self._what = what
        self._make = make
        self._context: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        if self._make is None:
            return
        try:
            context = self._make()
            context.__enter__()
        except _ERRORS as error:  # as above
            self._owner.note(self._what, error)
        else:
            self._context = context

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._context is None:
            return
        try:
            self._context.__exit__(kind, error, traceback)
        except _ERRORS as second:  # as above
            if second is not error:
                self._owner.note(self._what, second)


class _Several:
    def __init__(self, several: Sequence[Observer]) -> None:
        self._each = [GuardedObserver(one) for one in several]

    def __call__(self, record: Record) -> None:
        for one in self._each:
            one(record)

    def headers(self) -> Mapping[str, str]:
        return {name: value for one in self._each for name, value in one.headers().items()}

    @contextmanager
    def publishing(self, outbox: str, events: Sequence[Event]) -> Iterator[None]:
        with ExitStack() as stack:
            for one in self._each:
                stack.enter_context(one.publishing(outbox, events))
            yield

    @contextmanager
    def handling(self, stream: str, group: str, event: Event) -> Iterator[None]:
        with ExitStack() as stack:
            for one in self._each:
                stack.enter_context(one.handling(stream, group, event))
            yield
