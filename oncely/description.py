"""An error as text, for the column or the dead letter that keeps it: its class, a colon, its message.

Operators choose dead events and dead letters by what stands before the colon.
"""

from __future__ import annotations

__all__ = ["describe"]


def describe(error: BaseException, *, longest: int) -> str:
    """The error's class and its message, at most `longest` characters, in a form that a text column takes."""
    try:
        message = str(error)
    except Exception as second:  # noqa: BLE001  an error that cannot speak is still an error
        message = f"(its message raised {type(second).__name__})"
    text = f"{type(error).__name__}: {message}"[:longest]
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
