"""Effects: a call that no transaction can undo is made once, or is known to be in doubt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec

from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely.arguments import LONGEST, check_callable, check_duration, check_kind, check_wait
from oncely.effects.once import Once
from oncely.effects.run import Call, Policy, Run, Verify
from oncely.effects.table_store import TableStore
from oncely.effects.watch import watched
from oncely.errors import EffectFailed
from oncely.storable import check_key
from oncely.tables import effects_table
from oncely.telemetry.observer import Observer, guarded
from oncely.transaction import Sessionmaker

__all__ = ["Effects"]

_P = ParamSpec("_P")


class Effects(TableStore):
    """Keeps one record per call to the outside, on PostgreSQL or SQLite.

    `sessionmaker` is an `async_sessionmaker` or an engine; `bind` gives it later. `stale_after` is
    how long an owner that says nothing is waited for: longer than the network may stand still,
    since a call is cancelled when its owner cannot reach the database for so long. Exceptions of
    the types in `failed_on`, like EffectFailed, mean that the call did not happen, for good.

    Of an error, the record keeps the class and a message of at most 1,000 characters; `redact`
    makes that message, where the exception's own must not be stored.

    The `observer` is told how each run ended (`oncely.telemetry.EffectRun`).

    Below `run` is the store level (see `oncely.effects.Store`): claim, extend, finish, take, renew,
    get, records, purge, delete.
    """

    def __init__(
        self,
        metadata: MetaData,
        *,
        stale_after: timedelta,
        sessionmaker: Sessionmaker | AsyncEngine | None = None,
        failed_on: Iterable[type[Exception]] = (),
        redact: Callable[[BaseException], str] = str,
        table_name: str = "effects",
        schema: str | None = None,
        observer: Observer | None = None,
    ) -> None:
        check_kind(failed_on, Iterable, "failed_on")
        failed_on = tuple(failed_on)
        for type_ in failed_on:
            check_kind(type_, type, "each of failed_on")
            if not issubclass(type_, Exception):
                raise TypeError(f"failed_on names subclasses of Exception, not {type_!r}")
        check_callable(redact, "redact")
        super().__init__(effects_table(metadata, table_name, schema), sessionmaker, stale_after=stale_after)
        self._observer = guarded(observer)
        self._policy = Policy(stale_after, (EffectFailed, *failed_on), _describer(redact))

    async def run(
        self,
        key: str,
        call: Call,
        *,
        args: object = None,
        verify: Verify | None = None,
        ttl: timedelta | None = None,
        wait: timedelta = timedelta(0),
    ) -> Any:
        """Make the call of this key, if it has not been made, and return its result as JSON values.

        `call(provider_token)` gets a token that is the same in every attempt: send it as the
        provider's own idempotency key. Its exceptions go on as they are. EffectFailed, and those of
        `failed_on`, are recorded as failed; all others, and cancellation, leave the record unknown.

        A later run returns the stored result, or raises EffectFailed; while another owner makes the
        call it waits, for `wait` at most, and then raises EffectPending. An unknown call is never
        made again unless `verify(key, args)` says so: it returns the result that the call had, or
        NOT_HAPPENED; what it raises goes on and changes nothing. A verifier with a parameter
        `provider_token` is given that too, by name. Without one: EffectUnknown.

        Other `args` than those the key was first used with: KeyReused. `ttl`, from the end of the
        call, is when a finished record is forgotten and the key is free; without it, never.

        EffectLost: the claim ended before the end of the call could be recorded. EffectUnknown
        right after the call: its result could not be stored, or the database not be reached.

        Raises, before any SQL: InvalidKey for a key, ValueError for args, ttl or wait, that cannot be;
        TypeError for what is of another type.
        """
        check_key(key, "key")
        check_callable(call, "call")
        _check_terms(verify, ttl, wait)
        run = Run(self, self._policy, key=key, args=args, call=call, verify=verify, ttl=ttl, wait=wait)
        if self._observer is None:
            return await run()
        name, failed_on = self.table.fullname, self._policy.failed_on
        with watched(run, self._observer, effects=name, key=key, failed_on=failed_on):
            return await run()

    def once(
        self,
        *,
        key: Callable[..., str] | None = None,
        verify: Verify | None = None,
        ttl: timedelta | None = None,
        wait: timedelta = timedelta(0),
    ) -> Callable[[Callable[Concatenate[str, _P], Awaitable[object]]], Once[_P]]:
        """Decorate an async function, whose first parameter is the provider's token, as an effect.

            @effects.once(key=lambda order_id, amount: f"charge:{order_id}", verify=find_charge)
            async def charge(provider_token: str, order_id: str, amount: int) -> dict[str, str]: ...

            await charge("o-1", 500)                      the key comes from the arguments
            await charge.run("any key", "o-1", 500)       or from the caller

        Its other arguments are the effect's args: a mapping by name, which `verify` is given.
        """

        if key is not None:
            check_callable(key, "key")
        _check_terms(verify, ttl, wait)

        def decorate(function: Callable[Concatenate[str, _P], Awaitable[object]]) -> Once[_P]:
            return Once(self, function, key=key, verify=verify, ttl=ttl, wait=wait)

        return decorate


def _check_terms(verify: Verify | None, ttl: timedelta | None, wait: timedelta) -> None:
    """Raise TypeError or ValueError unless a run can be made on these."""
    if verify is not None:
        check_callable(verify, "verify")
    if ttl is not None:
        check_duration(ttl, "ttl", longest=LONGEST)
    check_wait(wait, "wait")


def _describer(redact: Callable[[BaseException], str]) -> Callable[[BaseException], str]:
    def describe(error: BaseException) -> str:
        name = type(error).__qualname__
        try:
            message = redact(error)
        except Exception as trouble:  # noqa: BLE001  a message must not decide what becomes of a call
            message = f"(no message: {type(trouble).__qualname__})"
        return f"{name}: {message}" if message else name

    return describe
