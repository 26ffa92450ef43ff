"""What is stored of an answer and comes back, what cannot be stored, and what runs after it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.middleware.base import BaseHTTPMiddleware

from oncely.fastapi import IdempotentSession
from tests.web import KEY, Order, Web, client_of, message

pytestmark = pytest.mark.in_schema


RESPONSES = {
    "json": JSONResponse({"größe": [1, None]}, 201),
    "bytes": Response(b"\x89PNG\x00\xff", 201, media_type="image/png"),
    "text": Response("Grüße", 200, media_type="text/plain"),
    "nothing": Response(status_code=204),
    "an empty body": Response(b"", 200),
    "a redirect": RedirectResponse("/orders/1", 303),
    "compressed": Response(zlib.compress(b"{}"), 200, {"Content-Encoding": "deflate"}, "application/json"),
    "a memoryview": Response(memoryview(b"memory"), 200),
}


@pytest.mark.parametrize("name", RESPONSES)
async def test_a_response_comes_back_byte_for_byte(web: Web, name: str) -> None:
    router = web.router()

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> Response:
        return RESPONSES[name]

    async with client_of(router) as client:
        first, again = await client.post("/orders"), await client.post("/orders")
    assert message(again) == message(first)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers.get("content-length") == first.headers.get("content-length")


@pytest.mark.parametrize("answer", [None, False, 0, "", [], {}])
async def test_an_empty_answer_is_an_answer(web: Web, answer: Any) -> None:
    router, calls = web.router(), []

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> Any:
        calls.append(1)
        return answer

    async with client_of(router) as client:
        responses = [await client.post("/orders") for _ in range(2)]
    assert [response.json() for response in responses] == [answer, answer]
    assert len(calls) == 1


async def test_a_route_without_a_body_is_replayed_without_one(web: Web) -> None:
    router = web.router()

    @router.post("/orders", status_code=204)
    async def create_order(session: IdempotentSession) -> None:
        session.add(Order(item="tea"))

    async with client_of(router) as client:
        first, again = await client.post("/orders"), await client.post("/orders")
    assert (again.status_code, again.content, "content-length" in again.headers) == (204, b"", False)
    assert message(again) == message(first)


async def set_headers(response: Response) -> None:
    response.headers["X-Request-Id"] = "new each time"
    response.headers["ETag"] = '"of a dependency"'


async def test_the_listed_headers_come_back_and_no_cookie_does(web: Web) -> None:
    router = web.router()

    @router.post("/orders", status_code=201, dependencies=[Depends(set_headers)])
    async def create_order(session: IdempotentSession, response: Response) -> str:
        response.headers["Location"] = "/orders/größe".encode().decode("latin-1")
        response.headers.append("Link", "</a>; rel=next")
        response.headers.append("Link", "</b>; rel=prev")
        response.set_cookie("session", "secret")
        return "made"

    async with client_of(router) as client:
        first, again = await client.post("/orders"), await client.post("/orders")
    assert first.headers["set-cookie"].startswith("session=secret")
    assert "set-cookie" not in again.headers
    assert "x-request-id" not in again.headers
    assert again.headers.get_list("link") == ["</a>; rel=next", "</b>; rel=prev"]
    for name in ("location", "etag", "content-type", "content-length"):
        assert again.headers[name] == first.headers[name], name


async def test_a_route_keeps_the_headers_that_it_names(web: Web) -> None:
    router = web.router(headers=["X-Order", "Location"])

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> Response:
        return JSONResponse({}, headers={"x-order": "1", "Location": "/orders/1", "ETag": '"1"'})

    async with client_of(router) as client:
        await client.post("/orders")
        again = await client.post("/orders")
    assert (again.headers["x-order"], again.headers["location"]) == ("1", "/orders/1")
    assert "etag" not in again.headers


async def test_a_response_of_the_route_is_given_once_and_of_the_key_again(web: Web) -> None:
    router, calls = web.router(), []

    @router.post("/orders", status_code=201, response_model=dict[str, int])
    async def create_order(session: IdempotentSession) -> Any:
        calls.append(1)
        return {"number": len(calls)}

    async with client_of(router) as client:
        assert [(await client.post("/orders")).json() for _ in range(3)] == [{"number": 1}] * 3


async def test_an_answer_of_the_largest_size_is_stored(web: Web) -> None:
    router = web.router(max_body=100)

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> Response:
        return Response(b"x" * 100)

    assert await said(router) == [200]
    assert await web.stored() == [(KEY, 200)]


async def test_an_answer_that_is_too_large_is_an_error_that_names_the_option(web: Web) -> None:
    router = web.router(max_body=100)

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> Response:
        session.add(Order(item="tea"))
        return Response(b"x" * 101)

    error = (
        "POST /orders: the answer's body has 101 bytes, more than idempotent_route(max_body=100) may store, "
        "so nothing was done; raise max_body, or answer with less"
    )
    assert await said(router) == [error]
    assert (await web.items(), await web.stored()) == ([], [])


async def test_a_refusal_that_is_too_large_is_an_error_too(web: Web) -> None:
    router = web.router(max_body=10, refusals=[409])

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        raise HTTPException(409, "no" * 100)

    [error] = await said(router)
    assert "max_body=10" in str(error)
    assert await web.stored() == []


def chunks() -> Iterator[bytes]:
    yield b"one"
    yield b"two"


@pytest.mark.parametrize("kind", ["StreamingResponse", "FileResponse"])
async def test_a_stream_that_only_the_endpoint_knew_of_is_an_error_and_nothing_is_done(
    web: Web, kind: str, tmp_path: Path
) -> None:
    router = web.router()
    (tmp_path / "file").write_text("content")

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> Any:
        session.add(Order(item="tea"))
        return StreamingResponse(chunks()) if kind == "StreamingResponse" else FileResponse(tmp_path / "file")

    error = (
        f"a {kind} sends its body by itself, so it cannot be stored and replayed; "
        "answer with a body, or take the route off the router of idempotent_route"
    )
    assert await said(router) == [error]
    assert (await web.items(), await web.stored()) == ([], [])


async def test_a_refusal_that_is_rendered_as_a_stream_is_an_error_and_nothing_is_stored(web: Web) -> None:
    router = web.router(refusals=[409])

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        raise HTTPException(409)

    app = FastAPI()
    app.include_router(router)

    @app.exception_handler(HTTPException)
    async def own(request: Request, error: Exception) -> Response:
        return StreamingResponse(chunks(), 409)

    [error] = await said(app)
    assert "which cannot be stored and replayed" in str(error)
    assert await web.stored() == []


async def test_without_a_key_a_stream_passes(web: Web) -> None:
    router = web.router(required=False)

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> Any:
        session.add(Order(item="tea"))
        return StreamingResponse(chunks())

    async with client_of(router, key=None) as client:
        assert (await client.post("/orders")).content == b"onetwo"
    assert await web.items() == ["tea"]


async def test_a_stream_on_another_method_is_sent_as_it_comes(web: Web) -> None:
    router, first_read, sent = web.router(), asyncio.Event(), []

    async def events() -> AsyncIterator[bytes]:
        yield b"one"
        await first_read.wait()
        yield b"two"

    @router.get("/events")
    async def stream() -> StreamingResponse:
        return StreamingResponse(events())

    app = FastAPI()
    app.include_router(router)

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def send_watched(message: Any) -> None:
            sent.append(message.get("body"))
            if sent[-1] == b"one":
                first_read.set()
            await send(message)

        await app(scope, receive, send_watched)

    async with client_of(watched, key=None) as client:
        assert (await client.get("/events")).content == b"onetwo"
    assert sent == [None, b"one", b"two", b""]


async def test_background_tasks_run_once(web: Web) -> None:
    router = web.router()
    ran: list[object] = []

    @router.post("/orders")
    async def create_order(session: IdempotentSession, tasks: BackgroundTasks) -> str:
        session.add(Order(item="tea"))

        async def task() -> None:
            ran.append(await web.items())

        tasks.add_task(task)
        return "made"

    async with client_of(router) as client:
        for _ in range(3):
            await client.post("/orders")
    assert ran == [["tea"]]


async def by_dependency(request: Request, tasks: BackgroundTasks) -> None:
    tasks.add_task(request.app.state.ran.append, "task")


async def test_background_tasks_of_a_dependency_run_with_the_first_answer_only(web: Web) -> None:
    router, app = web.router(), FastAPI()
    app.state.ran = []

    @router.post("/orders", dependencies=[Depends(by_dependency)])
    async def create_order(session: IdempotentSession) -> str:
        return "made"

    app.include_router(router)
    async with client_of(app) as client:
        for _ in range(3):
            await client.post("/orders")
    assert app.state.ran == ["task"]


async def test_background_tasks_do_not_run_when_the_commit_fails(web: Web) -> None:
    router = web.router()
    ran: list[object] = []

    @router.post("/orders")
    async def create_order(session: IdempotentSession, tasks: BackgroundTasks) -> str:
        session.add_all([Order(item="tea", name="same"), Order(item="tea", name="same")])
        tasks.add_task(ran.append, "task")
        return "made"

    async with client_of(router) as client:
        assert (await client.post("/orders")).status_code == 500
    assert ran == []


async def test_a_background_task_that_fails_is_the_servers_error_and_takes_no_answer_back(web: Web) -> None:
    router = web.router()

    @router.post("/orders")
    async def create_order(session: IdempotentSession, tasks: BackgroundTasks) -> str:
        session.add(Order(item="tea"))
        tasks.add_task(int, "no number")
        return "made"

    async with client_of(router) as client:
        client._transport.raise_app_exceptions = True  # type: ignore[attr-defined]  # to see the error
        with pytest.raises(ValueError, match="no number"):
            await client.post("/orders")
        again = await client.post("/orders")
    assert (again.json(), again.headers["idempotency-replayed"]) == ("made", "true")
    assert await web.items() == ["tea"]


async def test_a_client_that_leaves_before_it_has_sent_its_request_leaves_its_key_free(web: Web) -> None:
    router, calls = web.router(), []

    @router.post("/orders")
    async def create_order(order: dict[str, str], session: IdempotentSession) -> None:
        calls.append(order)

    app = FastAPI()
    app.include_router(router)

    async def half(scope: Any, receive: Any, send: Any) -> None:
        parts = [
            {"type": "http.request", "body": b'{"item": "t', "more_body": True},
            {"type": "http.disconnect"},
        ]

        async def receive_half() -> Any:
            return parts.pop(0)

        await app(scope, receive_half, send)

    async with client_of(half) as client:
        assert (await client.post("/orders", json={"item": "tea"})).status_code == 400  # to nobody
    assert (calls, await web.stored()) == ([], [])


async def test_a_client_that_has_left_a_route_without_a_key_is_the_servers_affair(web: Web) -> None:
    router = web.router()

    @router.get("/orders")
    async def list_orders() -> list[str]:
        return []

    app = FastAPI()
    app.include_router(router)

    async def cut(scope: Any, receive: Any, send: Any) -> None:
        async def send_cut(message: Any) -> None:
            raise OSError("the client has closed the connection")

        await app(scope, receive, send_cut)

    async with client_of(cut) as client:
        client._transport.raise_app_exceptions = True  # type: ignore[attr-defined]  # to see the error
        with pytest.raises(OSError, match="the client has closed the connection"):
            await client.get("/orders")


@pytest.mark.parametrize("gone", ["http.response.start", "http.response.body"])
async def test_a_client_that_has_left_does_not_keep_background_tasks_from_running(
    web: Web, gone: str
) -> None:
    router = web.router()
    ran: list[object] = []

    @router.post("/orders")
    async def create_order(session: IdempotentSession, tasks: BackgroundTasks) -> str:
        session.add(Order(item="tea"))
        tasks.add_task(ran.append, "task")
        return "made"

    app = FastAPI()
    app.include_router(router)

    async def cut(scope: Any, receive: Any, send: Any) -> None:
        async def send_cut(message: Any) -> None:
            if message["type"] == gone:
                raise OSError("the client has closed the connection")
            await send(message)

        await app(scope, receive, send_cut)

    async with client_of(cut) as client:
        with pytest.raises(AssertionError):  # httpx: there is no complete response
            await client.post("/orders")
    async with client_of(app) as client:
        again = await client.post("/orders")
    assert (ran, again.json(), again.headers["idempotency-replayed"]) == (["task"], "made", "true")
    assert await web.items() == ["tea"]


async def said(app: Any) -> list[int | str]:
    """POST /orders once: its status, or the error that the server would log."""
    got: list[int | str] = []
    if not isinstance(app, FastAPI):
        router, app = app, FastAPI()
        app.include_router(router)

    async def watch(request: Request, call_next: Any) -> Response:
        try:
            response: Response = await call_next(request)
        except Exception as error:
            got.append(str(error.exceptions[0] if isinstance(error, ExceptionGroup) else error))
            return Response(status_code=500)
        got.append(response.status_code)
        return response

    app.add_middleware(BaseHTTPMiddleware, dispatch=watch)
    async with client_of(app) as client:
        await client.post("/orders")
    return got
