"""One figure: how fast we are, how fast the bare limit is, and the ratio that is promised."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from oncely.testing import EmbeddedPostgres, EmbeddedValkey

__all__ = ["Ratio", "Servers", "at_once", "compare"]


@dataclass(frozen=True)
class Servers:
    """The engines of this run."""

    postgres: EmbeddedPostgres
    valkey: EmbeddedValkey


@dataclass(frozen=True)
class Ratio:
    """Rates are medians, in operations a second; `ratio` is the median of the pairs' ratios."""

    name: str
    ours: float
    bare: float
    ratio: float
    lowest: float
    highest: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.ratio >= self.limit


async def compare(
    name: str,
    *,
    ours: Callable[[], Awaitable[int]],
    bare: Callable[[], Awaitable[int]],
    limit: float,
    rounds: int = 7,
) -> Ratio:
    """Runs the two in turn, after one round to warm up. Each returns how many operations it did.

    An object with a coroutine function `prepare` has it awaited before each round, untimed.
    """
    rates: list[tuple[float, float]] = []
    for round_number in range(rounds + 1):
        # Who goes first alternates, so that a drift of the machine's speed favours nobody.
        if round_number % 2:
            first, second = await _rate(ours), await _rate(bare)
        else:
            second, first = await _rate(bare), await _rate(ours)
        if round_number:
            rates.append((first, second))
    ratios = [our / limit_ for our, limit_ in rates]
    return Ratio(
        name=name,
        ours=statistics.median(our for our, _ in rates),
        bare=statistics.median(limit_ for _, limit_ in rates),
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        limit=limit,
    )


async def at_once(request: Callable[[], Awaitable[None]], callers: int, times: int) -> int:
    """So many callers at once make the request so many times each; how many requests that is."""

    async def caller() -> None:
        for _ in range(times):
            await request()

    await asyncio.gather(*(caller() for _ in range(callers)))
    return callers * times


async def _rate(work: Callable[[], Awaitable[int]]) -> float:
    prepare = getattr(work, "prepare", None)
    if prepare is not None:
        await prepare()
    gc.collect()
    begin = time.perf_counter()
    done = await work()
    return done / (time.perf_counter() - begin)
