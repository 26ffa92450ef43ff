"""How the drain grows with the batch, the relays, the backlog and the keys: the curves of the README.

All relays of a drain run in this one process, so that with a publisher that does nothing they share a core;
with one that takes 5 ms a batch they wait beside one another, as relays in processes of their own do.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tests.benchmarks.ratio import Curve, Servers, rate
from tests.benchmarks.relay import EVENTS, Crowd, Drain, five_milliseconds

BATCHES = (10, 30, 100, 300, 1_000, 2_000)
RELAYS = (1, 2, 4)
BACKLOGS = (10_000, 30_000, 100_000, 300_000)
KEYS = (0, 1, 100, 10_000)
ROUNDS = 3


async def measure(servers: Servers) -> Sequence[Curve]:
    engine = create_async_engine(servers.postgres.url(), pool_size=20)
    try:
        return [
            await _curve(
                "one relay, a publisher that does nothing",
                "events a batch",
                {"": {batch: Drain(engine, f"batch_{batch}", batch=batch) for batch in BATCHES}},
            ),
            await _curve(
                "batches of 100",
                "relays",
                {
                    "publisher 0 ms": {n: Drain(engine, f"idle_{n}", relays=n, batch=100) for n in RELAYS},
                    "publisher 5 ms": {n: _waiting(engine, n) for n in RELAYS},
                },
            ),
            await _curve(
                "one relay, batches of 1,000",
                "events pending",
                {"": {count: _with_backlog(engine, count) for count in BACKLOGS}},
            ),
            await _curve(
                "one relay, batches of 1,000",
                "keys among 10,000 events (0: none has one)",
                {"": {count: _with_keys(engine, count) for count in KEYS}},
            ),
        ]
    finally:
        await engine.dispose()


def _waiting(engine: AsyncEngine, relays: int) -> Drain:
    return Drain(engine, f"waiting_{relays}", relays=relays, batch=100, publish=five_milliseconds)


def _with_backlog(engine: AsyncEngine, count: int) -> Drain:
    """The drained events leave it, and are emitted anew before each round."""
    return Drain(engine, f"pending_{count}", [Crowd(count - EVENTS)])


def _with_keys(engine: AsyncEngine, count: int) -> Drain:
    key = f"'k' || number % {count}" if count else "NULL"
    return Drain(engine, f"keys_{count}", fresh=Crowd(EVENTS, key))


async def _curve(title: str, axis: str, lines: dict[str, dict[int, Drain]]) -> Curve:
    """All places take turns, after a round to warm up."""
    places = [(name, place, drain) for name, line in lines.items() for place, drain in line.items()]
    rates: dict[tuple[str, int], list[float]] = {(name, place): [] for name, place, _ in places}
    for number in range(ROUNDS + 1):
        for name, place, drain in places:
            measured = await rate(drain)
            if number:
                rates[name, place].append(measured)
    return Curve(
        title,
        axis,
        {name: {place: tuple(rates[name, place]) for place in line} for name, line in lines.items()},
    )
