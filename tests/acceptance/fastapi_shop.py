"""A shop for uvicorn, in a process of its own: `uvicorn --factory tests.acceptance.fastapi_shop:create_app`.

DATABASE_URL, and DATABASE_SCHEMA if there is one, say where its tables are. An order that names a file
waits until that file is there.
"""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import BackgroundTasks, FastAPI
from pydantic import BaseModel

from oncely.fastapi import IdempotentSession
from tests.database import Database
from tests.waiting import until
from tests.web import Order, Web

__all__ = ["NewOrder", "create_app"]


class NewOrder(BaseModel):
    item: str
    begun: str | None = None
    go: str | None = None


def create_app() -> FastAPI:
    database = Database(os.environ["DATABASE_URL"], os.environ.get("DATABASE_SCHEMA"))
    web = Web(database.engine(pool_size=10))
    router = web.router()

    @router.post("/orders", status_code=201)
    async def create_order(
        order: NewOrder, session: IdempotentSession, tasks: BackgroundTasks
    ) -> dict[str, int]:
        placed = Order(item=order.item)
        session.add(placed)
        await session.flush()
        if order.begun is not None and order.go is not None:
            await meet(Path(order.begun), Path(order.go))
        tasks.add_task(note, web)
        return {"order": placed.id}

    app = FastAPI()
    app.include_router(router)
    return app


async def meet(begun: Path, go: Path) -> None:
    """Tell the test, in another process, that the work has begun, and wait for its word."""
    begun.touch()  # noqa: ASYNC240  a file that is empty

    async def told() -> bool:
        return go.exists()  # noqa: ASYNC240

    await until(told)


async def note(web: Web) -> None:
    """What runs after the answer: in a transaction of its own."""
    async with web.sessions.begin() as session:
        session.add(Order(item="a background task"))
