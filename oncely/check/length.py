"""Length: a length of time, spelled as a person reads it."""

from __future__ import annotations

from datetime import timedelta

__all__ = ["spell"]


def spell(length: timedelta) -> str:
    """The length in its two largest units: 0.067s, 13.5s, 3m 5s, 2h 40m, 6d 1h."""
    seconds = length.total_seconds()
    if seconds < 60:
        return f"{seconds:.3g}s"
    whole = round(seconds)
    if whole < 3600:
        return _two(whole, (60, "m"), (1, "s"))
    return _two(whole, (3600, "h"), (60, "m")) if whole < 86_400 else _two(whole, (86_400, "d"), (3600, "h"))


def _two(seconds: int, large: tuple[int, str], small: tuple[int, str]) -> str:
    rest = seconds % large[0] // small[0]
    return f"{seconds // large[0]:,}{large[1]}" + (f" {rest}{small[1]}" if rest else "")
