"""A real server and real clients: connections that are dropped, retries at once, a server that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from httpx import AsyncClient, AsyncHTTPTransport, Response, TransportError

from tests.database import Database
from tests.waiting import until
from tests.web import KEY, Web


@asynccontextmanager
async def server(database: Database, socket: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """uvicorn on a Unix socket, answering; killed at the end."""
    places = {"DATABASE_URL": database.url}
    if database.schema is not None:
        places["DATABASE_SCHEMA"] = database.schema
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "uvicorn", "--factory", "tests.acceptance.fastapi_shop:create_app"),
        *("--uds", str(socket), "--log-level", "critical"),
        env={**os.environ, **places},
    )
    try:

        async def answers() -> bool:
            try:
                async with client_of(socket) as client:
                    return (await client.get("/openapi.json")).status_code == 200
            except TransportError:
                return False

        await until(answers)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def client_of(socket: Path) -> AsyncClient:
    return AsyncClient(
        transport=AsyncHTTPTransport(uds=str(socket)),
        base_url="http://shop",
        headers={"Idempotency-Key": KEY},
        timeout=20,
    )


async def send_and_leave(socket: Path, body: dict[str, str], left_when: Path) -> None:
    """Send an order and drop the connection, without a word, when its work has begun."""
    _, writer = await asyncio.open_unix_connection(socket)
    data = json.dumps(body).encode()
    head = (
        f"POST /orders HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    await writer.drain()
    await exists(left_when)
    writer.transport.abort()


async def exists(path: Path) -> None:
    async def there() -> bool:
        return path.exists()  # noqa: ASYNC240  of the server's process

    await until(there)


async def until_answered(client: AsyncClient, body: dict[str, str]) -> Response:
    """The answer; a 409 is sent again."""
    responses: list[Response] = []

    async def answered() -> bool:
        responses.append(await client.post("/orders", json=body))
        return responses[-1].status_code != 409

    await until(answered)
    return responses[-1]


async def test_a_client_that_leaves_does_not_stop_the_work_and_its_retry_gets_the_answer(
    database: Database, web: Web, tmp_path: Path
) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    body = {"item": "tea", "begun": str(begun), "go": str(go)}
    async with server(database, tmp_path / "s"), client_of(tmp_path / "s") as client:
        await send_and_leave(tmp_path / "s", body, begun)
        in_flight = await client.post("/orders", json=body)
        go.touch()
        answer = await until_answered(client, body)

        async def background_task_ran() -> bool:
            return len(await web.items()) >= 2

        await until(background_task_ran)
        again = await client.post("/orders", json=body)
    assert in_flight.status_code == 409
    assert [answer.status_code, again.status_code] == [201, 201]
    assert [answer.headers["idempotency-replayed"], again.headers["idempotency-replayed"]] == ["true", "true"]
    assert answer.content == again.content
    assert await web.items() == ["tea", "a background task"]


async def test_fifty_retries_at_once_do_the_work_once(database: Database, web: Web, tmp_path: Path) -> None:
    async with server(database, tmp_path / "s"), client_of(tmp_path / "s") as client:
        responses = await asyncio.gather(*(until_answered(client, {"item": "tea"}) for _ in range(50)))

        async def background_task_ran() -> bool:
            return len(await web.items()) >= 2

        await until(background_task_ran)
    assert {response.status_code for response in responses} == {201}
    assert len({response.content for response in responses}) == 1
    assert sum("idempotency-replayed" in response.headers for response in responses) == 49
    assert await web.items() == ["tea", "a background task"]


async def test_a_server_that_is_killed_in_the_middle_leaves_the_key_free(
    database: Database, web: Web, tmp_path: Path
) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    body = {"item": "tea", "begun": str(begun), "go": str(go)}
    async with server(database, tmp_path / "s") as process, client_of(tmp_path / "s") as client:
        request = asyncio.create_task(client.post("/orders", json=body))
        await exists(begun)
        process.kill()
        with pytest.raises(TransportError):
            await request
    go.touch()
    async with server(database, tmp_path / "t"), client_of(tmp_path / "t") as client:
        answer = await until_answered(client, body)
        again = await client.post("/orders", json=body)
    assert (answer.status_code, "idempotency-replayed" in answer.headers) == (201, False)
    assert (again.content, again.headers["idempotency-replayed"]) == (answer.content, "true")
    assert (await web.items()).count("tea") == 1
    assert await web.stored() == [(KEY, 201)]


async def test_odd_headers_are_refused_over_the_wire_too(
    database: Database, web: Web, tmp_path: Path
) -> None:
    odd = [b"", b"short", b"two words", "schlüssel-1".encode(), b"k" * 10_000, b'"open']
    async with server(database, tmp_path / "s"), client_of(tmp_path / "s") as client:
        del client.headers["Idempotency-Key"]
        statuses = [
            (await client.post("/orders", json={"item": "tea"}, headers=headers)).status_code
            for headers in (
                *([(b"Idempotency-Key", value)] for value in odd),
                [(b"Idempotency-Key", b"the-same-key"), (b"Idempotency-Key", b"the-same-key")],
                [],
            )
        ]
    assert statuses == [400] * 8
    assert (await web.items(), await web.stored()) == ([], [])
