"""A function that makes an outside call, decorated so that it is made once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec

from oncely.effects.run import Verify

if TYPE_CHECKING:
    from oncely.effects.effects import Effects

__all__ = ["Once"]

_P = ParamSpec("_P")


class Once(Generic[_P]):
    """What `Effects.once` makes of an async function whose first parameter is the provider's token.

    Called without that parameter, it runs the function as an effect. The other arguments, by name
    and with their defaults, are the effect's args.
    """

    def __init__(
        self,
        effects: Effects,
        function: Callable[Concatenate[str, _P], Awaitable[object]],
        *,
        key: Callable[..., str] | None,
        verify: Verify | None,
        ttl: timedelta | None,
        wait: timedelta,
    ) -> None:
        functools.update_wrapper(self, function)
        self._effects = effects
        self._function = function
        self._signature = inspect.signature(function)
        self._key = key
        self._verify = verify
        self._ttl = ttl
        self._wait = wait

    async def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        """Run with the key that the arguments give; TypeError when no `key` function was given."""
        if self._key is None:
            raise TypeError(f"{self._name} has no key of its own: call {self._name}.run(key, …)")
        return await self.run(self._key(*args, **kwargs), *args, **kwargs)

    async def run(self, key: str, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        """Run with this key."""
        bound = self._signature.bind("", *args, **kwargs)
        bound.apply_defaults()
        _, *named = bound.arguments.items()

        async def call(provider_token: str) -> object:
            return await self._function(provider_token, *args, **kwargs)

        return await self._effects.run(
            key, call, args=dict(named), verify=self._verify, ttl=self._ttl, wait=self._wait
        )

    @property
    def _name(self) -> str:
        return getattr(self._function, "__qualname__", repr(self._function))
