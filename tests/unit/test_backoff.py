"""The delays between attempts."""

from datetime import timedelta
from typing import Any

import pytest

from oncely.backoff import Backoff


def test_it_grows_by_the_factor_up_to_the_maximum() -> None:
    backoff = Backoff(first=timedelta(seconds=1), maximum=timedelta(seconds=10), factor=2, jitter=0)
    assert [backoff.delay(n).total_seconds() for n in range(1, 7)] == [1, 2, 4, 8, 10, 10]


def test_it_stays_at_the_maximum_however_long_the_outage() -> None:
    assert Backoff(factor=3, jitter=0).delay(1_000_000) == timedelta(minutes=5)


def test_a_factor_of_one_never_grows() -> None:
    assert Backoff(factor=1, jitter=0).delay(1_000_000) == timedelta(seconds=1)


def test_jitter_only_shortens_and_by_its_share_at_most() -> None:
    backoff = Backoff(first=timedelta(seconds=8), maximum=timedelta(seconds=8), jitter=0.25)
    delays = {backoff.delay(1) for _ in range(200)}
    assert len(delays) > 100
    assert all(timedelta(seconds=6) <= delay <= timedelta(seconds=8) for delay in delays)


@pytest.mark.parametrize(
    "wrong",
    [
        {"first": timedelta(0)},
        {"first": timedelta(seconds=2), "maximum": timedelta(seconds=1)},
        {"factor": 0.5},
        {"jitter": 1.5},
    ],
)
def test_nonsense_is_refused_when_it_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Backoff(**wrong)


def test_failures_count_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        Backoff().delay(0)


def test_a_factor_that_outgrows_floats_stays_at_the_maximum() -> None:
    assert Backoff(factor=2.5, jitter=0).delay(1_000_000) == timedelta(minutes=5)
