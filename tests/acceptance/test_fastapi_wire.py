"""Wires that are cut at the worst moment: between the commit and its confirmation, and before the answer."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request, Response
from sqlalchemy import event
from starlette.middleware.base import BaseHTTPMiddleware

from oncely.fastapi import IdempotentSession
from tests.database import Database
from tests.waiting import until
from tests.web import KEY, Order, Web, client_of
from tests.wire import Wire


async def test_a_commit_whose_confirmation_is_lost_is_a_500_and_a_retry_gets_its_answer(
    web: Web, wire: Wire, database: Database
) -> None:
    engine = Database(wire.url, database.schema).engine()
    behind_the_wire = Web(engine)
    router, calls = behind_the_wire.router(), []

    @router.post("/orders", status_code=201)
    async def create_order(session: IdempotentSession) -> str:
        calls.append(1)
        session.add(Order(item="tea"))
        return "made"

    @event.listens_for(engine.sync_engine, "commit", once=True)
    def cut(connection: object) -> None:
        wire.lose_next_reply()

    async with client_of(router) as client:
        first = await client.post("/orders")

        async def committed() -> bool:
            return await web.stored() == [(KEY, 201)]

        await until(committed)
        retry = await client.post("/orders")
    await engine.dispose()
    assert first.status_code == 500
    assert (retry.status_code, retry.json(), retry.headers["idempotency-replayed"]) == (201, "made", "true")
    assert (len(calls), await web.items()) == (1, ["tea"])


async def test_a_client_that_leaves_behind_a_middleware_finds_the_work_done_once(web: Web) -> None:
    router, working, go = web.router(), asyncio.Event(), asyncio.Event()

    @router.post("/orders", status_code=201)
    async def create_order(session: IdempotentSession) -> str:
        session.add(Order(item="tea"))
        await session.flush()
        working.set()
        await go.wait()
        return "made"

    async def passing(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        return response

    app = FastAPI()
    app.include_router(router)
    app.add_middleware(BaseHTTPMiddleware, dispatch=passing)
    left = asyncio.Event()

    async def leaving(scope: Any, receive: Any, send: Any) -> None:
        sent = False

        async def receive_and_leave() -> Any:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send_to_nobody(message: Any) -> None:
            if left.is_set():
                raise OSError("the client has closed the connection")
            await send(message)

        await app(scope, receive_and_leave, send_to_nobody)

    async with client_of(leaving) as client:
        request = asyncio.create_task(client.post("/orders"))
        await working.wait()
        left.set()
        go.set()
        await asyncio.gather(request, return_exceptions=True)
    async with client_of(app) as client:
        retry = await client.post("/orders")
        again = await client.post("/orders")
    assert (retry.status_code, retry.json(), again.json()) == (201, "made", "made")
    assert again.headers["idempotency-replayed"] == "true"
    assert await web.items() == ["tea"]
    assert retry.headers.get("idempotency-replayed") == "true"
