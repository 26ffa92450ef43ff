"""One run of one effect, from the first look at its record to the end of the call.

Who is authoritative: the record. A call is made by whoever holds its token, and the end of a call
counts only if the record takes it. What is not known to have failed may have happened: only
EffectFailed and the types that the user named mean failed, everything else leaves the record
unknown. No transaction is open while the call or the verifier runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeAlias, cast

from oncely.effects.heartbeat import Claim, Heartbeat, now
from oncely.effects.record import NOT_HAPPENED, EffectRecord, Status
from oncely.effects.store import Store, new_token
from oncely.errors import EffectFailed, EffectLost, EffectPending, EffectUnknown, KeyReused
from oncely.loop import complete, within
from oncely.storable import decode_json, encode_json

__all__ = ["Call", "Policy", "Run", "TokenVerify", "Verify"]

PATIENCE = timedelta(seconds=5)
"""How long a run that was cancelled, or whose call broke, goes on trying to write that down."""

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.5
"""Seconds between two looks at a record that somebody else holds: doubled from the first to this."""

Call: TypeAlias = Callable[[str], Awaitable[object]]
"""Makes the call. It is given the provider's token and returns what encode_json takes."""


class TokenVerify(Protocol):
    """A verifier that asks the provider by its own token: it has a parameter of that name."""

    def __call__(self, key: str, args: Any, /, *, provider_token: str) -> Awaitable[object]: ...


Verify: TypeAlias = Callable[[str, Any], Awaitable[object]] | TokenVerify
"""Finds out what became of an unknown call: returns its result or NOT_HAPPENED, or raises."""


Stage: TypeAlias = Literal["looking", "asking", "calling"]


@dataclass(frozen=True, slots=True)
class Policy:
    """What is the same for all runs of one Effects. `describe` makes the text that is stored of an error."""

    stale_after: timedelta
    failed_on: tuple[type[Exception], ...]
    describe: Callable[[BaseException], str]


