"""What an observer is told of one run of an effect: how it ended, and whether the call was made."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, TypeAlias

from oncely.effects.run import Run
from oncely.errors import EffectFailed, EffectLost, EffectPending, EffectUnknown, KeyReused
from oncely.telemetry.observer import GuardedObserver
from oncely.telemetry.records import EffectRun

__all__ = ["watched"]

_Outcome: TypeAlias = Literal[
    "done", "failed", "unknown", "lost", "stored", "found", "refused", "pending", "in_doubt", "reused"
]


@contextmanager
def watched(
    run: Run, observer: GuardedObserver, *, effects: str, key: str, failed_on: tuple[type[Exception], ...]
) -> Iterator[None]:
    """Tell how the run in the block ended. Of one that was cut off before it knew anything, nothing."""
    begun = time.monotonic()
    outcome: _Outcome | None = None
    name = ""
    try:
        yield
        outcome = "done" if run.stage == "calling" else "found" if run.found else "stored"
    except BaseException as error:
        outcome, name = _outcome(run, error, key, failed_on), type(error).__name__
        raise
    finally:
        if outcome is not None:
            duration = timedelta(seconds=time.monotonic() - begun)
            observer(EffectRun(effects=effects, outcome=outcome, error=name, duration=duration))


def _outcome(
    run: Run, error: BaseException, key: str, failed_on: tuple[type[Exception], ...]
) -> _Outcome | None:
    if isinstance(error, EffectLost) and error.key == key:  # and not that of an effect inside the call
        return "lost"
    if run.stage == "calling":
        in_doubt = isinstance(error, EffectUnknown) and error.key == key
        return "failed" if isinstance(error, failed_on) and not in_doubt else "unknown"
    if run.stage == "asking":
        return "in_doubt"
    if isinstance(error, EffectUnknown):
        return "in_doubt"
    if isinstance(error, EffectFailed):
        return "refused"
    if isinstance(error, EffectPending):
        return "pending"
    return "reused" if isinstance(error, KeyReused) else None
