"""A claim that is kept alive while its call runs, and a call that ends with its claim.

The heartbeat extends the claim three times in its life. The call is cancelled when the claim ends:
at once when the store says that it has, else by this process's own clock. That clock was read
before the claim (or its extension) was asked for, so it is never behind the store's: whoever takes
the record after us does not find our call still running here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from oncely.effects.store import Store
from oncely.errors import EffectLost

__all__ = ["Claim", "Heartbeat", "now"]

_T = TypeVar("_T")


def now() -> float:
    """This process's monotonic clock, in seconds: the event loop's."""
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class Claim:
    """Who holds the record of `key`, until when at least (by `now()`), and what the provider is told."""

    key: str
    token: str
    provider_token: str
    until: float


class Heartbeat:
    """`await heartbeat.within(call)`, then `await heartbeat.ended()`."""

    def __init__(self, store: Store, claim: Claim, lease: timedelta) -> None:
        self._store = store
        self._claim = claim
        self._lease = lease
        self._scope = asyncio.timeout_at(claim.until)
        self._trouble: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    async def within(self, call: Callable[[str], Awaitable[_T]]) -> _T:
        """The call's result, or its error; EffectLost when the claim ended and the call with it."""
        self._task = asyncio.create_task(self._beat())
        try:
            async with self._scope:
                return await call(self._claim.provider_token)
        except TimeoutError as error:
            if not self._scope.expired():
                raise  # the call's own
            raise EffectLost(self._claim.key) from (self._trouble or error)
        finally:
            self._task.cancel()  # not awaited here: nothing may come between a result and its record

    async def ended(self) -> None:
        """Returns when the last beat has ended."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _beat(self) -> None:
        seconds = self._lease.total_seconds()
        while True:
            await asyncio.sleep(seconds / 3)
            asked = now()
            try:
                held = await self._store.extend(self._claim.key, self._claim.token, self._lease)
            except Exception as error:  # noqa: BLE001  tried again; what ends the call is the cause of its end
                self._trouble = error
                continue
            if self._scope.expired():
                return
            self._scope.reschedule(asked + seconds if held else asked)
            if not held:
                return
            self._trouble = None
