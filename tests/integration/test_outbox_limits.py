"""What the outbox refuses: with an error of its own, before any SQL, and the session goes on."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely import InvalidKey, NewEvent, Outbox
from oncely.testing import RecordingPublisher
from tests.outboxes import Sessions, emit, rows, sent_sql, states

pytestmark = pytest.mark.in_schema

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"topic": ""}, InvalidKey, "topic is empty"),
    ({"topic": "x" * 1_001}, InvalidKey, "topic has 1,001 bytes; at most 1,000 are stored"),
    ({"topic": "a\0"}, InvalidKey, "topic: a NUL character cannot be stored"),
    ({"topic": "\ud800"}, InvalidKey, "topic: an unpaired surrogate cannot be stored"),
    ({"topic": None}, InvalidKey, "topic must be a str, not NoneType"),
    ({"key": "é" * 501}, InvalidKey, "key has 1,002 bytes; at most 1,000 are stored"),
    ({"key": "a\0"}, InvalidKey, "key: a NUL character cannot be stored"),
    ({"key": "\udfff"}, InvalidKey, "key: an unpaired surrogate cannot be stored"),
    ({"key": 7}, InvalidKey, "key must be a str, not int"),
    ({"dedup_key": "x" * 2_700}, InvalidKey, "dedup_key has 2,700 bytes; at most 1,000 are stored"),
    ({"dedup_key": "a\0"}, InvalidKey, "dedup_key: a NUL character cannot be stored"),
    ({"dedup_key": "\ud800"}, InvalidKey, "dedup_key: an unpaired surrogate cannot be stored"),
    ({"dedup_key": b"x"}, InvalidKey, "dedup_key must be a str, not bytes"),
    ({"delay": 30}, TypeError, "delay must be a timedelta, not int"),
    ({"headers": [("a", "b")]}, TypeError, "headers must be a mapping, not list"),
    ({"delay": timedelta(microseconds=-1)}, ValueError, "delay is below zero: -1 day, 23:59:59.999999"),
    ({"delay": timedelta(days=36_501)}, ValueError, "delay is above 100 years: 36501 days, 0:00:00"),
    ({"delay": timedelta.max}, ValueError, "delay is above 100 years: "),
    ({"headers": {"a": 1}}, ValueError, "headers: 'a': names and values are strings"),
    ({"headers": {1: "a"}}, ValueError, "headers: 1: names and values are strings"),
    ({"headers": {"a": "\0"}}, ValueError, "headers['a']: a NUL character cannot be stored"),
    ({"headers": {"\ud800": ""}}, ValueError, "headers key '\\ud800': an unpaired surrogate"),
    ({"payload": {"at": [b""]}}, ValueError, "payload['at'][0]: a value of type bytes is not JSON"),
    ({"payload": float("nan")}, ValueError, "payload: nan is not JSON"),
    ({"payload": {"a": "\0"}}, ValueError, "payload['a']: a NUL character cannot be stored"),
]


async def test_it_is_refused_before_any_sql_and_the_session_goes_on(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    for fields, error, message in REFUSED:
        bad: Any = {"topic": "t", "payload": 1} | fields
        async with sessions() as session:
            await outbox.emit(session, "t", "before")
            with sent_sql(engine) as sent:
                with pytest.raises(error) as raised:
                    await outbox.emit(session, **bad)
                assert type(raised.value) is error
                assert str(raised.value).startswith(message)
                with pytest.raises(error) as raised:
                    await outbox.emit_many(session, [NewEvent("t", 1), NewEvent(**bad), NewEvent("t", 2)])
                assert type(raised.value) is error
                assert str(raised.value).startswith(f"events[1] {message}")
            assert sent == [], fields
            await outbox.emit(session, "t", "after")
            await session.commit()
    assert await rows(engine, "SELECT payload #>> '{}', count(*)::int FROM outbox GROUP BY 1 ORDER BY 1") == [
        ("after", len(REFUSED)),
        ("before", len(REFUSED)),
    ]


async def test_what_is_no_new_event_is_refused_by_its_place(outbox: Outbox, sessions: Sessions) -> None:
    wrong: Any = {"topic": "t", "payload": 2}
    async with sessions() as session:
        with pytest.raises(TypeError, match=r"^events\[1\] must be a NewEvent, not dict$"):
            await outbox.emit_many(session, [NewEvent("t", 1), wrong])


async def test_the_longest_of_everything_is_accepted(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher, driver: str
) -> None:
    longest = "\U0001f600" * 250
    fields: Any = {
        "topic": longest,
        "key": longest,
        "dedup_key": longest,
        "headers": {longest * 9: longest * 9},
    }
    await emit(outbox, sessions, 1, **fields)
    await emit(outbox, sessions, 2, topic="t", delay=timedelta(days=36_500))
    [event] = await outbox.relay_once(sessions, publish)
    assert (event.topic, event.key, event.headers) == (longest, longest, {longest * 9: longest * 9})


async def test_max_payload_bytes_counts_the_json_in_utf_8(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions
) -> None:
    bounded = Outbox(MetaData(), max_payload_bytes=10)
    async with sessions() as session:
        with sent_sql(engine) as sent:
            for payload in ("123456789", "éééé1", [1, 2, 3, 4, 5, 6]):
                with pytest.raises(ValueError, match=r"^payload has 1\d bytes; max_payload_bytes is 10$"):
                    await bounded.emit(session, "t", payload)
                with pytest.raises(ValueError, match=r"^events\[1\] payload has 1\d bytes"):
                    await bounded.emit_many(session, [NewEvent("t", 1), NewEvent("t", payload)])
        assert sent == []
        await bounded.emit(session, "t", "12345678")
        await bounded.emit(session, "t", "éééé")
        await bounded.emit(session, "t", "1", headers={"not": "counted at all"})
        await session.commit()
    assert await states(engine) == {"12345678": "open", "éééé": "open", "1": "open"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_dead": "stop"}, 'on_dead is "continue" or "park", not \'stop\''),
        ({"max_payload_bytes": 0}, "max_payload_bytes must be 1 or more, not 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: Any, message: str) -> None:
    metadata = MetaData()
    with pytest.raises(ValueError) as raised:
        Outbox(metadata, **settings)
    assert str(raised.value) == message
    assert not metadata.tables


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "batch must be 1 or more, not 0"),
        ({"lease": timedelta(0)}, "lease must be positive, not 0:00:00"),
        ({"lease": timedelta(seconds=-1)}, "lease must be positive, not -1 day, 23:59:59"),
    ],
)
async def test_a_relay_that_makes_no_sense_is_refused(settings: Any, message: str) -> None:
    def no_sessions() -> Any:
        raise AssertionError("it must not get this far")

    with pytest.raises(ValueError) as raised:
        await Outbox(MetaData()).relay_once(no_sessions, RecordingPublisher(), **settings)
    assert str(raised.value) == message
