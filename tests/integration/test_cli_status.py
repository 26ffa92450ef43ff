"""`oncely status`: one look at everything, on an application's objects or on a database alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from oncely.event import uuid7
from oncely.streams import stream_publisher
from tests.command import Shop, oncely
from tests.outboxes import emit, fail
from tests.streams import deliver, events
from tests.webhooks import enqueue

pytestmark = pytest.mark.in_schema


async def fill(shop: Shop) -> None:
    """Something in every room, in more than one state."""
    await emit(shop.outbox, shop.sessions, "bad", "late", key="k")
    await fail(shop.outbox, shop.sessions, "bad", delay=None)
    await emit(shop.outbox, shop.sessions, "good", "better")
    await stream_publisher(shop.redis, shop.stream)(events("a", "b", "c"))
    await deliver(shop.redis, shop.stream, "worker", group="billing", count=1)
    async with shop.sessions.begin() as session:
        await shop.inbox.run(session, uuid7(), _nothing, consumer="billing")
        await shop.keys.run(session, scope="7", key="k-1", fingerprint=b"1" * 32, work=_made)
    with pytest.raises(RuntimeError):
        await shop.effects.run("charge:1", _fails)
    await shop.effects.run("charge:2", _succeeds)
    await enqueue(shop.webhooks, shop.sessions, "https://hooks.example.com/secret")


async def _nothing() -> None: ...


async def _made() -> tuple[int, str]:
    return 201, "secret"


async def _fails(provider_token: str) -> object:
    raise RuntimeError("no answer")


async def _succeeds(provider_token: str) -> object:
    return {"id": 1}


def facts(document: dict[str, Any], shop: Shop) -> dict[str, Any]:
    """The document without what changes from run to run."""
    text = json.dumps(document).replace(shop.stream, "STREAM")
    found: dict[str, Any] = json.loads(text)
    del found["at"]
    for room in ("outboxes", "streams", "inboxes", "keys", "webhooks"):
        for each in found[room]:
            for name in [name for name in each if name.endswith(("_at", "_seconds"))]:
                each[name] = "SOME TIME" if each[name] is not None else None
            for inner in (*each.get("groups", ()), *each.get("origins", ())):
                for name in [name for name in inner if name.endswith("_seconds")]:
                    inner[name] = "SOME TIME" if inner[name] is not None else None
    return found


EVERYTHING = {
    "at_most": 100_000,
    "outboxes": [
        {
            "name": "outbox",
            "ready": 3,
            "deferred": 0,
            "in_flight": 0,
            "retrying": 0,
            "dead": 1,
            "lag_seconds": "SOME TIME",
        }
    ],
    "streams": [
        {
            "name": "STREAM",
            "dead_letters": 0,
            "groups": [
                {"group": "billing", "unread": 2, "pending": 1, "oldest_pending_seconds": "SOME TIME"}
            ],
        }
    ],
    "inboxes": [{"name": "inbox", "handled": 1, "oldest_at": "SOME TIME", "newest_at": "SOME TIME"}],
    "keys": [{"name": "idempotency_keys", "stored": 1, "unanswered": 0, "oldest_at": "SOME TIME"}],
    "effects": [{"name": "effects", "pending": 0, "unknown": 1, "failed": 0, "done": 1}],
    "webhooks": [
        {
            "name": "webhooks",
            "pending": 1,
            "in_flight": 0,
            "failing": 0,
            "oldest_seconds": "SOME TIME",
            "expired": 0,
            "rejected": 0,
            "quarantined": 0,
            "origins": [
                {
                    "origin": "https://hooks.example.com",
                    "pending": 1,
                    "failing": 0,
                    "oldest_seconds": "SOME TIME",
                }
            ],
        }
    ],
    "errors": [],
}


async def test_everything_that_a_target_has_is_looked_at(shop: Shop) -> None:
    await fill(shop)
    ran = await oncely("status", shop.target(), "--json")
    assert (ran.exit_code, ran.stderr) == (0, "")
    assert facts(ran.json, shop) == EVERYTHING
