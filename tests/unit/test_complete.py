"""Work that is carried to its end although whoever waits for it is cancelled, and work that is not."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import anyio
import pytest

from oncely.loop import complete, within

PATIENCE = timedelta(seconds=20)


class Work:
    """Says when it has `begun`, ends when it `may_end`, and keeps what happened to it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.error = error
        self.happened: list[object] = []

    async def __call__(self) -> int:
        self.begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.happened.append("work was cancelled")
            raise
        self.happened.append("work ended")
        if self.error is not None:
            raise self.error
        return 7

    async def undo(self, result: int) -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.happened.append("undo was cancelled")
            raise
        self.happened.append(f"undid {result}")


async def begun(work: Work, patience: timedelta = PATIENCE) -> asyncio.Task[int]:
    task = asyncio.create_task(complete(work(), patience=patience, undo=work.undo))
    await work.begun.wait()
    return task


async def test_without_cancellation_it_is_the_work_and_nothing_is_undone() -> None:
    work = Work()
    work.may_end.set()
    assert await (await begun(work)) == 7
    assert work.happened == ["work ended"]


async def test_the_works_own_error_goes_on() -> None:
    work = Work(ZeroDivisionError("mine"))
    work.may_end.set()
    with pytest.raises(ZeroDivisionError, match="mine"):
        await (await begun(work))


@pytest.mark.parametrize("times", [1, 2, 5])
async def test_cancelled_it_waits_for_the_end_and_undoes_it_however_often_it_was_cancelled(
    times: int,
) -> None:
    work = Work()
    task = await begun(work)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not task.done()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.happened == ["work ended", "undid 7"]


async def test_a_timeout_is_a_timeout_after_the_end() -> None:
    work = Work()
    asyncio.get_running_loop().call_later(0.02, work.may_end.set)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await complete(work(), patience=PATIENCE, undo=work.undo)
    assert work.happened == ["work ended", "undid 7"]


async def test_a_cancel_scope_of_anyio_which_cancels_at_every_turn_waits_for_the_end_too() -> None:
    work = Work()
    asyncio.get_running_loop().call_later(0.02, work.may_end.set)
    with anyio.move_on_after(0.001) as scope:
        await complete(work(), patience=PATIENCE, undo=work.undo)
    assert scope.cancelled_caught
    assert work.happened == ["work ended", "undid 7"]


async def test_an_error_of_work_that_nobody_waits_for_is_the_cancellations_cause() -> None:
    work = Work(ZeroDivisionError("mine"))
    task = await begun(work)
    task.cancel()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError) as raised:
        await task
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert work.happened == ["work ended"]


async def test_without_patience_left_the_work_is_cancelled() -> None:
    work = Work()
    task = await begun(work, timedelta(milliseconds=1))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.happened == ["work was cancelled"]


async def test_work_that_was_cancelled_itself_is_a_cancellation() -> None:
    async def cancelled() -> int:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await complete(cancelled(), patience=PATIENCE)


async def test_no_task_is_left_behind() -> None:
    before = asyncio.all_tasks()
    await test_cancelled_it_waits_for_the_end_and_undoes_it_however_often_it_was_cancelled(2)
    await test_without_patience_left_the_work_is_cancelled()
    assert asyncio.all_tasks() == before


async def test_within_a_limit_it_is_the_work() -> None:
    work = Work()
    work.may_end.set()
    assert await within(work(), PATIENCE) == 7


async def test_over_the_limit_the_work_is_cancelled() -> None:
    work = Work()
    with pytest.raises(TimeoutError, match=r"^no answer within 0:00:00.001000$"):
        await within(work(), timedelta(milliseconds=1))
    assert work.happened == ["work was cancelled"]


async def test_over_the_limit_it_is_cancelled_until_it_lets_go() -> None:
    cancelled: list[bool] = []

    async def deaf() -> None:
        while len(cancelled) < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(True)
        raise asyncio.CancelledError

    with pytest.raises(TimeoutError):
        await within(deaf(), timedelta(milliseconds=1))
    assert len(cancelled) == 3


async def test_an_answer_that_comes_in_the_very_moment_counts() -> None:
    async def just_then() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 7
        raise AssertionError

    assert await within(just_then(), timedelta(milliseconds=1)) == 7


async def test_an_error_that_comes_in_the_very_moment_goes_on() -> None:
    async def just_then() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        await within(just_then(), timedelta(milliseconds=1))
