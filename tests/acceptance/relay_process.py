"""Relays as processes of their own, there to be killed.

`python -m tests.acceptance.relay_process DATABASE_URL FILE` starts one for every line that it reads, and
answers with its process id; at the end of its input it kills those that are left. A relay appends a line
`key payload` to the file for every event. They are forked, since starting Python takes too long.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from oncely import Event, Outbox, Relay
from oncely.backoff import Backoff

LEASE = timedelta(milliseconds=400)


async def relay(url: str, path: str) -> None:
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


def main(url: str, path: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    started = []
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(relay(url, path))
            finally:
                os._exit(1)
        started.append(child)
        print(child, flush=True)
    for child in started:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
