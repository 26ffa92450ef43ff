"""A process that makes a call as an effect, and may die in it: see test_effects_killed.py.

    python -m tests.acceptance.effects_owner DATABASE_URL SCHEMA PROVIDER_SOCKET KEY DEATH

DEATH is `none`, `before` the request, or `after` the provider's answer and before it is recorded;
`stop` stands still (SIGSTOP) before the request. It prints `calling` before that, and at the end the
charge's id, or `lost`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from datetime import timedelta

import httpx
from sqlalchemy import MetaData

from examples.payments.client import Payments
from oncely import EffectLost, Effects
from tests.database import Database

STALE_AFTER = timedelta(seconds=1)
ARGS = {"reference": "order-1", "amount": 500}


async def main(url: str, schema: str, socket: str, key: str, death: str) -> None:
    engine = Database(url, schema or None).engine()
    effects = Effects(MetaData(), stale_after=STALE_AFTER, sessionmaker=engine)
    transport = httpx.AsyncHTTPTransport(uds=socket)
    async with httpx.AsyncClient(transport=transport, base_url="http://payments", timeout=60) as http:
        payments = Payments(http)

        async def charge(provider_token: str) -> object:
            print("calling", flush=True)
            if death == "before":
                os._exit(1)
            if death == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            made = await payments.charge(provider_token, ARGS)
            if death == "after":
                os._exit(1)
            return made

        try:
            made = await effects.run(
                key, charge, args=ARGS, verify=payments.verify, wait=timedelta(seconds=30)
            )
        except EffectLost:
            print("lost", flush=True)
        else:
            print(made["id"], flush=True)
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
