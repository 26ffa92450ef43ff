"""The shop's tables, and oncely's beside them on the same MetaData: Alembic sees them all."""

from __future__ import annotations

from uuid import UUID, uuid4

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from oncely import IdempotencyKeys, Inbox, Outbox
from oncely.telemetry.logging import LoggingObserver

__all__ = ["Base", "Order", "Seat", "inbox", "keys", "observer", "outbox"]


class Base(DeclarativeBase):
    """What the shop's tables have in common: their MetaData."""


observer = LoggingObserver()
"""Writes what happens to the log; PrometheusObserver and OpenTelemetryObserver would take its place."""

keys = IdempotencyKeys(Base.metadata, observer=observer)
outbox = Outbox(Base.metadata, observer=observer)
inbox = Inbox(Base.metadata, observer=observer)


class Seat(Base):
    """A seat, free or taken by one customer."""

    __tablename__ = "seats"

    name: Mapped[str] = mapped_column(primary_key=True)
    taken_by: Mapped[str | None]


class Order(Base):
    """A seat that was sold. No constraint forbids a second order or ticket: the demo counts them."""

    __tablename__ = "orders"

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    customer: Mapped[str]
    seat: Mapped[str]
    tickets: Mapped[int] = mapped_column(default=0)
    deliveries: Mapped[int] = mapped_column(default=0)
    failures: Mapped[int] = mapped_column(default=0)
