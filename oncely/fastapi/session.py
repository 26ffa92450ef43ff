"""IdempotentSession: the session whose transaction the route commits."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from sqlalchemy.ext.asyncio import AsyncSession

from oncely.fastapi.exchange import Exchange, exchange_of

__all__ = ["IdempotentSession", "open_session"]


async def open_session(exchange: Annotated[Exchange, Depends(exchange_of)]) -> AsyncSession:
    return await exchange.open()


IdempotentSession = Annotated[AsyncSession, Depends(open_session)]
"""The session in which the key, the work and the answer commit, before the first byte is sent.

For endpoints and dependencies on a route of `idempotent_route`. Do not commit it: the route does.
"""
