"""Finding: one thing that a check has to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong, or could be better (`advice`), about what; `remedy` is SQL or a command to paste."""

    severity: Literal["wrong", "advice"]
    about: str
    message: str
    remedy: str | None = None
