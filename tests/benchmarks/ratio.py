"""One figure: how fast we are, how fast the bare limit is, and the ratio that is promised."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from oncely.testing import EmbeddedPostgres, EmbeddedValkey

__all__ = ["Absent", "Curve", "Ratio", "Servers", "at_once", "compare", "rate"]


@dataclass(frozen=True)
class Servers:
    """The engines of this run."""

    postgres: EmbeddedPostgres
    valkey: EmbeddedValkey


@dataclass(frozen=True)
class Ratio:
    """Rates are medians, in operations a second; `ratio` is the median of the pairs' ratios.

    `rounds` are the pairs, ours and the other's; `against` names the other; without a `limit` nothing is
    promised.
    """

    name: str
    ours: float
    bare: float
    ratio: float
    lowest: float
    highest: float
    limit: float | None
    rounds: tuple[tuple[float, float], ...] = ()
    against: str = "bare"
    note: str = ""

    @classmethod
    def of(
        cls,
        name: str,
        rounds: Sequence[tuple[float, float]],
        *,
        limit: float | None,
        against: str = "bare",
        note: str = "",
    ) -> Ratio:
        ratios = [ours / bare for ours, bare in rounds]
        return cls(
            name=name,
            ours=statistics.median(ours for ours, _ in rounds),
            bare=statistics.median(bare for _, bare in rounds),
            ratio=statistics.median(ratios),
            lowest=min(ratios),
            highest=max(ratios),
            limit=limit,
            rounds=tuple(rounds),
            against=against,
            note=note,
        )

    @property
    def holds(self) -> bool:
        return self.limit is None or self.ratio >= self.limit


@dataclass(frozen=True)
class Absent:
    """What could not be measured here, and why: it keeps its row in the table."""

    name: str
    reason: str


@dataclass(frozen=True)
class Curve:
    """How a rate grows: for each line its name, and for each place on the axis the rates of its rounds."""

    title: str
    axis: str
    lines: dict[str, dict[int, tuple[float, ...]]]


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
            first, second = await rate(ours), await rate(bare)
        else:
            second, first = await rate(bare), await rate(ours)
        if round_number:
            rates.append((first, second))
    return Ratio.of(name, rates, limit=limit)


async def rate(work: Callable[[], Awaitable[int]]) -> float:
    """Operations a second of one round."""
    prepare = getattr(work, "prepare", None)
    if prepare is not None:
        await prepare()
    gc.collect()
    begin = time.perf_counter()
    done = await work()
    return done / (time.perf_counter() - begin)


async def at_once(request: Callable[[], Awaitable[None]], callers: int, times: int) -> int:
    """So many callers at once make the request so many times each; how many requests that is."""

    async def caller() -> None:
        for _ in range(times):
            await request()

    await asyncio.gather(*(caller() for _ in range(callers)))
    return callers * times
