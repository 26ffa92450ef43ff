"""Looks into the shop's database and stream while the others work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from redis.asyncio import Redis
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from examples.shop.models import inbox, outbox
from examples.shop.places import stream_name

__all__ = ["Inspector"]


@dataclass(frozen=True)
class Inspector:
    """Asks, and changes nothing."""

    sessions: async_sessionmaker[AsyncSession]
    redis: Redis

    async def progress(self) -> tuple[int, int, int]:
        """How many events there are, how many of them were published, and how many were handled."""
        handled = select(func.count()).select_from(inbox.table).scalar_subquery()
        published = func.count(outbox.table.c.published_at)
        async with self.sessions() as session:
            found = await session.execute(select(func.count(outbox.table.c.id), published, handled))
            return found.tuples().one()

    async def is_all_done(self) -> bool:
        """Whether every event was published and handled, and every copy in the stream acknowledged."""
        events, published, handled = await self.progress()
        if not events == published == handled:
            return False
        groups = await self.redis.xinfo_groups(stream_name())
        return not any(group["pending"] or group.get("lag") for group in groups)  # no lag before Redis 7

    async def is_relay_in_the_middle(self) -> bool:
        """Whether a relay has sent events that it has not marked as published."""
        async with self.sessions() as session:
            claims = (await session.scalars(select(outbox.claims.c.event_ids))).all()
        if not claims:
            return False
        entries: Any = await self.redis.xrevrange(stream_name(), count=50)
        sent = {UUID(fields[b"id"].decode()) for _, fields in entries}
        return any(not sent.isdisjoint(event_ids) for event_ids in claims)
