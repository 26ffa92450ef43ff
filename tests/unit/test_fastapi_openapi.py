"""What the OpenAPI document says of guarded routes."""

from __future__ import annotations

import re
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Header
from fastapi.responses import HTMLResponse
from openapi_spec_validator import OpenAPIV31SpecValidator
from pydantic import BaseModel
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import async_sessionmaker

from oncely import IdempotencyKeys
from oncely.fastapi import IdempotencyKeyHeader, IdempotentSession, idempotent_route

PROBLEM = "application/problem+json"


class NewOrder(BaseModel):
    item: str


class Taken(BaseModel):
    seat: str


def router(**options: Any) -> APIRouter:
    keys = IdempotencyKeys(MetaData())
    return APIRouter(
        route_class=idempotent_route(keys, async_sessionmaker(), scope=lambda request: "Ada", **options)
    )


def document(routes: APIRouter, *, prefixes: tuple[str, ...] = ("",), valid: bool = True) -> Any:
    """The paths of a valid document."""
    app = FastAPI()
    for prefix in prefixes:
        app.include_router(routes, prefix=prefix)
    whole = app.openapi()
    assert whole["openapi"].startswith("3.1.")
    if valid:
        OpenAPIV31SpecValidator(whole).validate()
    return whole["paths"]


def key_parameters(operation: Any) -> list[Any]:
    return [p for p in operation.get("parameters", []) if p["name"].lower() == "idempotency-key"]


@pytest.mark.parametrize("required", [True, False])
def test_the_header_is_a_parameter_of_guarded_routes(required: bool) -> None:
    routes = router(required=required)

    @routes.post("/orders/{number}")
    async def create_order(number: int, order: NewOrder, session: IdempotentSession) -> None: ...

    [parameter] = key_parameters(document(routes)["/orders/{number}"]["post"])
    assert (parameter["in"], parameter["required"]) == ("header", required)
    assert re.fullmatch(parameter["schema"]["pattern"], "8e03978e-40d5-43e8-bc93-6894a57f9324")
    assert "8 to 255 printable ASCII characters" in parameter["description"]


def test_guarded_routes_say_how_they_refuse() -> None:
    routes = router()

    @routes.post("/orders", status_code=201)
    async def create_order(order: NewOrder, session: IdempotentSession) -> int:
        return 1

    responses = document(routes)["/orders"]["post"]["responses"]
    assert set(responses) == {"201", "400", "409", "422"}
    for status in ("400", "409", "422"):
        schema = responses[status]["content"][PROBLEM]["schema"]
        assert schema["required"] == ["type", "title", "status", "detail"]
    assert responses["409"]["headers"]["Retry-After"]["schema"] == {"type": "integer", "minimum": 1}
    assert responses["201"]["content"]["application/json"]["schema"]["type"] == "integer"


def test_a_422_has_the_validation_errors_and_the_problem_in_one_entry() -> None:
    routes = router()

    @routes.post("/orders")
    async def create_order(order: NewOrder) -> None: ...

    content = document(routes)["/orders"]["post"]["responses"]["422"]["content"]
    assert set(content) == {"application/json", PROBLEM}
    errors = content["application/json"]["schema"]["properties"]["detail"]["items"]
    assert errors["required"] == ["loc", "msg", "type"]


def test_a_route_that_validates_nothing_has_the_problem_only() -> None:
    routes = router()

    @routes.post("/orders")
    async def create_order() -> None: ...

    assert set(document(routes)["/orders"]["post"]["responses"]["422"]["content"]) == {PROBLEM}


def test_other_routes_of_the_router_say_nothing_of_it() -> None:
    routes = router()

    @routes.get("/orders/{number}")
    @routes.put("/orders/{number}")
    async def orders(number: int, session: IdempotentSession) -> None: ...

    for operation in document(routes)["/orders/{number}"].values():
        assert key_parameters(operation) == []
        assert set(operation["responses"]) == {"200", "422"}
        assert set(operation["responses"]["422"]["content"]) == {"application/json"}