class Run:
    """`await Run(…)()` is `Effects.run`: see there for what it returns and raises."""

    def __init__(
        self,
        store: Store,
        policy: Policy,
        *,
        key: str,
        args: object,
        call: Call,
        verify: Verify | None,
        ttl: timedelta | None,
        wait: timedelta,
    ) -> None:
        self._store = store
        self._policy = policy
        self._key = key
        self._args = args
        self._args_hash = _hash(args)
        self._call = call
        self._verify = verify
        self._ttl = ttl
        self._wait = wait
        self.stage: Stage = "looking"
        """What it does, or did last: looking at the record, asking the verifier, calling."""
        self.found = False
        """Whether the result is what the verifier found out."""

    async def __call__(self) -> Any:
        deadline = now() + self._wait.total_seconds()
        pause = FIRST_PAUSE
        asked_about: EffectRecord | None = None
        while True:
            record = await self._store.get(self._key)
            claim = None
            if record is None or (record.status.is_finished and record.expired):
                claim = await self._open(record)
            elif record.args_hash != self._args_hash:
                raise KeyReused("", self._key)
            elif record.status is Status.DONE:
                return record.result
            elif record.status is Status.FAILED:
                raise _failure(record)
            elif record.status is Status.PENDING:
                left = deadline - now()
                if left <= 0:
                    raise EffectPending(self._key, record.expires_at)
                await asyncio.sleep(min(pause, left))
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                if record == asked_about:  # nobody was faster, and yet it could not be taken
                    raise EffectUnknown(self._key, record)
                asked_about = record
                self.stage = "asking"
                answer = await self._ask(record)
                self.stage = "looking"
                if answer is NOT_HAPPENED:
                    claim = await self._take(record)
                else:
                    result = _as_stored(answer, "the verifier's result")
                    if await self._store.take(record, Status.DONE, result=result, ttl=self._ttl):
                        self.found = True
                        return result
            if claim is not None:
                return await self._make(claim)
            # Somebody was faster: look again.

    async def _open(self, finished: EffectRecord | None) -> Claim | None:
        """Claim the key, or renew its finished record: a new effect, with a new token for the provider."""
        token = new_token()
        if finished is None:
            asking = self._store.claim(self._key, self._args_hash, provider_token=token)
        else:
            asking = self._store.renew(finished, self._args_hash, provider_token=token)

        async def give_back(claim_token: str) -> None:
            await self._store.delete(self._key, token=claim_token)

        return await self._hold(asking, token, give_back)

    async def _take(self, record: EffectRecord) -> Claim | None:
        """Become the owner of a call that has not happened, to make it: the provider's token stays."""

        async def give_back(claim_token: str) -> None:
            await self._store.finish(self._key, claim_token, Status.UNKNOWN)

        return await self._hold(self._store.take(record, Status.PENDING), record.provider_token, give_back)

    async def _hold(
        self,
        asking: Coroutine[Any, Any, str | None],
        provider_token: str,
        give_back: Callable[[str], Awaitable[None]],
    ) -> Claim | None:
        until = now() + self._policy.stale_after.total_seconds()

        async def undo(token: str | None) -> None:
            if token is not None:
                await give_back(token)

        token = await complete(asking, patience=PATIENCE, undo=undo)
        if token is None:
            return None
        if now() >= until:
            await give_back(token)
            raise EffectLost(self._key)
        return Claim(self._key, token, provider_token, until)

    async def _make(self, claim: Claim) -> Any:
        """Make the call and return its result, once the record has it."""
        self.stage = "calling"
        heartbeat = Heartbeat(self._store, claim, self._policy.stale_after)
        try:
            answer = await heartbeat.within(self._call)
        except EffectLost as error:
            record = await self._leave_unknown(claim, error)
            if error.key == self._key:  # ours, not one of an effect inside the call
                error.record = record
            raise
        except self._policy.failed_on as error:
            await self._finish(claim, Status.FAILED, error=self._policy.describe(error))
            raise
        except (Exception, asyncio.CancelledError) as error:
            await self._leave_unknown(claim, error)
            raise
        else:
            return await self._finish_done(claim, answer)
        finally:
            await heartbeat.ended()

    async def _finish_done(self, claim: Claim, answer: object) -> Any:
        try:
            result = _as_stored(answer, "result")
        except Exception as error:
            record = await self._leave_unknown(claim, error)
            raise EffectUnknown(self._key, record) from error
        await self._finish(claim, Status.DONE, result=result)
        return result

    async def _finish(
        self, claim: Claim, status: Status, *, result: object = None, error: str | None = None
    ) -> None:
        async def record_end() -> None:
            if await self._store.finish(
                self._key, claim.token, status, result=result, error=error, ttl=self._ttl
            ):
                return
            record = await self._store.get(self._key)
            if record is None or (record.token, record.status) != (claim.token, status):
                raise EffectLost(self._key, record, result)
            # It was recorded, and only the reply to that was lost.

        try:
            await complete(record_end(), patience=PATIENCE)
        except EffectLost:
            raise
        except Exception as trouble:
            raise EffectUnknown(self._key) from trouble

    async def _leave_unknown(self, claim: Claim, error: BaseException) -> EffectRecord | None:
        """Say so in the record, so that nobody has to wait for the claim to end; and read it."""

        async def say_so() -> EffectRecord | None:
            await self._store.finish(
                self._key, claim.token, Status.UNKNOWN, error=self._policy.describe(error)
            )
            return await self._store.get(self._key)

        try:
            return await complete(within(say_so(), PATIENCE), patience=PATIENCE)
        except Exception as trouble:  # noqa: BLE001  what it is about is the error that goes on
            error.add_note(f"The effect's record could not say so ({trouble!r}); its time will run out.")
            return None

    async def _ask(self, record: EffectRecord) -> object:
        """What the verifier says of an unknown call."""
        verify = self._verify
        if verify is None:
            raise EffectUnknown(self._key, record)
        if _asks_by_token(verify):
            by_token = cast("TokenVerify", verify)
            return await by_token(self._key, self._args, provider_token=record.provider_token)
        by_key = cast("Callable[[str, Any], Awaitable[object]]", verify)
        return await by_key(self._key, self._args)


def _hash(args: object) -> bytes:
    """SHA-256 of the arguments as JSON, whatever the order of their keys."""
    values = decode_json(encode_json(args, what="args"))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


def _as_stored(value: object, what: str) -> Any:
    """The value as every later run will get it."""
    return decode_json(encode_json(value, what=what))


def _failure(record: EffectRecord) -> EffectFailed:
    """The stored failure, with the message alone where the class is EffectFailed anyway."""
    error = record.error or ""
    name, _, message = error.partition(": ")
    text = message if name == EffectFailed.__qualname__ else error
    return EffectFailed(*filter(None, [text]), record=record)


def _asks_by_token(verify: Verify) -> bool:
    try:
        return "provider_token" in inspect.signature(verify).parameters
    except ValueError:  # a callable without a signature
        return False
