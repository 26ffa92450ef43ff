"""When an entry that was not acknowledged is due again, by how often it was delivered."""

from __future__ import annotations

from datetime import timedelta

__all__ = ["due_times", "tried_for"]

_MILLISECOND = timedelta(milliseconds=1)


def due_times(first_ms: int, attempts: int, factor: float, maximum: timedelta) -> list[int]:
    """How long an entry that was delivered 0, 1, 2, … times stays with whoever has it.

    The last one holds for all later deliveries. They are sent with every look for what is due, so there
    are no more than needed, however many attempts there may be.
    """
    longest = max(maximum // _MILLISECOND, first_ms)
    times = [first_ms, first_ms]
    for _ in range(attempts - 1):
        longer = int(min(times[-1] * factor, longest))
        if longer == times[-1]:
            break
        times.append(longer)
    return times


def tried_for(due: list[int], attempts: int) -> timedelta:
    """From the first of so many attempts to the last, when each of them fails at once."""
    milliseconds = sum(due[1:attempts]) + max(0, attempts - len(due)) * due[-1]
    return min(milliseconds, timedelta.max // _MILLISECOND) * _MILLISECOND
