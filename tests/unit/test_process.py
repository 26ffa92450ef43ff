"""What a process owes its supervisor, seen from inside. Its ends by force are in tests/acceptance."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from oncely.process import run_process

MINUTE = timedelta(minutes=1)
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Handlers of signals are as they were, and no thread is left."""
    handlers, threads = [signal.getsignal(number) for number in SIGNALS], threading.active_count()
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert threading.active_count() == threads


async def return_seven(stop: asyncio.Event) -> int:
    return 7


def test_its_code_is_that_of_the_work() -> None:
    assert run_process(return_seven, grace=MINUTE) == 7


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_sets_stop(number: signal.Signals) -> None:
    async def work(stop: asyncio.Event) -> int:
        os.kill(os.getpid(), number)
        await stop.wait()
        return 7

    assert run_process(work, grace=MINUTE) == 7


def test_an_error_of_the_work_goes_on() -> None:
    async def work(stop: asyncio.Event) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_process(work, grace=MINUTE)


def test_what_the_work_has_left_running_is_cancelled() -> None:
    ended = []

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def work(stop: asyncio.Event) -> int:
        tasks.append(asyncio.create_task(for_ever()))
        await asyncio.sleep(0)
        return 0

    tasks: list[asyncio.Task[None]] = []
    assert run_process(work, grace=MINUTE) == 0
    assert ended == ["cancelled"]


def test_it_runs_in_the_loop_that_it_is_given() -> None:
    loop = asyncio.new_event_loop()

    async def work(stop: asyncio.Event) -> int:
        assert asyncio.get_running_loop() is loop
        return 7

    assert run_process(work, grace=MINUTE, loop_factory=lambda: loop) == 7
    assert loop.is_closed()


def test_in_a_thread_it_says_what_to_do_instead() -> None:
    with ThreadPoolExecutor() as pool:
        refused = pool.submit(run_process, return_seven, grace=MINUTE)
        with pytest.raises(RuntimeError, match="main thread"):
            refused.result()
