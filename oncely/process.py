"""A process that a supervisor can stop: its signals, its time to end, its exit code.

SIGTERM or SIGINT sets `stop`, and what runs has `grace` to come to its end. A second signal does not
wait for that. Nor does the process outlive the grace, whatever hangs then: a task that ignores its
cancellation, a thread, a handler that blocks the event loop. So neither leans on the loop: the signals
are Python's own (one that the loop receives is not heard while it is blocked), and a thread keeps the time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeAlias

__all__ = ["LoopFactory", "run_process"]

LoopFactory: TypeAlias = Callable[[], asyncio.AbstractEventLoop]

LEFT_BEHIND = 3
"""The exit code when something had not ended within the grace."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_ECHO = 0.1
"""Seconds in which a signal is the first one again: a terminal tells a whole group of processes, and a
shell or a runner in it passes on what it was told."""


def run_process(
    work: Callable[[asyncio.Event], Coroutine[Any, Any, int]],
    *,
    grace: timedelta,
    loop_factory: LoopFactory | None = None,
) -> int:
    """The exit code that `work(stop)` returns, run in an event loop of its own, made by `loop_factory`.

    Does not return, but ends the process: with LEFT_BEHIND when `grace` is over after a stop (or after
    the work) and something runs still; with 128 and the signal's number at a second signal.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("only the main thread is told of signals; elsewhere, await run(stop)")
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        ending = _Ending(runner.get_loop(), grace)
        with ending.listening():
            try:
                ending.code = runner.run(work(ending.stop))
            finally:
                ending.begin()
                runner.close()  # which waits for tasks and threads
    return ending.code


class _Ending:
    """Begins with the first signal, or when the work is done; is over in time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, grace: timedelta) -> None:
        self.stop = asyncio.Event()
        self.code = 0
        self._loop = loop
        self._grace = grace.total_seconds()
        self._signalled_at: float | None = None
        self._begun: SimpleQueue[None] = SimpleQueue()  # unlike an Event it may be used by a signal's handler
        self._over = threading.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals come here, and time is kept."""
        watch = threading.Thread(target=self._watch, name="oncely-grace", daemon=True)
        watch.start()
        before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._over.set()
            watch.join()

    def begin(self) -> None:
        """From now on there is `grace`, unless it has begun before."""
        self._begun.put(None)

    def _receive(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
            self.begin()
            with suppress(RuntimeError):  # the loop is closed: all is done
                self._loop.call_soon_threadsafe(self.stop.set)
        elif now - self._signalled_at > _ECHO:
            _leave(128 + number, f"{signal.Signals(number).name} again, so nothing more is waited for")

    def _watch(self) -> None:
        self._begun.get()
        if self._over.wait(self._grace):
            return
        words = f"not at an end after {self._grace:g} s"
        try:
            for task in asyncio.all_tasks(self._loop):
                words += f"\n  left behind: {task!r}"
        finally:
            _leave(self.code or LEFT_BEHIND, words)


def _leave(code: int, words: str) -> None:
    """As a crash would, but for a last word: whoever hangs may hold the locks of logging or of stdout."""
    os.write(2, f"oncely: {words}\n".encode(errors="replace"))
    os._exit(code)
