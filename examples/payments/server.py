"""A small payment provider: it charges cards, forgets no charge, and can be told to misbehave.

    python -m examples.payments.server --ledger /tmp/ledger.db --uds /tmp/payments.sock

Charges are rows of a SQLite file, so they survive the server's death. Like real providers it takes
an `Idempotency-Key`, answers a repeated one with the first charge, and can be asked what became of
it. `--forgetful` makes it a provider that ignores the key and charges whenever it is asked to.

`PUT /fault` chooses what goes wrong with the next charge:

    lose-reply    it is charged, and the connection breaks within the reply
    hang          it is charged, and no reply ever comes
    die           it is charged, and the server dies before it replies
    die-before    the server dies before it is charged
    decline       it is not charged: 402
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, Header, HTTPException, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

__all__ = ["Ledger", "NewCharge", "make_app"]

Fault = Literal["lose-reply", "hang", "die", "die-before", "decline"]


class NewCharge(BaseModel):
    """What is asked for; `amount` is in the currency's smallest unit."""

    reference: str
    amount: int
    currency: str = "EUR"


class Ledger:
    """The charges that were made, in the order in which they were."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with closing(sqlite3.connect(path)) as database, database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS charges (id INTEGER PRIMARY KEY, idempotency_key TEXT NOT NULL,"
                " reference TEXT NOT NULL, amount INTEGER NOT NULL, currency TEXT NOT NULL)"
            )

    def add(self, idempotency_key: str, charge: NewCharge) -> dict[str, Any]:
        """Take the money."""
        with closing(sqlite3.connect(self._path)) as database, database:
            database.execute(
                "INSERT INTO charges (idempotency_key, reference, amount, currency) VALUES (?, ?, ?, ?)",
                (idempotency_key, charge.reference, charge.amount, charge.currency),
            )
        return self.charges(idempotency_key)[-1]

    def charges(self, idempotency_key: str | None = None) -> list[dict[str, Any]]:
        """All charges, or those that were asked for with this key."""
        with closing(sqlite3.connect(self._path)) as database:
            database.row_factory = sqlite3.Row
            rows = database.execute(
                "SELECT 'ch_' || id AS id, idempotency_key, reference, amount, currency FROM charges"
                " WHERE :key IS NULL OR idempotency_key = :key ORDER BY charges.id",
                {"key": idempotency_key},
            ).fetchall()
        return [dict(row) for row in rows]


def make_app(ledger: Ledger, *, forgetful: bool = False) -> FastAPI:
    """The provider as an ASGI application."""
    app = FastAPI(title="Payments")
    faults: list[Fault] = []

    @app.post("/charges", status_code=201)
    async def charge(new: NewCharge, idempotency_key: Annotated[str, Header()]) -> Any:
        fault = faults.pop() if faults else None
        if fault == "decline":
            raise HTTPException(402, "card declined")
        if fault == "die-before":
            os._exit(1)
        before = [] if forgetful else ledger.charges(idempotency_key)
        made = before[0] if before else ledger.add(idempotency_key, new)
        if fault == "die":
            os._exit(1)
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "lose-reply":
            return StreamingResponse(iter([b'{"id": "ch_']), 201, {"Content-Length": "100"})
        return made

    @app.get("/charges")
    async def charges(idempotency_key: str | None = None) -> list[dict[str, Any]]:
        return ledger.charges(idempotency_key)

    @app.put("/fault", status_code=204, response_class=Response, response_model=None)
    async def choose_fault(fault: Fault) -> None:
        faults[:] = [fault]

    return app


def main() -> None:
    options = argparse.ArgumentParser(description="A small payment provider")
    options.add_argument("--ledger", type=Path, required=True)
    options.add_argument("--uds", help="a Unix socket to listen on, instead of a port")
    options.add_argument("--port", type=int, default=8900)
    options.add_argument("--forgetful", action="store_true")
    given = options.parse_args()
    app = make_app(Ledger(given.ledger), forgetful=given.forgetful)
    uvicorn.run(app, uds=given.uds, port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
