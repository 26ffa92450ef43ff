"""Payloads: what is emitted is what jsonb holds and what a publisher reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from oncely import NewEvent, Outbox
from oncely.storable import encode_json
from oncely.testing import EmbeddedPostgres, RecordingPublisher
from tests.outboxes import Sessions, emit, execute, payloads, rows

pytestmark = pytest.mark.in_schema


texts = st.text(st.characters(), max_size=20)
numbers = st.integers(-(10**40), 10**40) | st.floats() | st.decimals()
others = st.uuids() | st.dates() | st.datetimes(timezones=st.timezones() | st.none()) | st.binary(max_size=2)
leaves = st.none() | st.booleans() | numbers | texts | others
anything = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(texts | st.integers() | st.floats(), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def jsonb(postgres: EmbeddedPostgres) -> Any:
    """A connection on which texts are read back as jsonb writes them."""
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        yield connection


def exactly(text: str) -> Any:
    """A JSON text's values, with numbers exact: jsonb writes 1e23 as an integer of 24 digits."""
    return json.loads(text, parse_int=Decimal, parse_float=Decimal)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(anything)
def test_what_the_encoder_accepts_is_stored_and_read_back_equal(
    jsonb: psycopg.Connection, value: object
) -> None:
    try:
        accepted = encode_json(value)
    except ValueError:
        return
    stored = jsonb.execute("SELECT (%s::jsonb)::text", (accepted,)).fetchone()
    assert stored is not None
    assert exactly(stored[0]) == exactly(accepted)


@pytest.mark.parametrize(
    "value",
    ["\\u0000", "\x01\x1f\x7f\x80", "\ufffe\uffff\U0010ffff", "  ", '"\\', 5e-324, 1.7e308, 10**4000, -0.0],
    ids=ascii,
)
def test_the_strangest_values_are_stored(jsonb: psycopg.Connection, value: object) -> None:
    stored = jsonb.execute("SELECT (%s::jsonb)::text", (encode_json({"a": [value]}),)).fetchone()
    assert stored is not None
    assert exactly(stored[0]) == exactly(json.dumps({"a": [value]}))


def test_a_large_float_comes_back_as_the_whole_number_that_jsonb_writes(jsonb: psycopg.Connection) -> None:
    stored = jsonb.execute("SELECT (%s::jsonb)::text", (encode_json(1e23),)).fetchone()
    assert stored == ("1" + "0" * 23,)


def test_the_deepest_payload_is_stored(jsonb: psycopg.Connection) -> None:
    text = "[" * 500 + "]" * 500
    assert encode_json(json.loads(text)) == text
    assert jsonb.execute("SELECT (%s::jsonb)::text", (text,)).fetchone() == (text,)


@dataclass
class Order:
    id: UUID
    total: Decimal
    paid_at: datetime


async def test_every_type_goes_through_emit_and_out_again(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher, driver: str
) -> None:
    order_id, paid_at = UUID(int=7), datetime(2026, 3, 1, tzinfo=UTC)
    order = Order(order_id, Decimal("99.90"), paid_at)
    async with sessions.begin() as session:
        await outbox.emit(session, "t", order)
        await outbox.emit(session, "t", {"of": (order_id, [order.total], paid_at.date(), None, True, 1.5)})
        await outbox.emit_many(session, [NewEvent("t", order), NewEvent("t", "plain text")])
    plain = {"id": str(order_id), "total": "99.90", "paid_at": "2026-03-01T00:00:00+00:00"}
    assert payloads(await outbox.relay_once(sessions, publish)) == [
        plain,
        {"of": [str(order_id), ["99.90"], "2026-03-01", None, True, 1.5]},
        plain,
        "plain text",
    ]


