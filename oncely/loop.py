"""Run, tick, back off, stop within a grace period: once, for every worker of oncely.

A worker is a *tick* that does a bounded piece of work and says whether there may be more. The loop
calls it again and again. When there is nothing to do it lets the worker wait; when the other side
is away it backs off; when it is told to stop it starts nothing more, gives the running tick a
grace period, and then cancels it. A tick that is cancelled gives back what it holds; for that it
has as long again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from oncely.backoff import Backoff

__all__ = ["complete", "end", "is_cancelled", "one_at_a_time", "run_loop", "wait_for_either", "within"]

_T = TypeVar("_T")
_S = TypeVar("_S")
_P = ParamSpec("_P")

_INSISTENCE = 0.5
"""Seconds from one cancellation to the next."""


async def run_loop(
    tick: Callable[[], Coroutine[Any, Any, bool]],
    *,
    stop: asyncio.Event | None,
    idle: Callable[[], Coroutine[Any, Any, object]],
    grace: timedelta,
    backoff: Backoff,
    is_outage: Callable[[Exception], bool],
    on_outage: Callable[[Exception, timedelta], object],
) -> None:
    """Call `tick` until `stop` is set or the task is cancelled.

    `tick` returns True when it should be called again at once; after False, `idle` is awaited: it
    returns when there may be work. An exception for which `is_outage` is true is reported to
    `on_outage` with the delay before the next tick, which grows by `backoff` while the outage
    lasts; every other exception ends the loop.
    """
    stop = stop if stop is not None else asyncio.Event()
    stopping = asyncio.ensure_future(stop.wait())
    failures = 0
    try:
        while not stop.is_set():
            if stopping.done():
                stopping.result()  # an event of another loop, which nobody can wait for here
            try:
                more = await _until_stopped(tick(), stopping, grace)
            except Exception as error:
                if not is_outage(error):
                    raise
                failures += 1
                delay = backoff.delay(failures)
                on_outage(error, delay)
                await _wait_for_either(asyncio.sleep(delay.total_seconds()), stopping)
            else:
                failures = 0
                if not more:
                    await _wait_for_either(idle(), stopping)
    finally:
        await end(stopping)


def one_at_a_time(
    run: Callable[Concatenate[_S, _P], Awaitable[_T]],
) -> Callable[Concatenate[_S, _P], Coroutine[Any, Any, _T]]:
    """The method, which raises RuntimeError while it runs on the same object: what it keeps is one run's."""

    @wraps(run)
    async def alone(service: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        state = vars(service)
        if state.get("_runs", False):
            what = type(service).__name__
            raise RuntimeError(f"this {what} runs already; make one {what} for each loop")
        state["_runs"] = True
        try:
            return await run(service, *args, **kwargs)
        finally:
            state["_runs"] = False

    return alone


async def wait_for_either(waiting: Coroutine[Any, Any, object], stop: asyncio.Event) -> None:
    """Returns when `waiting` has ended or `stop` is set, whichever is first. Errors go on."""
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await _wait_for_either(waiting, stopping)
    finally:
        await end(stopping)


async def complete(
    work: Coroutine[Any, Any, _T],
    *,
    patience: timedelta,
    undo: Callable[[_T], Awaitable[object]] | None = None,
) -> _T:
    """The result of `work`, which is carried to its end although the caller is cancelled meanwhile.

    The cancellation then goes on, after `undo` was given the result that nobody else will see.
    Both together have `patience`, or they are cancelled too; being cancelled again shortens nothing.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancelled():
            raise

        async def finish() -> None:
            result = await task
            if undo is not None:
                await undo(result)

        ending = asyncio.ensure_future(finish())
        deadline = time.monotonic() + patience.total_seconds()
        while not ending.done() and (left := deadline - time.monotonic()) > 0:
            # Whoever cancels again is told in the end as well. anyio does so at every turn of the loop.
            with suppress(asyncio.CancelledError):
                await asyncio.wait({ending}, timeout=left)
        if not ending.done():
            await end(ending, patience=patience)
        elif (error := ending.exception()) is not None:
            raise asyncio.CancelledError from error
        raise


async def end(*tasks: asyncio.Future[Any], patience: timedelta | None = None) -> bool:
    """Cancel the tasks and wait until they have ended, for `patience` at most; whether they have.

    Being cancelled meanwhile shortens nothing, and goes on after.
    """
    running = {task for task in tasks if not task.done()}
    for task in running:
        task.cancel()
    deadline = None if patience is None else time.monotonic() + patience.total_seconds()
    cancelled: asyncio.CancelledError | None = None
    while running and (deadline is None or time.monotonic() < deadline):
        left = None if deadline is None else deadline - time.monotonic()
        try:
            await asyncio.wait(running, timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
        # Not as the wait says: who is cancelled at every turn of the loop, as by anyio, never sees it end.
        running = {task for task in running if not task.done()}
    if cancelled is not None:
        raise cancelled
    return not running


async def within(work: Coroutine[Any, Any, _T], limit: timedelta) -> _T:
    """The result of `work`, or TimeoutError when it takes longer than `limit`.

    For calls to a server that may have vanished without a word. A driver that is cancelled would first
    tell that server, and wait for an answer; so it is cancelled again and again until it lets go.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=limit.total_seconds())
        if task.done():
            return task.result()
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_INSISTENCE)
            if task.done() and not task.cancelled():
                task.exception()  # seen, or asyncio would complain that nobody looked
    if not task.cancelled():
        return task.result()  # it ended in the very moment
    raise TimeoutError(f"no answer within {limit}")


def is_cancelled() -> bool:
    """Whether somebody has cancelled the running task; if not, a CancelledError came from within."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _wait_for_either(waiting: Coroutine[Any, Any, object], stopping: asyncio.Future[Any]) -> None:
    task: asyncio.Future[Any] = asyncio.ensure_future(waiting)
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        await end(task)


async def _until_stopped(
    work: Coroutine[Any, Any, bool], stopping: asyncio.Future[Any], grace: timedelta
) -> bool:
    """The result of `work`; it is cancelled when it still runs `grace` after the stop."""
    task: asyncio.Future[bool] = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait({task}, timeout=grace.total_seconds())
        if task.done():
            return task.result()
        await end(task, patience=grace)
        if task.done() and not task.cancelled():
            return task.result()
        return False
    except asyncio.CancelledError:
        await end(task, patience=grace)
        raise
