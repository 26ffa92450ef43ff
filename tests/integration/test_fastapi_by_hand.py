"""A route that uses IdempotencyKeyHeader and keys.run in a transaction of its own."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel

from oncely import Refused
from oncely.fastapi import (
    IdempotencyKeyHeader,
    add_problem_handlers,
    outcome_response,
    request_fingerprint,
)
from tests.web import KEY, KEYS, Order, Web, client_of, message

pytestmark = pytest.mark.in_schema

PROBLEM = "application/problem+json"


class NewOrder(BaseModel):
    item: str


def shop(web: Web, working: asyncio.Event | None = None, go: asyncio.Event | None = None) -> APIRouter:
    router = APIRouter()

    @router.post("/orders")
    async def create_order(order: NewOrder, key: IdempotencyKeyHeader, request: Request) -> Response:
        async with web.sessions.begin() as session:

            async def work() -> tuple[int, str]:
                session.add(Order(item=order.item))
                if order.item == "nothing":
                    raise Refused(422, '{"detail": "order something"}', {"Link": "</menu>"})
                if working is not None and go is not None:
                    working.set()
                    await go.wait()
                return 201, order.model_dump_json()

            outcome = await KEYS.run(
                session,
                scope="Ada",
                key=key,
                fingerprint=await request_fingerprint(request),
                work=work,
                wait=timedelta(0),
            )
        return outcome_response(outcome)

    return router


async def test_a_request_that_arrives_twice_does_its_work_once(web: Web) -> None:
    async with client_of(shop(web)) as client:
        first = await client.post("/orders", json={"item": "tea"})
        again = await client.post("/orders", json={"item": "tea"})
    assert (first.status_code, first.json()) == (201, {"item": "tea"})
    assert first.headers["content-type"] == "application/json"
    assert "idempotency-replayed" not in first.headers
    assert (message(again), again.headers["idempotency-replayed"]) == (message(first), "true")
    assert await web.items() == ["tea"]


async def test_a_refusal_comes_back_with_its_headers(web: Web) -> None:
    async with client_of(shop(web)) as client:
        first, again = [await client.post("/orders", json={"item": "nothing"}) for _ in range(2)]
    assert (first.status_code, first.json(), first.headers["link"]) == (
        422,
        {"detail": "order something"},
        "</menu>",
    )
    assert message(again) == message(first)
    assert (await web.items(), await web.stored()) == ([], [(KEY, 422)])


@pytest.mark.parametrize("key", [None, "short", '"not-closed'])
async def test_a_bad_header_is_a_400_by_fastapis_own_handler(web: Web, key: str | None) -> None:
    async with client_of(shop(web), key=key) as client:
        response = await client.post("/orders", json={"item": "tea"})
    assert (response.status_code, response.headers["content-type"]) == (400, "application/json")
    assert "8 to 255 printable ASCII characters" in response.json()["detail"]


async def test_with_its_handlers_an_application_answers_with_problems(web: Web) -> None:
    app, working, go = FastAPI(), asyncio.Event(), asyncio.Event()
    app.include_router(shop(web, working, go))
    add_problem_handlers(app)
    async with client_of(app) as client, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.post("/orders", json={"item": "tea"}))
        await working.wait()
        in_flight = await client.post("/orders", json={"item": "tea"})
        go.set()
        assert (await first).status_code == 201
        reused = await client.post("/orders", json={"item": "coffee"})
        missing = await client.post("/orders", json={"item": "tea"}, headers={"Idempotency-Key": ""})
    assert [r.status_code for r in (in_flight, reused, missing)] == [409, 422, 400]
    assert {r.headers["content-type"] for r in (in_flight, reused, missing)} == {PROBLEM}
    assert in_flight.headers["retry-after"] == "1"
    assert await web.items() == ["tea"]
