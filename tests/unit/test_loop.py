"""The loop that every worker runs in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest

from oncely.backoff import Backoff
from oncely.loop import end, run_loop

INSTANT = Backoff(first=timedelta(microseconds=1), maximum=timedelta(microseconds=1))


async def run(
    tick: Callable[[], Coroutine[Any, Any, bool]],
    stop: asyncio.Event | None = None,
    *,
    grace: timedelta = timedelta(seconds=30),
    idle: Callable[[], Coroutine[Any, Any, object]] | None = None,
    outages: list[Exception] | None = None,
) -> None:
    async def for_ever() -> None:
        await asyncio.Event().wait()

    await run_loop(
        tick,
        stop=stop,
        idle=idle or for_ever,
        grace=grace,
        backoff=INSTANT,
        is_outage=lambda error: isinstance(error, ConnectionError),
        on_outage=lambda error, _: outages.append(error) if outages is not None else None,
    )


async def test_it_ticks_at_once_while_there_is_more_and_idles_when_not() -> None:
    stop, seen = asyncio.Event(), []
    answers = iter([True, True, False, True, False])

    async def tick() -> bool:
        seen.append("tick")
        return next(answers)

    async def idle() -> None:
        seen.append("idle")
        if seen.count("idle") == 2:
            stop.set()

    await run(tick, stop, idle=idle)
    assert seen == ["tick", "tick", "tick", "idle", "tick", "tick", "idle"]


async def test_a_stop_lets_the_running_tick_finish_and_starts_no_other() -> None:
    stop, ended = asyncio.Event(), []

    async def tick() -> bool:
        stop.set()
        await asyncio.sleep(0)
        ended.append(True)
        return True

    await run(tick, stop)
    assert ended == [True]


async def test_a_tick_that_outlives_the_grace_period_is_cancelled_and_may_give_back() -> None:
    stop, given_back = asyncio.Event(), []

    async def tick() -> bool:
        stop.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            given_back.append(True)
            raise
        return True

    await run(tick, stop, grace=timedelta(milliseconds=1))
    assert given_back == [True]


async def test_cancelling_the_loop_cancels_the_tick_and_waits_for_it() -> None:
    started, given_back = asyncio.Event(), []

    async def tick() -> bool:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            given_back.append(True)
        return True

    loop = asyncio.create_task(run(tick))
    await started.wait()
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop
    assert given_back == [True]


async def test_an_outage_is_reported_and_waited_out() -> None:
    stop = asyncio.Event()
    outages: list[Exception] = []
    failures = iter([ConnectionError("one"), ConnectionError("two")])

    async def tick() -> bool:
        error = next(failures, None)
        if error is not None:
            raise error
        stop.set()
        return False

    await run(tick, stop, outages=outages)
    assert [str(error) for error in outages] == ["one", "two"]


async def test_a_bug_ends_the_loop() -> None:
    async def tick() -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run(tick)


async def test_an_error_while_giving_back_is_not_lost() -> None:
    stop = asyncio.Event()

    async def tick() -> bool:
        stop.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ZeroDivisionError from None
        return True

    with pytest.raises(ZeroDivisionError):
        await run(tick, stop, grace=timedelta(milliseconds=1))


async def test_no_task_is_left_behind() -> None:
    before = asyncio.all_tasks()
    await test_it_ticks_at_once_while_there_is_more_and_idles_when_not()
    await test_an_outage_is_reported_and_waited_out()
    assert asyncio.all_tasks() == before


async def test_a_stop_that_belongs_to_another_loop_is_an_error_and_no_hot_loop() -> None:
    stop = asyncio.Event()

    def elsewhere() -> None:
        with contextlib.suppress(TimeoutError):
            asyncio.run(asyncio.wait_for(stop.wait(), 0.001))

    await asyncio.to_thread(elsewhere)

    async def tick() -> bool:
        return False

    async with asyncio.timeout(5):
        with pytest.raises(RuntimeError, match="bound to a different event loop"):
            await run(tick, stop)


@pytest.mark.parametrize("times", [2, 5])
async def test_cancelled_again_it_still_waits_for_the_tick(times: int) -> None:
    started, may_end, given_back = asyncio.Event(), asyncio.Event(), []

    async def tick() -> bool:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()
            given_back.append(True)
        return True

    loop = asyncio.create_task(run(tick))
    await started.wait()
    for _ in range(times):
        loop.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not loop.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await loop
    assert given_back == [True]


async def test_what_is_cancelled_is_not_waited_for_without_end() -> None:
    async def stubborn() -> None:
        while not freed.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await freed.wait()

    freed = asyncio.Event()
    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    assert await end(task, patience=timedelta(milliseconds=1)) is False
    freed.set()
    assert await end(task) is True


async def test_who_is_cancelled_at_every_turn_of_the_loop_still_sees_the_end() -> None:
    loop, task = asyncio.get_running_loop(), asyncio.create_task(asyncio.Event().wait())
    await asyncio.sleep(0)
    ending = asyncio.create_task(end(task))

    def cancel_again() -> None:
        if turns and not ending.done():
            turns.pop()
            loop.call_soon(cancel_again)
            ending.cancel()

    turns = [None] * 1_000
    loop.call_soon(cancel_again)
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert task.cancelled()
    assert len(turns) > 900