async def test_five_megabytes_go_through(
    outbox: Outbox, sessions: Sessions, publish: RecordingPublisher, driver: str
) -> None:
    large = {"lines": [f"{n:x}" * 50 for n in range(10**9, 10**9 + 12_500)]}
    assert len(json.dumps(large)) > 5_000_000
    async with sessions.begin() as session:
        await outbox.emit(session, "t", large)
        await outbox.emit_many(session, [NewEvent("t", "small"), NewEvent("t", large, dedup_key="d")])
        await outbox.emit(session, "t", large, dedup_key="d")
    assert payloads(await outbox.relay_once(sessions, publish)) == [large, "small", large]


SERIALIZERS: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda value: json.dumps(value).encode(),
    "indented": lambda value: json.dumps(value, indent=2),
    "lossy": lambda value: json.dumps(value, default=str).replace("1", "2"),
    "broken": lambda value: 1 / 0,
}


@pytest.mark.parametrize("serializer", SERIALIZERS)
async def test_the_engines_own_serializer_has_no_say(
    outbox: Outbox,
    engines: Callable[..., AsyncEngine],
    engine: AsyncEngine,
    publish: RecordingPublisher,
    serializer: str,
    driver: str,
) -> None:
    odd = engines(json_serializer=SERIALIZERS[serializer], json_deserializer=SERIALIZERS["broken"])
    sessions = async_sessionmaker(odd)
    payload = {"n": 1, "at": datetime(2026, 1, 1, tzinfo=UTC), "text": "é\n"}
    async with sessions.begin() as session:
        first = await outbox.emit(session, "t", payload, headers={"a": "1"})
        await outbox.emit_many(session, [NewEvent("t", payload, headers={"a": "1"}, dedup_key="1")])
    asked = "SELECT DISTINCT payload::text, headers::text FROM outbox"
    assert await rows(engine, asked) == [
        ('{"n": 1, "at": "2026-01-01T00:00:00+00:00", "text": "é\\n"}', '{"a": "1"}')
    ]
    events = await outbox.relay_once(sessions, publish)
    assert [event.payload["n"] for event in events] == [1, 1]
    assert events[0].id == first


CORRUPT = [
    "1e100000",  # more digits than Python reads
    "[" * 1_000 + "]" * 1_000,  # deeper than Python reads
    '"text where an object was"',
    "null",
    '{"version": 99}',
]


async def test_rows_that_somebody_has_spoilt_do_not_stop_their_neighbours(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher
) -> None:
    for number, payload in enumerate(CORRUPT):
        await emit(outbox, sessions, f"good {number}")
        [spoilt] = await emit(outbox, sessions, "spoilt")
        await execute(
            engine,
            "UPDATE outbox SET payload = CAST(:payload AS jsonb), headers = CAST('[1]' AS jsonb)"
            " WHERE id = :id",
            payload=payload,
            id=spoilt,
        )
    events = await outbox.relay_once(sessions, publish)
    assert len(events) == 2 * len(CORRUPT)
    assert [event.payload for event in events[::2]] == [f"good {number}" for number in range(len(CORRUPT))]
    with pytest.raises((ValueError, RecursionError)):
        events[1].payload  # noqa: B018  whoever reads it is told
    assert events[1].payload_json.startswith("10000000")
    assert await rows(engine, "SELECT count(*) FROM outbox WHERE published_at IS NULL") == [(0,)]


async def test_a_payload_is_not_text_that_sql_could_read(
    outbox: Outbox, engine: AsyncEngine, sessions: Sessions, publish: RecordingPublisher, driver: str
) -> None:
    sly = "'); DROP TABLE outbox; -- :topic %s %(id)s {outbox} \\"
    async with sessions.begin() as session:
        await outbox.emit(session, sly, {sly: sly}, key=sly, headers={sly: sly}, dedup_key=sly)
        await session.execute(text("SELECT 1"))
    [event] = await outbox.relay_once(sessions, publish)
    assert (event.topic, event.payload, event.key, event.headers) == (sly, {sly: sly}, sly, {sly: sly})
