"""A request with a key does its work once: what the client is told, in each situation, by both drivers."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Form, HTTPException, Request
from fastapi.responses import PlainTextResponse
from httpx import Response
from pydantic import BaseModel
from sqlalchemy import select

from oncely import KeyInFlight, KeyReused
from oncely.fastapi import IdempotencyKeyHeader, IdempotentSession, InvalidKeyHeader
from tests.database import both_drivers
from tests.waiting import until
from tests.web import KEY, KEYS, Order, Web, client_of, customer, message

pytestmark = [pytest.mark.in_schema, both_drivers]

PROBLEM = "application/problem+json"


class NewOrder(BaseModel):
    item: str
    amount: float = 1


class Placed(BaseModel):
    id: int
    item: str


async def size_of_stream(request: Request) -> int:
    return sum([len(chunk) async for chunk in request.stream()])


def shop(web: Web, **options: Any) -> APIRouter:
    """POST and PATCH /orders."""
    router = web.router(**options)

    @router.post("/orders", status_code=201)
    async def create_order(order: NewOrder, session: IdempotentSession) -> Placed:
        placed = Order(item=order.item)
        session.add(placed)
        await session.flush()
        return Placed(id=placed.id, item=placed.item)

    @router.post("/orders/{number}")
    @router.patch("/orders/{number}")
    async def change_order(number: int, order: NewOrder, session: IdempotentSession) -> int:
        session.add(Order(item=f"{order.item} instead of {number}"))
        return number

    return router


async def test_a_request_that_arrives_twice_does_its_work_once(web: Web) -> None:
    async with client_of(shop(web)) as client:
        first = await client.post("/orders", json={"item": "tea"})
        again = await client.post("/orders", json={"item": "tea"})
    assert (first.status_code, first.json()) == (201, {"id": 1, "item": "tea"})
    assert message(again) == message(first)
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert (await web.items(), await web.stored()) == (["tea"], [(KEY, 201)])


async def test_other_keys_do_other_work(web: Web) -> None:
    async with client_of(shop(web)) as client:
        for key in ("key-0001", "key-0002", "key-0003"):
            response = await client.post("/orders", json={"item": key}, headers={"Idempotency-Key": key})
            assert response.json()["item"] == key
    assert await web.items() == ["key-0001", "key-0002", "key-0003"]


async def test_a_quoted_key_is_the_bare_one(web: Web) -> None:
    async with client_of(shop(web)) as client:
        await client.post("/orders", json={"item": "tea"})
        again = await client.post("/orders", json={"item": "tea"}, headers={"Idempotency-Key": f'"{KEY}"'})
    assert again.headers["idempotency-replayed"] == "true"
    assert await web.items() == ["tea"]


async def test_a_key_belongs_to_its_scope(web: Web) -> None:
    async with client_of(shop(web)) as client:
        for name in ("Ada", "Grace", "Ada"):
            await client.post("/orders", json={"item": "tea"}, headers={"X-Customer": name})
    assert await web.items() == ["tea", "tea"]


async def test_a_scope_may_be_asked_for_asynchronously(web: Web) -> None:
    async def asked(request: Request) -> str:
        await asyncio.sleep(0)
        return customer(request)

    async with client_of(shop(web, scope=asked)) as client:
        await client.post("/orders", json={"item": "tea"})
        again = await client.post("/orders", json={"item": "tea"})
    assert again.headers["idempotency-replayed"] == "true"


async def test_a_scope_that_is_no_text_is_an_error_and_nothing_is_done(web: Web) -> None:
    async with client_of(shop(web, scope=lambda request: None)) as client:
        assert (await client.post("/orders", json={"item": "tea"})).status_code == 500
    assert (await web.items(), await web.stored()) == ([], [])


@pytest.mark.parametrize(
    "headers",
    [
        [("Idempotency-Key", "")],
        [("Idempotency-Key", "short")],
        [("Idempotency-Key", "with spaces")],
        [("Idempotency-Key", "schlüssel-1".encode().decode("latin-1"))],
        [("Idempotency-Key", "k" * 256)],
        [("Idempotency-Key", '"not-closed')],
        [("Idempotency-Key", KEY), ("Idempotency-Key", KEY)],
        [("Idempotency-Key", KEY), ("idempotency-key", "key-0002")],
    ],
)
async def test_a_malformed_key_is_refused(web: Web, headers: list[tuple[str, str]]) -> None:
    async with client_of(shop(web), key=None) as client:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        response = await client.post("/orders", json={"item": "tea"}, headers=raw)
    problem = response.json()
    assert (response.status_code, response.headers["content-type"]) == (400, PROBLEM)
    assert (problem["type"], problem["status"]) == ("urn:oncely:idempotency:key-malformed", 400)
    assert problem["title"] == "Idempotency-Key is malformed"
    assert "8 to 255 printable ASCII characters" in problem["detail"] or "Send it once" in problem["detail"]
    assert (await web.items(), await web.stored()) == ([], [])


async def test_a_missing_key_is_refused_where_it_is_required(web: Web) -> None:
    async with client_of(shop(web), key=None) as client:
        response = await client.post("/orders", json={"item": "tea"})
    assert (response.status_code, response.headers["content-type"]) == (400, PROBLEM)
    assert response.json()["type"] == "urn:oncely:idempotency:key-missing"
    assert response.json()["title"] == "Idempotency-Key is missing"
    assert await web.items() == []


async def test_without_a_key_a_route_that_requires_none_runs_as_usual(web: Web) -> None:
    async with client_of(shop(web, required=False), key=None) as client:
        for _ in range(2):
            response = await client.post("/orders", json={"item": "tea"})
            assert response.status_code == 201
            assert "idempotency-replayed" not in response.headers
    assert (await web.items(), await web.stored()) == (["tea", "tea"], [])


@pytest.mark.parametrize(
    ("method", "path", "json"),
    [
        ("POST", "/orders", {"item": "coffee"}),
        ("POST", "/orders", {"item": "tea", "amount": 1.0}),
        ("POST", "/orders?dry=1", {"item": "tea"}),
        ("POST", "/orders/1", {"item": "tea"}),
        ("PATCH", "/orders/1", {"item": "tea"}),
    ],
)
async def test_a_key_that_comes_back_with_another_request_is_refused(
    web: Web, method: str, path: str, json: dict[str, object]
) -> None:
    async with client_of(shop(web)) as client:
        await client.post("/orders", json={"item": "tea"})
        response = await client.request(method, path, json=json)
    assert (response.status_code, response.headers["content-type"]) == (422, PROBLEM)
    assert response.json()["type"] == "urn:oncely:idempotency:key-reused"
    assert "Send a new key with a new request" in response.json()["detail"]
    assert await web.items() == ["tea"]


async def test_a_method_and_a_path_are_part_of_the_request(web: Web) -> None:
    async with client_of(shop(web)) as client:
        await client.post("/orders/1", json={"item": "tea"})
        statuses = [
            (await client.request(method, path, json={"item": "tea"})).status_code
            for method, path in [("POST", "/orders/1"), ("PATCH", "/orders/1"), ("POST", "/orders/2")]
        ]
    assert statuses == [200, 422, 422]


async def test_the_same_request_written_otherwise_is_replayed(web: Web) -> None:
    async with client_of(shop(web)) as client:
        kind = {"Content-Type": "application/json"}
        await client.post("/orders?a=1&b=2", content=b'{"item": "tea", "amount": 2}', headers=kind)
        again = await client.post("/orders?b=2&a=1", content=b'{"amount":2,\n"item":"tea"}', headers=kind)
    assert (again.status_code, again.headers["idempotency-replayed"]) == (201, "true")


async def test_a_route_gives_its_own_fingerprint(web: Web) -> None:
    async def by_item(request: Request) -> bytes:
        return str((await request.json())["item"]).encode()

    async with client_of(shop(web, fingerprint=by_item)) as client:
        await client.post("/orders", json={"item": "tea", "amount": 1})
        same = await client.post("/orders?whatever", json={"item": "tea", "amount": 2})
        other_item = await client.post("/orders", json={"item": "coffee", "amount": 1})
        other_path = await client.post("/orders/1", json={"item": "tea", "amount": 1})
    assert (same.status_code, same.headers["idempotency-replayed"]) == (201, "true")
    assert (other_item.status_code, other_path.status_code) == (422, 422)


async def test_a_fingerprint_that_is_no_bytes_is_an_error_and_nothing_is_done(web: Web) -> None:
    async with client_of(shop(web, fingerprint=lambda request: "tea")) as client:
        client._transport.raise_app_exceptions = True  # type: ignore[attr-defined]  # to see the error
        with pytest.raises(TypeError, match=r"^fingerprint must return bytes, not str$"):
            await client.post("/orders", json={"item": "tea"})
    assert (await web.items(), await web.stored()) == ([], [])


async def test_a_form_is_fingerprinted_although_it_was_read_as_one(web: Web) -> None:
    router = web.router()

    @router.post("/orders")
    async def create_order(item: Annotated[str, Form()], session: IdempotentSession) -> str:
        session.add(Order(item=item))
        return item

    async with client_of(router) as client:
        first = await client.post("/orders", data={"item": "tea"})
        again = await client.post("/orders", data={"item": "tea"})
        other = await client.post("/orders", data={"item": "coffee"})
        file = {"item": (None, "tea")}
        multipart = await client.post("/orders", files=file, headers={"Idempotency-Key": "key-0002"})
        encoded_again = await client.post("/orders", files=file, headers={"Idempotency-Key": "key-0002"})
    assert message(again) == message(first)
    assert [other.status_code, multipart.status_code, encoded_again.status_code] == [422, 200, 422]
    assert await web.items() == ["tea", "tea"]


async def test_an_endpoint_that_reads_the_body_by_itself_finds_it(web: Web) -> None:
    router = web.router()

    @router.post("/raw")
    async def raw(request: Request) -> str:
        streamed = b"".join([chunk async for chunk in request.stream()])
        assert streamed == await request.body()
        return streamed.decode()

    async with client_of(router) as client:
        responses = [await client.post("/raw", content=body) for body in (b"one", b"one", b"two")]
    assert [response.status_code for response in responses] == [200, 200, 422]
    assert [response.json() for response in responses[:2]] == ["one", "one"]


async def test_a_dependency_may_read_the_body_as_a_stream(web: Web) -> None:
    router = web.router()

    @router.post("/raw")
    async def raw(size: Annotated[int, Depends(size_of_stream)]) -> int:
        return size

    async with client_of(router) as client:
        responses = [await client.post("/raw", content=body) for body in (b"one", b"one", b"two")]
    assert [response.status_code for response in responses] == [200, 200, 422]
    assert responses[1].json() == 3


async def test_a_second_request_is_told_to_wait_while_the_first_is_working(web: Web) -> None:
    router, working, go = web.router(), asyncio.Event(), asyncio.Event()

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> str:
        session.add(Order(item="tea"))
        working.set()
        await go.wait()
        return "made"

    async with client_of(router) as client, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.post("/orders"))
        await working.wait()
        second = await client.post("/orders")
        go.set()
        await first
        third = await client.post("/orders")
    assert (second.status_code, second.headers["content-type"]) == (409, PROBLEM)
    assert second.json()["type"] == "urn:oncely:idempotency:key-in-flight"
    assert second.headers["retry-after"] == "1"
    assert message(third) == message(first.result())
    assert await web.items() == ["tea"]


async def test_a_second_request_waits_where_the_route_says_so(web: Web) -> None:
    router, working, go = web.router(wait=timedelta(seconds=20)), asyncio.Event(), asyncio.Event()

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> str:
        session.add(Order(item="tea"))
        working.set()
        await go.wait()
        return "made"

    async with client_of(router) as client, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.post("/orders"))
        await working.wait()
        second = tasks.create_task(client.post("/orders"))

        async def waits() -> bool:
            async with web.engine.connect() as connection:
                query = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory'"
                return bool((await connection.exec_driver_sql(query)).scalar())

        await until(waits)
        go.set()
    assert message(second.result()) == message(first.result())
    assert second.result().headers["idempotency-replayed"] == "true"
    assert await web.items() == ["tea"]


async def test_fifty_requests_of_one_key_at_once_do_the_work_once(web: Web) -> None:
    async with client_of(shop(web)) as client:

        async def until_answered() -> Response:
            answers: list[Response] = []

            async def answered() -> bool:
                answers.append(await client.post("/orders", json={"item": "tea"}))
                return answers[-1].status_code != 409

            await until(answered)
            return answers[-1]

        responses = await asyncio.gather(*(until_answered() for _ in range(50)))
    assert {response.content for response in responses} == {b'{"id":1,"item":"tea"}'}
    assert {response.status_code for response in responses} == {201}
    assert sum("idempotency-replayed" in response.headers for response in responses) == 49
    assert await web.items() == ["tea"]


async def test_an_answer_is_kept_for_its_ttl(web: Web) -> None:
    async with client_of(shop(web, ttl=timedelta(hours=3))) as client:
        await client.post("/orders", json={"item": "tea"})
    table = KEYS.table
    async with web.engine.connect() as connection:
        created, expires = (await connection.execute(select(table.c.created_at, table.c.expires_at))).one()
    kept: timedelta = expires - created
    assert timedelta(hours=3) <= kept < timedelta(hours=3, minutes=1)


async def test_a_replay_passes_the_routes_own_authentication(web: Web) -> None:
    tokens = {"secret": "Ada"}

    async def user(request: Request) -> None:
        name = tokens.get(request.headers.get("authorization", ""))
        if name is None:
            raise HTTPException(401, "who are you?")
        request.state.user = name

    router = web.router(scope=lambda request: request.state.user)

    @router.post("/orders", dependencies=[Depends(user)])
    async def create_order(session: IdempotentSession) -> str:
        session.add(Order(item="tea"))
        return "the answer"

    async with client_of(router) as client:
        headers = {"Authorization": "secret"}
        first = await client.post("/orders", headers=headers)
        tokens.clear()
        revoked = await client.post("/orders", headers=headers)
        tokens["secret"] = "Ada"
        again = await client.post("/orders", headers=headers)
        bad_key = await client.post("/orders", headers={"Idempotency-Key": "x", "Authorization": "wrong"})
    assert (revoked.status_code, revoked.json()) == (401, {"detail": "who are you?"})
    assert message(again) == message(first)
    assert bad_key.status_code == 401
    assert await web.items() == ["tea"]


async def test_a_request_that_is_invalid_does_not_touch_its_key(web: Web) -> None:
    async with client_of(shop(web)) as client:
        invalid = await client.post("/orders", json={"amount": "many"})
        valid = await client.post("/orders", json={"item": "tea"})
        invalid_again = await client.post("/orders", json={"amount": "many"})
    assert [invalid.status_code, valid.status_code, invalid_again.status_code] == [422, 201, 422]
    assert invalid.json()["detail"][0]["loc"] == ["body", "item"]
    assert invalid_again.json() == invalid.json()


async def test_other_methods_of_the_router_are_not_guarded(web: Web) -> None:
    router, calls = web.router(), []

    @router.get("/orders")
    @router.put("/orders")
    async def orders(session: IdempotentSession) -> int:
        calls.append(1)
        session.add(Order(item="seen"))
        return len(calls)

    async with client_of(router, key=None) as client:
        got = [(await client.get("/orders")).json(), (await client.put("/orders")).json()]
    async with client_of(router) as client:
        got += [(await client.get("/orders")).json(), (await client.put("/orders")).json()]
    assert got == [1, 2, 3, 4]
    assert (await web.items(), await web.stored()) == (["seen"] * 4, [])


async def test_a_method_is_guarded_when_it_is_named(web: Web) -> None:
    router = web.router(methods=["put"])

    @router.put("/orders")
    async def orders(session: IdempotentSession) -> None:
        session.add(Order(item="tea"))

    async with client_of(router) as client:
        assert "idempotency-replayed" in [await client.put("/orders") for _ in range(2)][1].headers
    assert await web.items() == ["tea"]


async def test_a_route_of_several_methods_guards_those_that_are_named(web: Web) -> None:
    router = web.router()

    @router.api_route("/orders", methods=["PUT", "POST"])
    async def orders(session: IdempotentSession) -> None:
        session.add(Order(item="tea"))

    async with client_of(router) as client:
        for method in ("PUT", "PUT", "POST", "POST"):
            assert (await client.request(method, "/orders")).status_code == 200
    async with client_of(router, key=None) as client:
        assert [(await client.request(method, "/orders")).status_code for method in ("PUT", "POST")] == [
            200,
            400,
        ]
    assert await web.items() == ["tea"] * 4


async def test_an_endpoint_may_take_the_key_too(web: Web) -> None:
    router = web.router()

    @router.post("/orders")
    async def orders(key: IdempotencyKeyHeader) -> str:
        return key

    async with client_of(router) as client:
        assert [(await client.post("/orders")).json() for _ in range(2)] == [KEY, KEY]
    async with client_of(router, key=None) as client:
        assert (await client.post("/orders")).headers["content-type"] == PROBLEM


async def test_an_application_may_tell_its_clients_in_its_own_words(web: Web) -> None:
    app = FastAPI()
    app.include_router(shop(web))
    for error in (InvalidKeyHeader, KeyReused, KeyInFlight):

        @app.exception_handler(error)
        async def own(request: Request, error: Exception) -> Any:
            return PlainTextResponse(type(error).__name__, 418)

    async with client_of(app) as client:
        await client.post("/orders", json={"item": "tea"})
        reused = await client.post("/orders", json={"item": "coffee"})
    async with client_of(app, key=None) as client:
        missing = await client.post("/orders", json={"item": "tea"})
    assert (reused.status_code, reused.text) == (418, "KeyReused")
    assert (missing.status_code, missing.text) == (418, "InvalidKeyHeader")
