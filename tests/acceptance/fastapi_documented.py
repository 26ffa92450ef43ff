"""Guarded routes of every kind, to be asked whatever their document allows, and what it does not.

DATABASE_URL, and DATABASE_SCHEMA if there is one, say where the tables are.
"""

from __future__ import annotations

import os
from typing import Annotated

from fastapi import FastAPI, Form, HTTPException
from pydantic import BaseModel

from oncely import Refused
from oncely.fastapi import IdempotencyKeyHeader, IdempotentSession
from tests.database import Database
from tests.web import Order, Web

__all__ = ["create_app"]


class NewOrder(BaseModel):
    item: str
    amount: float = 1


def create_app() -> FastAPI:
    database = Database(os.environ["DATABASE_URL"], os.environ.get("DATABASE_SCHEMA"))
    web = Web(database.engine(pool_size=10))
    router, optional = web.router(refusals=[409]), web.router(required=False)

    @router.post("/orders/{number}", status_code=201)
    async def create_order(
        number: int, order: NewOrder, session: IdempotentSession, dry: bool = False
    ) -> int:
        session.add(Order(item="dry" if dry else "tea"))
        if number % 7 == 3:
            raise HTTPException(409, "sold out")
        if number % 7 == 4:
            raise Refused(402, "{}")
        return number

    @router.patch("/orders/{number}")
    async def change_order(
        number: int, order: NewOrder, session: IdempotentSession, key: IdempotencyKeyHeader
    ) -> str:
        return key

    @optional.post("/forms")
    async def fill_in(item: Annotated[str, Form()], session: IdempotentSession) -> str:
        session.add(Order(item="a form"))
        return item

    @optional.get("/orders")
    async def orders(session: IdempotentSession) -> list[int]:
        return []

    app = FastAPI()
    app.include_router(router)
    app.include_router(optional, prefix="/optional")
    return app
