"""Charging a card as an effect: the call, and the verifier that asks the provider what became of it."""

from __future__ import annotations

from typing import Any

import httpx

from oncely import NOT_HAPPENED, EffectFailed

__all__ = ["Payments"]


class Payments:
    """The provider, over HTTP. `args` are the effect's: reference and amount."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def charge(self, provider_token: str, args: dict[str, Any]) -> dict[str, Any]:
        """The charge that was made. EffectFailed when the provider says that it made none.

        Every other error says nothing of the kind, not even a connection that was refused: a proxy
        may have sent the request twice. Those leave the outcome unknown, and `verify` finds it out.
        """
        reply = await self._http.post("/charges", json=args, headers={"Idempotency-Key": provider_token})
        if reply.status_code == httpx.codes.PAYMENT_REQUIRED:
            raise EffectFailed(reply.json()["detail"])
        reply.raise_for_status()
        charge: dict[str, Any] = reply.json()
        return charge

    async def verify(self, key: str, args: Any, *, provider_token: str) -> Any:
        """The charge that was made with this token, or NOT_HAPPENED; raises when the provider is away.

        It asks by the token, not by the reference: after the record's ttl the same reference may be
        charged again, and then an older charge is not this one.
        """
        reply = await self._http.get("/charges", params={"idempotency_key": provider_token})
        reply.raise_for_status()
        charges = reply.json()
        return charges[0] if charges else NOT_HAPPENED
