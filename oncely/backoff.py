"""How long to wait before the next attempt: exponential, bounded, with jitter."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import timedelta

__all__ = ["Backoff"]


@dataclass(frozen=True, slots=True)
class Backoff:
    """`first` after the first failure, `factor` times as long after each further one, up to `maximum`.

    `jitter` is the share of each delay that is left to chance, 0 to 1: a delay d becomes a value
    between d × (1 − jitter) and d, so that those who failed together do not return together.
    """

    first: timedelta = timedelta(seconds=1)
    maximum: timedelta = timedelta(minutes=5)
    factor: float = 2.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        for name, delay in (("first", self.first), ("maximum", self.maximum)):
            if not isinstance(delay, timedelta):
                raise TypeError(f"{name} must be a timedelta, not {type(delay).__name__}")
        for name, number in (("factor", self.factor), ("jitter", self.jitter)):
            if not isinstance(number, (int, float)):
                raise TypeError(f"{name} must be a number, not {type(number).__name__}")
        if self.first <= timedelta(0):
            raise ValueError(f"first must be positive, not {self.first}")
        if self.maximum < self.first:
            raise ValueError(f"maximum ({self.maximum}) is below first ({self.first})")
        if self.factor < 1:
            raise ValueError(f"factor must be 1 or more, not {self.factor}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter is a share from 0 to 1, not {self.jitter}")

    def delay(self, failures: int) -> timedelta:
        """How long to wait after so many failures in a row; 1 is the first."""
        if failures < 1:
            raise ValueError(f"failures count from 1, not {failures}")
        longest = self.maximum / self.first
        try:
            growth = min(self.factor ** (failures - 1), longest)
        except OverflowError:
            growth = longest
        spread = 1 - self.jitter * random.random()  # noqa: S311  not a secret
        return self.first * growth * spread
