"""What is refused when a route class or a route is made, and how routes are built around endpoints."""

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from pydantic import BaseModel
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import async_sessionmaker

from oncely import IdempotencyKeys
from oncely.fastapi import IdempotentSession, idempotent_route
from tests.web import client_of

if TYPE_CHECKING:
    from decimal import Decimal

KEYS = IdempotencyKeys(MetaData())


def make(**options: Any) -> Any:
    options.setdefault("scope", lambda request: "Ada")
    return idempotent_route(KEYS, async_sessionmaker(), **options)


def router(**options: Any) -> APIRouter:
    return APIRouter(route_class=make(**options))


class NewOrder(BaseModel):
    item: str


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"scope": "Ada"}, TypeError, "scope must be a function of the request, not str"),
        ({"ttl": timedelta(0)}, ValueError, "ttl must be above zero"),
        ({"ttl": 60}, TypeError, "ttl must be a timedelta"),
        ({"wait": timedelta(seconds=-1)}, ValueError, "wait is below zero"),
        ({"wait": 5}, TypeError, "wait must be a timedelta, not int"),
        ({"refusals": [500]}, ValueError, r"refusals must be statuses from 300 to 499, not \[500\]"),
        ({"refusals": [404, 200]}, ValueError, "refusals must be statuses"),
        ({"headers": ["ETag", "Set-Cookie"]}, ValueError, "headers that cannot be stored: set-cookie"),
        ({"headers": ["content-length"]}, ValueError, "content-length"),
        ({"headers": "Location"}, TypeError, "headers must be names, not a str"),
        ({"methods": "POST"}, TypeError, "methods must be names, not a str"),
        ({"max_body": -1}, ValueError, "max_body must be 0 or more, not -1"),
        ({"fingerprint": b"always the same"}, TypeError, "fingerprint must be a function of the request"),
    ],
)
def test_settings_that_could_not_work_are_refused(
    options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        make(**options)


async def generates() -> AsyncIterator[str]:
    yield "one"


def generates_in_a_thread() -> Iterator[str]:
    yield "one"


async def streams() -> StreamingResponse:
    return StreamingResponse(generates())


async def sends_a_file() -> FileResponse:
    return FileResponse("file")


async def answers() -> None: ...


@functools.wraps(generates)
def decorated(*arguments: Any, **values: Any) -> Any:
    return generates(*arguments, **values)


@pytest.mark.parametrize("endpoint", [generates, generates_in_a_thread, streams, sends_a_file, decorated])
def test_an_endpoint_that_streams_is_refused_when_the_route_is_built(endpoint: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"^/orders: an answer that sends itself"):
        router().post("/orders")(endpoint)


@pytest.mark.parametrize("response_class", [StreamingResponse, FileResponse])
def test_a_response_class_that_streams_is_refused_when_the_route_is_built(response_class: Any) -> None:
    with pytest.raises(TypeError, match="cannot be stored and replayed"):
        router().post("/orders", response_class=response_class)(answers)


@pytest.mark.parametrize("endpoint", [streams, sends_a_file])
def test_an_endpoint_that_streams_may_stand_at_another_method(endpoint: Callable[..., Any]) -> None:
    router().get("/orders")(endpoint)
    router().post("/orders", response_class=HTMLResponse)(answers)


def test_an_endpoint_in_a_thread_that_takes_the_session_is_refused_when_the_route_is_built() -> None:
    def create_order(session: IdempotentSession) -> None: ...

    for method in ("POST", "GET"):
        with pytest.raises(TypeError, match=r"^/orders: the endpoint runs in a thread, .*async def"):
            router().api_route("/orders", methods=[method])(create_order)


async def test_an_endpoint_in_a_thread_without_the_session_is_called() -> None:
    routes = router(required=False)

    @routes.post("/orders")
    def create_order(order: NewOrder) -> NewOrder:
        return order

    async with client_of(routes, key=None) as client:
        assert (await client.post("/orders", json={"item": "tea"})).json() == {"item": "tea"}


class Endpoint:
    """An endpoint that is an object."""

    async def __call__(self, order: NewOrder) -> str:
        return f"object {order.item}"

    async def method(self, order: NewOrder) -> str:
        return f"method {order.item}"


async def with_prefix(prefix: str, order: NewOrder) -> str:
    return f"{prefix} {order.item}"


def logged(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(endpoint)
    async def wrapper(*arguments: Any, **values: Any) -> Any:
        return await endpoint(*arguments, **values)

    return wrapper


@logged
async def with_decorator(order: NewOrder) -> str:
    return f"decorated {order.item}"


@pytest.mark.parametrize(
    ("endpoint", "answer"),
    [
        (Endpoint(), "object tea"),
        (Endpoint().method, "method tea"),
        (functools.partial(with_prefix, "partial"), "partial tea"),
        (with_decorator, "decorated tea"),
    ],
)
async def test_whatever_can_be_called_is_an_endpoint(endpoint: Callable[..., Any], answer: str) -> None:
    routes = router(required=False)
    routes.add_api_route("/orders", endpoint, methods=["POST"], name="order")
    async with client_of(routes, key=None) as client:
        response = await client.post("/orders", json={"item": "tea"})
    assert (response.status_code, response.json()) == (200, answer)


async def test_a_router_may_be_included_again_and_again() -> None:
    calls: list[str] = []
    routes, outer, app = router(required=False), APIRouter(prefix="/outer"), FastAPI()

    @routes.post("/orders", name="create")
    async def create_order(order: NewOrder, request: Request, response: Response) -> NewOrder:
        calls.append(request.url.path)
        return order

    outer.include_router(routes, prefix="/inner")
    app.include_router(routes)
    app.include_router(outer, prefix="/v1")
    app.include_router(outer, prefix="/v2")
    async with client_of(app, key=None) as client:
        for path in ("/orders", "/v1/outer/inner/orders", "/v2/outer/inner/orders"):
            assert (await client.post(path, json={"item": "tea"})).json() == {"item": "tea"}
    assert calls == ["/orders", "/v1/outer/inner/orders", "/v2/outer/inner/orders"]
    assert app.url_path_for("create") == "/orders"


async def test_an_annotation_that_exists_for_type_checkers_only_is_passed_over() -> None:
    routes = router(required=False)

    @routes.post("/orders", response_model=None)
    async def create_order(order: NewOrder) -> "Decimal":
        return order.item  # type: ignore[return-value]  # it is never looked at

    async with client_of(routes, key=None) as client:
        assert (await client.post("/orders", json={"item": "tea"})).json() == "tea"


async def test_an_endpoint_need_not_say_what_it_returns() -> None:
    routes = router(required=False)

    @routes.post("/orders")
    async def create_order(order: NewOrder):  # type: ignore[no-untyped-def]
        return {"item": order.item}

    async with client_of(routes, key=None) as client:
        assert (await client.post("/orders", json={"item": "tea"})).json() == {"item": "tea"}


def test_a_route_may_wait_without_end() -> None:
    assert make(wait=None).policy.wait is None


async def test_the_session_on_a_route_that_is_not_guarded_is_a_clear_error() -> None:
    app = FastAPI()

    @app.post("/orders")
    async def create_order(session: IdempotentSession) -> None: ...

    async with client_of(app) as client:
        client._transport.raise_app_exceptions = True  # type: ignore[attr-defined]  # to see the error
        with pytest.raises(RuntimeError, match=r"^POST /orders is no route of idempotent_route"):
            await client.post("/orders")


async def test_an_endpoint_may_have_a_parameter_of_any_name() -> None:
    routes = router(required=False)

    @routes.post("/{call}/{endpoint}")
    async def create_order(call: str, endpoint: int, self: str, values: str = "") -> list[str | int]:
        return [call, endpoint, self, values]

    async with client_of(routes, key=None) as client:
        assert (await client.post("/a/1?self=me&values=v")).json() == ["a", 1, "me", "v"]


async def test_the_application_may_use_the_class_for_all_its_routes() -> None:
    app = FastAPI()
    app.router.route_class = make()

    @app.post("/orders")
    async def create_order(order: NewOrder) -> NewOrder:
        return order

    async with client_of(app, key=None) as client:
        response = await client.post("/orders", json={"item": "tea"})
    assert (response.status_code, response.json()["title"]) == (400, "Idempotency-Key is missing")
