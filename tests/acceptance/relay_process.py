"""A relay in a process of its own, there to be killed: `main` is run by `tests.forks`.

It appends a line `key payload` to the file for every event.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from oncely import Event, Outbox, Relay
from oncely.backoff import Backoff

LEASE = timedelta(milliseconds=400)


async def main(url: str, path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND)

    async def publish(events: Sequence[Event]) -> None:
        for event in events:
            os.write(file, f"{event.key} {event.payload}\n".encode())
            await asyncio.sleep(0.0005)

    await Relay(
        Outbox(MetaData()),
        async_sessionmaker(create_async_engine(url)),
        publish,
        batch=20,
        lease=LEASE,
        poll_interval=timedelta(milliseconds=20),
        retry=Backoff(first=timedelta(milliseconds=10)),
        max_attempts=1_000,
    ).run()
