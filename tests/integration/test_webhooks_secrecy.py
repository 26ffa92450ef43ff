"""What a webhook says, and where exactly it goes, is in no column, log line, repr or error of ours."""

from __future__ import annotations

import asyncio
import io
import logging
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely.errors import WebhookReused
from oncely.webhooks import WebhookAttempt, WebhookRun, WebhookSender
from tests.database import Database, both_drivers
from tests.webhooks import (
    SECRET,
    Answer,
    Received,
    Sessions,
    endpoint,
    enqueue,
    execute,
    make_webhooks,
    pass_time,
    sender,
    worker,
)

pytestmark = [pytest.mark.in_schema, both_drivers]

PATH, QUERY, BODY, HEADER, TEXT = (f"SENTINEL{name}" for name in ("path", "query", "body", "header", "text"))
TARGET = f"/hook/{PATH}?token={QUERY}"


class Broken:
    def sign(self, message: object) -> list[tuple[str, str]]:
        raise RuntimeError(TEXT)


def found_in(text: str) -> set[str]:
    forbidden = {PATH, QUERY, BODY, HEADER, TEXT, SECRET, SECRET.removeprefix("whsec_")}
    return {each for each in forbidden if each in text}


async def test_nothing_that_is_sealed_is_seen_anywhere(
    database: Database, engine: AsyncEngine, sessions: Sessions
) -> None:
    """All that can go wrong with a webhook goes wrong, with every logger at DEBUG and SQL shown."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    root = logging.getLogger()
    loud = [
        root,
        *(logging.getLogger(name) for name in ("sqlalchemy.engine", "asyncio", "httpx", "httpcore")),
    ]
    levels = [logger.level for logger in loud]
    root.addHandler(handler)
    for logger in loud:
        logger.setLevel(logging.DEBUG)
    shown: list[object] = []
    texts: list[str] = []
    try:
        webhooks = await make_webhooks(engine)
        async with endpoint() as server, endpoint(names=("other.org",)) as stranger:

            async def echo(received: Received, writer: asyncio.StreamWriter) -> Answer:
                signed = received.headers["webhook-signature"]
                where = f"https://hooks.example.com{received.target}"
                return Answer(500, [("x-echo", signed), ("location", where)], received.body)

            async def nowhere(host: str, port: int) -> Sequence[str]:
                raise OSError(f"{TEXT}: {host}")

            server.script = echo
            given: dict[str, Any] = {"body": BODY.encode(), "headers": {"Authorization": f"Bearer {HEADER}"}}

            async def attempt(url: str, key: str, **options: Any) -> WebhookRun:
                await enqueue(webhooks, sessions, url, key=key, **given)
                one = worker(webhooks, sessions, server, on_attempt=shown.append, **options)
                shown.append(one)
                run = await one.run_once()
                await execute(engine, "UPDATE webhooks SET due_at = retry_until WHERE state = 'pending'")
                return run

            url = server.url(TARGET)
            transport = server.transport()
            runs = [
                await attempt(url, "answer"),
                await attempt(stranger.url(TARGET), "certificate"),
                await attempt(url, "name", sender=sender(server, lookup=nowhere)),
                await attempt(url, "inside", sender=sender(server, allow_private=False)),
                await attempt(url, "signer", sender=WebhookSender(Broken(), transport=transport)),
            ]
            assert [(run.retried, run.quarantined) for run in runs] == [(1, 0)] * 3 + [(0, 1), (1, 0)]
            await execute(engine, "UPDATE webhooks SET caller = 'thief' WHERE key = 'answer'")
            await execute(engine, "UPDATE webhooks SET due_at = now() WHERE key = 'answer'")
            assert await worker(webhooks, sessions, server).run_once() == WebhookRun(quarantined=1)
            try:
                await enqueue(webhooks, sessions, url, b"other", key="name")
            except WebhookReused:
                texts.append(traceback.format_exc())
            for wrong in (
                f"http://a.example{TARGET}",
                f"https://u:{TEXT}@a.example/",
                f"https://a.example{TARGET}#x",
            ):
                try:
                    await enqueue(webhooks, sessions, wrong, b"", key="wrong")
                except ValueError as error:
                    texts.append(str(error))
            assert len(texts) == 4
            await pass_time(engine, timedelta(days=3))
            await worker(webhooks, sessions, server).run_once()
            async with sessions() as session:
                shown += [await webhooks.stats(session), await webhooks.list(session)]
                shown += [webhooks, webhooks.keyring, vars(webhooks)]
            assert len(server.requests) == 1
            assert server.requests[0].headers["authorization"] == f"Bearer {HEADER}"
    finally:
        root.removeHandler(handler)
        for logger, level in zip(loud, levels, strict=True):
            logger.setLevel(level)
    assert [each.outcome for each in shown if isinstance(each, WebhookAttempt)] == [
        "retry", "retry", "retry", "quarantined", "retry",
    ]  # fmt: skip
    with (
        psycopg.connect(database.dsn()) as connection,
        connection.cursor().copy("COPY webhooks TO STDOUT") as rows,
    ):
        dump = b"".join(bytes(part) for part in rows).decode()
    assert dump.count("https://hooks.example.com:") == 5
    for where in (dump, log.getvalue(), repr(shown), *texts):
        assert found_in(where) == set()
    # Not in another spelling either.
    assert BODY.encode().hex() not in dump
    assert PATH.encode().hex() not in dump
    # And the log is not empty because nobody spoke.
    assert "oncely-webhooks" not in dump
    assert "INSERT INTO webhooks" in log.getvalue()
    assert "could not be made: RuntimeError" in log.getvalue()
