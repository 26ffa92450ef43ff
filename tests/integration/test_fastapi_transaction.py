"""The key, the work and the answer are one transaction, committed before the first byte leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from sqlalchemy import MetaData, event, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from oncely import Outbox
from oncely.errors import KeyLost
from oncely.fastapi import IdempotentSession
from tests.waiting import backend_waits
from tests.web import KEY, Order, Web, client_of, message

pytestmark = pytest.mark.in_schema


async def test_the_commit_comes_before_the_first_byte(web: Web) -> None:
    router, seen = web.router(), []

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        session.add(Order(item="tea"))

    app = FastAPI()
    app.include_router(router)

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def send_watched(sent: Any) -> None:
            seen.append((sent["type"], await web.items(), await web.stored()))
            await send(sent)

        await app(scope, receive, send_watched)

    async with client_of(watched) as client:
        await client.post("/orders")
    assert seen[0] == ("http.response.start", ["tea"], [(KEY, 200)])


@pytest.mark.parametrize("required", [True, False])
async def test_a_commit_that_fails_is_a_500_and_a_retry_works_again(web: Web, required: bool) -> None:
    router = web.router(required=required)

    @router.post("/orders", status_code=201)
    async def create_order(session: IdempotentSession) -> str:
        session.add(Order(item="tea", name="the only one"))
        return "made"

    async with web.sessions.begin() as session:
        session.add(Order(item="coffee", name="the only one"))
    async with client_of(router, key=KEY if required else None) as client:
        first = await client.post("/orders")
        assert (first.status_code, first.text) == (500, "Internal Server Error")
        assert (await web.items(), await web.stored()) == (["coffee"], [])
        async with web.sessions.begin() as session:
            await session.execute(update(Order).values(name="another one"))
        retry = await client.post("/orders")
    assert (retry.status_code, retry.json()) == (201, "made")
    assert "idempotency-replayed" not in retry.headers
    assert await web.items() == ["coffee", "tea"]


async def test_an_applications_handler_answers_for_a_commit_that_fails(web: Web) -> None:
    router = web.router()

    @router.post("/orders", status_code=201)
    async def create_order(session: IdempotentSession) -> None:
        session.add_all([Order(item="tea", name="the same"), Order(item="tea", name="the same")])

    app = FastAPI()
    app.include_router(router)

    @app.exception_handler(IntegrityError)
    async def conflict(request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": "this name is taken"}, 409)

    async with client_of(app) as client:
        responses = [await client.post("/orders") for _ in range(2)]
    assert [(r.status_code, r.json()) for r in responses] == [(409, {"detail": "this name is taken"})] * 2
    assert all("idempotency-replayed" not in r.headers for r in responses)
    assert (await web.items(), await web.stored()) == ([], [])


@pytest.mark.parametrize("error", [RuntimeError("a bug"), HTTPException(404, "no such seat")])
async def test_an_error_leaves_neither_work_nor_key(web: Web, error: Exception) -> None:
    router, calls = web.router(refusals=[409]), []

    @router.post("/orders", status_code=201)
    async def create_order(session: IdempotentSession) -> str:
        calls.append(1)
        session.add(Order(item="tea"))
        await session.flush()
        if len(calls) == 1:
            raise error
        return "made"

    async with client_of(router) as client:
        first = await client.post("/orders")
        assert (await web.items(), await web.stored()) == ([], [])
        assert await web.idle_in_transaction() == 0
        retry = await client.post("/orders")
    assert first.status_code == (404 if isinstance(error, HTTPException) else 500)
    assert (retry.status_code, await web.items(), len(calls)) == (201, ["tea"], 2)


async def test_a_5xx_is_never_stored_and_undoes_the_work(web: Web) -> None:
    router, calls = web.router(), []

    @router.post("/orders", status_code=201)
    async def create_order(session: IdempotentSession) -> Any:
        calls.append(1)
        session.add(Order(item="tea"))
        return JSONResponse({"try": "again"}, 503, {"Retry-After": "7"}) if len(calls) == 1 else "made"

    async with client_of(router) as client:
        first, retry = await client.post("/orders"), await client.post("/orders")
    assert (first.status_code, first.headers["retry-after"]) == (503, "7")
    assert (retry.status_code, retry.json(), await web.items()) == (201, "made", ["tea"])


async def test_a_4xx_that_is_returned_is_an_answer_and_keeps_the_work(web: Web) -> None:
    router = web.router()

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> Any:
        session.add(Order(item="an attempt"))
        return JSONResponse({"detail": "no"}, 402)

    async with client_of(router) as client:
        first, again = await client.post("/orders"), await client.post("/orders")
    assert (message(again), again.headers["idempotency-replayed"]) == (message(first), "true")
    assert (await web.items(), await web.stored()) == (["an attempt"], [(KEY, 402)])


async def test_a_response_that_does_not_fit_its_model_stores_nothing(web: Web) -> None:
    router = web.router()

    @router.post("/orders", response_model=int)
    async def create_order(session: IdempotentSession) -> str:
        session.add(Order(item="tea"))
        return "no number"

    async with client_of(router) as client:
        assert (await client.post("/orders")).status_code == 500
    assert (await web.items(), await web.stored()) == ([], [])


@pytest.mark.parametrize("ending", [AsyncSession.commit, AsyncSession.rollback, AsyncSession.close])
async def test_an_endpoint_that_ends_the_transaction_is_an_error_and_stores_nothing(
    web: Web, ending: Callable[[AsyncSession], Any]
) -> None:
    router = web.router()

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        session.add(Order(item="tea"))
        await session.flush()
        await ending(session)

    app = FastAPI()
    app.include_router(router)
    raised = []

    @app.exception_handler(KeyLost)
    async def lost(request: Request, error: Exception) -> Response:
        raised.append(error)
        return Response(status_code=500)

    async with client_of(app) as client:
        assert (await client.post("/orders")).status_code == 500
    assert (len(raised), await web.items(), await web.stored()) == (1, [], [])


async def test_events_leave_with_the_answer_and_not_without(web: Web, engine: AsyncEngine) -> None:
    metadata = MetaData()
    outbox = Outbox(metadata)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    router, calls = web.router(), []

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        calls.append(1)
        await outbox.emit(session, "order.placed", {"call": len(calls)})
        if len(calls) == 1:
            raise RuntimeError("the first time")

    async with client_of(router) as client:
        assert [(await client.post("/orders")).status_code for _ in range(3)] == [500, 200, 200]
    async with engine.connect() as connection:
        payloads = await connection.execute(text("SELECT payload->>'call' FROM outbox"))
        assert payloads.scalars().all() == ["2"]


async def test_a_lost_connection_is_a_500_and_a_retry_works(web: Web) -> None:
    router, calls = web.router(), []

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        calls.append(1)
        session.add(Order(item="tea"))
        await session.flush()
        if len(calls) == 1:
            pid = await session.scalar(text("SELECT pg_backend_pid()"))
            async with web.engine.connect() as other:
                await other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})

    async with client_of(router) as client:
        assert (await client.post("/orders")).status_code == 500
        assert await web.stored() == []
        assert (await client.post("/orders")).status_code == 200
    assert await web.items() == ["tea"]


async def test_a_cancelled_request_leaves_nothing_behind(web: Web, engines: Any) -> None:
    web.sessions = async_sessionmaker(engines(pool_size=1, max_overflow=0))
    router, working = web.router(), asyncio.Event()

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> str:
        session.add(Order(item="tea"))
        await session.flush()
        if not working.is_set():
            working.set()
            await asyncio.Event().wait()
        return "made"

    async with client_of(router) as client:
        request = asyncio.create_task(client.post("/orders"))
        await working.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert await web.idle_in_transaction() == 0
        assert (await client.post("/orders")).json() == "made"
    assert await web.items() == ["tea"]


async def test_a_connection_is_back_in_the_pool_before_the_answer_is_sent(web: Web, engines: Any) -> None:
    pool = engines(pool_size=1, max_overflow=0, pool_timeout=1)
    web.sessions = async_sessionmaker(pool)
    router, out = web.router(refusals=[409]), []

    @router.post("/orders/{status}")
    async def create_order(status: int, session: IdempotentSession) -> Any:
        session.add(Order(item="tea"))
        await session.flush()
        if status == 409:
            raise HTTPException(409)
        if status == 404:
            raise HTTPException(404)
        return Response(status_code=status)

    app = FastAPI()
    app.include_router(router)

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def send_watched(sent: Any) -> None:
            if sent["type"] == "http.response.start":
                out.append((sent["status"], pool.pool.checkedout()))
            await send(sent)

        await app(scope, receive, send_watched)

    async with client_of(watched) as client:
        for status in (200, 200, 409, 409, 404, 503):
            await client.post(f"/orders/{status}", headers={"Idempotency-Key": f"key-of-{status}"})
        await client.post("/orders/201", headers={"Idempotency-Key": "key-of-200"})
    assert out == [(200, 0), (200, 0), (409, 0), (409, 0), (404, 0), (503, 0), (422, 0)]


async def test_a_session_is_made_only_where_one_is_used(web: Web) -> None:
    made: list[AsyncSession] = []
    factory = web.sessions

    def counting() -> AsyncSession:
        made.append(factory())
        return made[-1]

    web.sessions = counting  # type: ignore[assignment]  # alike
    router = web.router(required=False)

    @router.get("/orders")
    @router.post("/orders")
    async def orders() -> None: ...

    async with client_of(router, key=None) as client:
        await client.get("/orders")
        await client.post("/orders")
        assert made == []
        await client.post("/orders", headers={"Idempotency-Key": KEY})
    assert len(made) == 1


async def test_a_session_without_autobegin_is_begun(web: Web) -> None:
    web.sessions = async_sessionmaker(web.engine, autobegin=False)
    router = web.router(required=False)

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        session.add(Order(item="tea"))

    async with client_of(router, key=None) as client:
        without = await client.post("/orders")
        with_key = await client.post("/orders", headers={"Idempotency-Key": KEY})
    assert [without.status_code, with_key.status_code] == [200, 200]
    web.sessions = async_sessionmaker(web.engine)
    assert await web.items() == ["tea", "tea"]


async def test_a_sessionmaker_that_begins_the_transaction_is_taken_too(web: Web) -> None:
    factory = web.sessions
    web.sessions = factory.begin  # type: ignore[assignment]  # alike
    router = web.router()

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        session.add(Order(item="tea"))

    async with client_of(router) as client:
        assert [(await client.post("/orders")).status_code for _ in range(2)] == [200, 200]
    web.sessions = factory
    assert await web.items() == ["tea"]


@pytest.fixture
def commits(engine: AsyncEngine) -> list[str]:
    """How the transactions of the test's engine ended."""
    ended: list[str] = []
    event.listen(engine.sync_engine, "commit", lambda connection: ended.append("commit"))
    event.listen(engine.sync_engine, "rollback", lambda connection: ended.append("rollback"))
    return ended


async def test_each_request_is_one_transaction(web: Web, commits: list[str]) -> None:
    router = web.router()

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> None:
        session.add(Order(item="tea"))

    async with client_of(router) as client:
        commits.clear()
        await client.post("/orders")
        await client.post("/orders")
    assert commits == ["commit", "commit"]


async def test_the_key_is_free_for_the_second_of_two_when_the_first_fails(web: Web) -> None:
    router, calls, go = web.router(wait=timedelta(seconds=20)), [], asyncio.Event()

    @router.post("/orders")
    async def create_order(session: IdempotentSession) -> str:
        calls.append(1)
        session.add(Order(item="tea"))
        if len(calls) == 1:
            await go.wait()
            raise RuntimeError("the first")
        return "made"

    async with client_of(router) as client, asyncio.TaskGroup() as tasks:
        both = [tasks.create_task(client.post("/orders")) for _ in range(2)]
        await backend_waits(web.engine, "advisory")
        go.set()
    assert sorted(request.result().status_code for request in both) == [200, 500]
    assert await web.items() == ["tea"]
