"""What an endpoint raises on purpose is an answer: the work undone, the refusal stored as it was rendered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import ClassVar

import pytest
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from oncely import Refused
from oncely.fastapi import IdempotentSession
from tests.web import KEY, Order, Web, client_of, message

pytestmark = pytest.mark.in_schema


async def test_an_exception_of_a_named_status_is_an_answer_without_the_work(web: Web) -> None:
    router, calls = web.router(refusals=[409]), []

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        calls.append(1)
        session.add(Order(item="tea"))
        await session.flush()
        raise HTTPException(409, "sold out", {"X-Seat": "7", "ETag": '"1"'})

    async with client_of(router) as client:
        first, again = await client.post("/orders"), await client.post("/orders")
    assert (first.status_code, first.json(), first.headers["x-seat"]) == (409, {"detail": "sold out"}, "7")
    assert (again.status_code, again.content, again.headers["etag"]) == (409, first.content, '"1"')
    assert again.headers["content-type"] == first.headers["content-type"] == "application/json"
    assert again.headers["content-length"] == first.headers["content-length"]
    assert again.headers["idempotency-replayed"] == "true"
    assert "x-seat" not in again.headers
    assert (len(calls), await web.items(), await web.stored()) == (1, [], [(KEY, 409)])


async def test_a_refusal_is_stored_as_the_application_renders_it(web: Web) -> None:
    router, rendered = web.router(refusals=[409]), []

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        raise HTTPException(409, "sold out")

    app = FastAPI()
    app.include_router(router)

    @app.exception_handler(HTTPException)
    async def own(request: Request, error: Exception) -> Response:
        rendered.append(error)
        return JSONResponse({"error": {"number": len(rendered)}}, 409)

    async with client_of(app) as client:
        responses = [await client.post("/orders") for _ in range(3)]
    assert [response.json() for response in responses] == [{"error": {"number": 1}}] * 3
    assert len(rendered) == 1


async def test_a_refusal_that_the_application_turns_into_something_else_is_not_stored(web: Web) -> None:
    router, calls = web.router(refusals=[409]), []

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        calls.append(1)
        raise HTTPException(409, "sold out")

    app = FastAPI()
    app.include_router(router)

    @app.exception_handler(HTTPException)
    async def own(request: Request, error: Exception) -> Response:
        return JSONResponse({}, 503)

    async with client_of(app) as client:
        assert [(await client.post("/orders")).status_code for _ in range(2)] == [503, 503]
    assert (len(calls), await web.stored()) == (2, [])


@pytest.mark.parametrize(
    ("refused", "content_type", "body"),
    [
        (
            Refused(402, '{"error": "no money"}', {"Link": "</pay>"}),
            "application/json",
            b'{"error": "no money"}',
        ),
        (
            Refused(402, b"\x00\xff", [("Content-Type", "image/x"), ("Link", "</pay>")]),
            "image/x",
            b"\x00\xff",
        ),
    ],
)
async def test_refused_is_an_answer(web: Web, refused: Refused, content_type: str, body: bytes) -> None:
    router, calls = web.router(), []

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        calls.append(1)
        session.add(Order(item="tea"))
        raise refused

    async with client_of(router) as client:
        first, again = await client.post("/orders"), await client.post("/orders")
    assert (first.status_code, first.headers["content-type"], first.content) == (402, content_type, body)
    assert first.headers["link"] == "</pay>"
    assert (message(again), again.headers["idempotency-replayed"]) == (message(first), "true")
    assert (len(calls), await web.items(), await web.stored()) == (1, [], [(KEY, 402)])


async def test_refused_with_a_5xx_is_said_and_not_stored(web: Web) -> None:
    router = web.router()

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        raise Refused(503, "{}")

    async with client_of(router) as client:
        assert [(await client.post("/orders")).status_code for _ in range(2)] == [503, 503]
    assert await web.stored() == []


@pytest.mark.parametrize("refusal", [Refused(409, "{}"), HTTPException(409)])
async def test_without_a_key_a_refusal_is_said_and_undoes_the_work(web: Web, refusal: Exception) -> None:
    router = web.router(required=False, refusals=[409])

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        session.add(Order(item="tea"))
        await session.flush()
        raise refusal

    async with client_of(router, key=None) as client:
        assert [(await client.post("/orders")).status_code for _ in range(2)] == [409, 409]
    assert (await web.items(), await web.stored()) == ([], [])


async def note_visit(session: IdempotentSession) -> None:
    session.add(Order(item="a visit"))


async def test_what_a_dependency_wrote_before_the_claim_is_kept_with_each_answer(web: Web) -> None:
    router = web.router(refusals=[409])

    @router.post("/orders/{what}", dependencies=[Depends(note_visit)])
    async def create_order(what: str, session: IdempotentSession) -> None:
        session.add(Order(item="work"))
        if what == "refused":
            raise HTTPException(409)
        if what == "broken":
            raise RuntimeError

    async with client_of(router) as client:
        for what in ("made", "made", "refused", "refused", "broken"):
            await client.post(f"/orders/{what}", headers={"Idempotency-Key": f"key-of-{what}"})
    assert await web.items() == ["a visit", "work", "a visit", "a visit", "a visit"]


class Seen:
    """What the exits of dependencies saw."""

    errors: ClassVar[list[Exception | None]] = []


async def watch() -> AsyncIterator[None]:
    try:
        yield
    except Exception as error:
        Seen.errors.append(error)
        raise
    Seen.errors.append(None)


async def translate() -> AsyncIterator[None]:
    try:
        yield
    except LookupError as error:
        raise HTTPException(409, "translated") from error


@pytest.mark.parametrize("error", [None, HTTPException(409), Refused(409, "{}"), RuntimeError("a bug")])
async def test_dependencies_see_what_the_endpoint_raised(web: Web, error: Exception | None) -> None:
    Seen.errors.clear()
    router = web.router(refusals=[409])

    @router.post("/orders", dependencies=[Depends(watch)])
    async def create_order(session: IdempotentSession) -> None:
        if error is not None:
            raise error

    async with client_of(router) as client:
        await client.post("/orders")
    assert Seen.errors == [error]


async def test_what_a_dependency_makes_of_an_error_is_not_an_answer_of_the_endpoint(web: Web) -> None:
    router, calls = web.router(refusals=[409]), []

    @router.post("/orders", dependencies=[Depends(translate)])
    async def create_order(session: IdempotentSession) -> None:
        calls.append(1)
        raise LookupError

    async with client_of(router) as client:
        responses = [await client.post("/orders") for _ in range(2)]
    assert [response.json() for response in responses] == [{"detail": "translated"}] * 2
    assert (len(calls), await web.stored()) == (2, [])


async def test_a_refusal_whose_rendering_breaks_asgi_is_an_error_and_nothing_is_stored(web: Web) -> None:
    router = web.router(refusals=[409])

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        raise HTTPException(409, "sold out")

    class Bodily(Response):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.body", "body": b"sold out"})

    app = FastAPI()
    app.include_router(router)

    @app.exception_handler(HTTPException)
    async def own(request: Request, error: Exception) -> Response:
        return Bodily(status_code=409)

    async with client_of(app) as client:
        assert (await client.post("/orders")).status_code == 500
        client._transport.raise_app_exceptions = True  # type: ignore[attr-defined]  # to see the error
        with pytest.raises(RuntimeError, match=r"^a response's body came before its start$"):
            await client.post("/orders")
    assert await web.stored() == []