def test_the_header_is_not_required_where_only_some_methods_are_guarded() -> None:
    routes = router()

    @routes.api_route("/orders", methods=["POST", "PUT"])
    async def orders() -> None: ...

    with pytest.warns(UserWarning, match="Duplicate Operation ID"):  # FastAPI's, of any such route
        operations = document(routes, valid=False)["/orders"]
    assert [key_parameters(operations[method])[0]["required"] for method in ("post", "put")] == [False, False]


async def by_dependency(idempotency_key: Annotated[str | None, Header()] = None) -> None: ...


@pytest.mark.parametrize("how", ["IdempotencyKeyHeader", "Header", "a dependency", "in its own words"])
def test_a_header_that_the_route_takes_itself_is_there_once(how: str) -> None:
    routes = router()
    if how == "IdempotencyKeyHeader":

        @routes.post("/orders")
        async def with_ours(key: IdempotencyKeyHeader) -> None: ...

    elif how == "Header":

        @routes.post("/orders")
        async def with_theirs(idempotency_key: Annotated[str, Header()]) -> None: ...

    elif how == "in its own words":
        header = {"name": "idempotency-key", "in": "header", "schema": {"type": "string"}}

        @routes.post("/orders", openapi_extra={"parameters": [header]})
        async def with_own_words() -> None: ...

    else:

        @routes.post("/orders", dependencies=[Depends(by_dependency)])
        async def with_dependency() -> None: ...

    assert len(key_parameters(document(routes)["/orders"]["post"])) == 1


def test_the_header_alone_is_in_the_document_of_any_route() -> None:
    routes = APIRouter()

    @routes.post("/orders")
    async def create_order(key: IdempotencyKeyHeader) -> None: ...

    [parameter] = key_parameters(document(routes)["/orders"]["post"])
    assert parameter["in"] == "header"
    assert parameter["schema"]["type"] == "string"
    assert "pattern" in parameter["schema"]
    assert parameter["description"].startswith("Required.")


def test_what_the_route_says_itself_is_kept() -> None:
    routes = router()

    @routes.post(
        "/orders",
        responses={
            409: {"model": Taken, "description": "The seat is taken", "headers": {"X-Seat": {"schema": {}}}},
            "422": {"description": "Not understood", "content": {"application/json": {"schema": {}}}},
            404: {"description": "No such seat"},
        },
        openapi_extra={"parameters": [{"name": "x-more", "in": "header", "schema": {}}], "x-own": 1},
    )
    async def create_order(order: NewOrder) -> None: ...

    operation = document(routes)["/orders"]["post"]
    responses = operation["responses"]
    assert set(responses) == {"200", "400", "404", "409", "422"}
    assert responses["409"]["description"] == "The seat is taken"
    assert set(responses["409"]["headers"]) == {"Retry-After", "X-Seat"}
    assert responses["409"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Taken"}
    assert responses["422"]["description"] == "Not understood"
    assert responses["422"]["content"]["application/json"]["schema"] == {}
    assert all(PROBLEM in responses[status]["content"] for status in ("400", "409", "422"))
    assert [parameter["name"] for parameter in operation["parameters"]] == ["x-more", "Idempotency-Key"]
    assert operation["x-own"] == 1


def test_a_model_of_a_routes_own_422_stands_alone() -> None:
    routes = router()

    @routes.post("/orders", responses={422: {"model": Taken}})
    async def create_order(order: NewOrder) -> None: ...

    content = document(routes)["/orders"]["post"]["responses"]["422"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/Taken"}
    assert PROBLEM in content


def test_a_router_that_is_included_twice_says_it_once_each_time() -> None:
    inner, outer = router(), APIRouter()

    @inner.post("/orders", responses={409: {"model": Taken}}, response_class=HTMLResponse)
    async def create_order(order: NewOrder) -> None: ...

    outer.include_router(inner, prefix="/inner")
    paths = document(outer, prefixes=("/v1", "/v2"))
    assert set(paths) == {"/v1/inner/orders", "/v2/inner/orders"}
    for path in paths.values():
        assert len(key_parameters(path["post"])) == 1
        assert set(path["post"]["responses"]) == {"200", "400", "409", "422"}
        assert set(path["post"]["responses"]["422"]["content"]) == {"application/json", PROBLEM}
