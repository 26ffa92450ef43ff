"""What PostgreSQL ends for the sake of another transaction is a 409, and a retry works."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response
from sqlalchemy import text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import async_sessionmaker

from oncely.fastapi import IdempotentSession, TransactionConflict
from tests.web import Order, Web, client_of

pytestmark = pytest.mark.in_schema


async def test_a_serialization_failure_is_a_409_and_a_retry_works(web: Web, engines: Any) -> None:
    web.sessions = async_sessionmaker(engines(isolation_level="REPEATABLE READ"))
    router, read, go = web.router(), asyncio.Event(), asyncio.Event()
    async with web.sessions.begin() as session:
        session.add(Order(item="stock"))

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> str:
        await session.execute(text("SELECT item FROM orders"))
        read.set()
        await go.wait()
        await session.execute(update(Order).values(item="taken"))
        return "made"

    async with client_of(router) as client, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.post("/orders"))
        await read.wait()
        async with web.sessions.begin() as session:
            await session.execute(update(Order).values(item="changed"))
        go.set()
        conflict = await first
        stored = await web.stored()
        retry = await client.post("/orders")
    assert (conflict.status_code, conflict.headers["retry-after"]) == (409, "1")
    assert conflict.headers["content-type"] == "application/problem+json"
    assert conflict.json()["type"] == "urn:oncely:idempotency:conflict"
    assert stored == []
    assert (retry.status_code, await web.items()) == (200, ["taken"])


async def test_a_commit_that_cannot_be_serialized_is_a_409(web: Web, engines: Any) -> None:
    web.sessions = async_sessionmaker(engines(isolation_level="SERIALIZABLE"))
    router, both = web.router(), asyncio.Barrier(2)

    @router.post("/orders/{mine}/{other}")
    async def swap(mine: str, other: str, session: IdempotentSession) -> None:
        await session.execute(text("SELECT count(*) FROM orders WHERE item = :other"), {"other": other})
        await both.wait()
        session.add(Order(item=mine))

    async with client_of(router) as client:
        one, other = await asyncio.gather(
            client.post("/orders/a/b", headers={"Idempotency-Key": "key-of-a"}),
            client.post("/orders/b/a", headers={"Idempotency-Key": "key-of-b"}),
        )
    assert sorted([one.status_code, other.status_code]) == [200, 409]
    assert len(await web.items()) == len(await web.stored()) == 1


async def test_a_deadlock_is_a_409_and_a_retry_works(web: Web) -> None:
    router, calls, both = web.router(), [], asyncio.Barrier(2)
    async with web.sessions.begin() as session:
        session.add_all([Order(item="one"), Order(item="two")])

    @router.post("/orders/{first}/{second}")
    async def take(first: int, second: int, session: IdempotentSession) -> None:
        calls.append(first)
        await session.execute(update(Order).where(Order.id == first).values(name=None))
        if len(calls) <= 2:
            await both.wait()
        await session.execute(update(Order).where(Order.id == second).values(name=None))

    async with client_of(router) as client:

        async def take_both(first: int, second: int) -> Any:
            key = f"key-of-{first}-and-{second}"
            return await client.post(f"/orders/{first}/{second}", headers={"Idempotency-Key": key})

        one, other = await asyncio.gather(take_both(1, 2), take_both(2, 1))
        retries = await take_both(1, 2), await take_both(2, 1)
    lost = one if one.status_code == 409 else other
    assert sorted([one.status_code, other.status_code]) == [200, 409]
    assert lost.json()["type"] == "urn:oncely:idempotency:conflict"
    assert [retry.status_code for retry in retries] == [200, 200]
    assert (len(calls), len(await web.stored())) == (3, 2)


async def test_what_postgresql_ended_is_a_409_also_when_the_endpoint_made_something_of_it(web: Web) -> None:
    router = web.router(refusals=[409, 422])

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        try:
            await session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'so' USING ERRCODE = '40001'; END $$"))
        except DBAPIError as error:
            raise HTTPException(422, "could not be done") from error

    async with client_of(router) as client:
        response = await client.post("/orders")
    assert (response.status_code, response.json()["type"]) == (409, "urn:oncely:idempotency:conflict")
    assert await web.stored() == []


async def test_an_application_may_answer_a_conflict_itself(web: Web) -> None:
    router = web.router()

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        await session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'so' USING ERRCODE = '40P01'; END $$"))

    app = FastAPI()
    app.include_router(router)

    @app.exception_handler(TransactionConflict)
    async def own(request: Request, error: Exception) -> Response:
        return Response(str(error), 503, {"Retry-After": "2"})

    async with client_of(app) as client:
        response = await client.post("/orders")
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert response.text == (
        "the request's transaction was ended for the sake of another one; nothing was done, try again"
    )
