"""A claim that is kept alive while its call runs, and a call that ends with its claim.

The heartbeat extends the claim after a third of its life. An extension that is not answered is given
up in time for another one, on another connection. The call is cancelled when the claim ends:
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
from oncely.loop import within

__all__ = ["Claim", "Heartbeat", "now"]

BEAT, ANSWER, AGAIN = 1 / 3, 1 / 4, 1 / 12
"""Parts of a lease: when it is extended, how long for an answer is waited, when it is tried again."""

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
        self._asking: set[asyncio.Task[bool]] = set()

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
        """Returns when the last beat, and whatever it asked of the store, has ended."""
        assert self._task is not None  # noqa: S101  `within` was called
        await asyncio.wait({self._task})
        if self._asking:
            await asyncio.wait(self._asking)

    async def _beat(self) -> None:
        pause = self._lease * BEAT
        while True:
            await asyncio.sleep(pause.total_seconds())
            asked = now()
            try:
                held = await self._extend()
            except Exception as error:  # noqa: BLE001  tried again; what ends the call is the cause of its end
                self._trouble, pause = error, self._lease * AGAIN
                continue
            if self._scope.expired():
                return
            self._scope.reschedule(asked + self._lease.total_seconds() if held else asked)
            if not held:
                return
            self._trouble, pause = None, self._lease * BEAT

    async def _extend(self) -> bool:
        limit = self._lease * ANSWER
        extending = self._store.extend(self._claim.key, self._claim.token, self._lease)
        task = asyncio.create_task(within(extending, limit))
        self._asking.add(task)
        task.add_done_callback(self._answered)
        # Not awaited to its end: a driver may take long to let go of a silent connection.
        await asyncio.wait({task}, timeout=limit.total_seconds())
        if not task.done():
            raise TimeoutError(f"the claim on {self._claim.key!r} was not extended within {limit}")
        return task.result()

    def _answered(self, task: asyncio.Task[bool]) -> None:
        self._asking.discard(task)
        if not task.cancelled():
            task.exception()  # seen, or asyncio would complain that nobody looked
