"""A card is charged, the reply is lost, and nobody pays twice: `python -m examples.payments`.

Needs no service: the records are in a SQLite file, and the provider runs in this process.
"""

from __future__ import annotations

import asyncio
import tempfile
from datetime import timedelta
from pathlib import Path

import httpx
import uvicorn
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import create_async_engine

from examples.payments.client import Payments
from examples.payments.server import Ledger, make_app
from oncely import Effects, EffectUnknown


async def main(folder: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{folder / 'effects.db'}")
    metadata = MetaData()
    effects = Effects(metadata, stale_after=timedelta(seconds=30), sessionmaker=engine)
    async with engine.begin() as connection:
        await connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        await connection.run_sync(metadata.create_all)

    ledger, socket = Ledger(folder / "ledger.db"), str(folder / "payments.sock")
    server = uvicorn.Server(uvicorn.Config(make_app(ledger), uds=socket, log_level="critical"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
        await asyncio.sleep(0.01)

    transport = httpx.AsyncHTTPTransport(uds=socket)
    async with httpx.AsyncClient(transport=transport, base_url="http://payments") as http:
        payments = Payments(http)
        args = {"reference": "order-1", "amount": 500}

        async def charge(provider_token: str) -> object:
            return await payments.charge(provider_token, args)

        await http.put("/fault", params={"fault": "lose-reply"})
        try:
            await effects.run("charge:order-1", charge, args=args)
        except httpx.HTTPError as error:
            print(f"1. the call broke off:          {type(error).__name__}")
        try:
            await effects.run("charge:order-1", charge, args=args)
        except EffectUnknown as error:
            print(f"2. again, without a verifier:   {error}")
        found = await effects.run("charge:order-1", charge, args=args, verify=payments.verify)
        print(f"3. again, the provider asked:   {found['id']}, {found['amount']} {found['currency']}")
        again = await effects.run("charge:order-1", charge, args=args, verify=payments.verify)
        print(f"4. and again:                   {again['id']}")
    print(f"   charges in the ledger:       {len(ledger.charges())}")

    server.should_exit = True
    await serving
    await engine.dispose()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(main(Path(name)))
