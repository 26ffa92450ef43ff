"""The tables of the soak: what its emitters meant to commit, and what its consumers have done."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import BigInteger, Column, DateTime, Identity, MetaData, Table, Text, func

from oncely import Inbox, Outbox

__all__ = ["Tables"]


@dataclass(frozen=True)
class Tables:
    """`orders` is written in emit's transactions, `handled` in the inbox's, `pruned` in those of prune."""

    metadata: MetaData
    outbox: Outbox
    inbox: Inbox
    counters: Table
    orders: Table
    handled: Table
    pruned: Table

    @classmethod
    def make(cls) -> Tables:
        metadata = MetaData()
        return cls(
            metadata,
            Outbox(metadata),
            Inbox(metadata),
            Table(
                "counters",
                metadata,
                Column("key", Text, primary_key=True),
                Column("number", BigInteger, nullable=False),
            ),
            Table(
                "orders",
                metadata,
                Column("key", Text, primary_key=True),
                Column("number", BigInteger, primary_key=True),
                Column("refused_by", Text),
            ),
            Table(
                "handled",
                metadata,
                Column("place", BigInteger, Identity(), primary_key=True),
                Column("key", Text),
                Column("number", BigInteger),
                Column("at", DateTime(timezone=True), server_default=func.clock_timestamp()),
            ),
            Table("pruned", metadata, Column("events", BigInteger)),
        )
