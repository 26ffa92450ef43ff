"""Events as values: equal, hashed, copied, read late."""

from __future__ import annotations

import copy
import json
import pickle
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from oncely.event import Event, uuid7

AN_ID = UUID("018f2b1c-0000-7000-8000-000000000001")
NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def read(**changes: Any) -> Event:
    """An event as a relay reads it."""
    facts: dict[str, Any] = {
        "id": AN_ID,
        "topic": "order.created",
        "payload_json": '{"n": 1}',
        "headers_json": '{"trace": "t"}',
        "key": "c-1",
        "created_at": NOON,
        "attempt": 2,
    }
    return Event.from_json(**facts | changes)


def made(**changes: Any) -> Event:
    """The same event, as a test of an application would make it."""
    facts: dict[str, Any] = {
        "id": AN_ID,
        "topic": "order.created",
        "payload": {"n": 1},
        "headers": {"trace": "t"},
        "key": "c-1",
        "created_at": NOON,
        "attempt": 2,
    }
    return Event(**facts | changes)


def test_a_read_event_equals_a_made_one() -> None:
    assert read() == made()
    assert made() == read()
    assert hash(read()) == hash(made())


@pytest.mark.parametrize(
    "changes",
    [
        {"id": UUID(int=1)},
        {"topic": "order.paid"},
        {"payload": {"n": 2}},
        {"payload": None},
        {"headers": None},
        {"headers": {}},
        {"key": None},
        {"created_at": None},
        {"attempt": 1},
    ],
    ids=str,
)
def test_events_that_differ_in_one_thing_are_not_equal(changes: dict[str, Any]) -> None:
    assert made(**changes) != read()


def test_an_event_equals_nothing_else() -> None:
    assert read() != AN_ID
    assert (read() == "order.created") is False


def test_payload_and_headers_are_decoded_once_and_when_read() -> None:
    event = read()
    assert event.payload == {"n": 1}
    assert event.payload is event.payload
    assert event.headers == {"trace": "t"}
    assert event.headers is event.headers


def test_the_stored_text_is_passed_on_as_it_is() -> None:
    event = read()
    event.payload["n"] = 2  # somebody's own copy
    assert event.payload_json == '{"n": 1}'
    assert event.headers_json == '{"trace": "t"}'


def test_a_made_event_has_its_text_too() -> None:
    event = made(payload={"price": Decimal("1.10")}, headers=None)
    assert event.payload_json == '{"price":"1.10"}'
    assert event.headers_json is None
    assert made(headers={}).headers_json == "{}"


def test_a_text_that_is_no_json_raises_when_it_is_read_and_not_before() -> None:
    event = read(payload_json="{")
    assert event.payload_json == "{"
    with pytest.raises(ValueError):
        event.payload  # noqa: B018  a property


def test_without_headers_there_is_no_text_of_them() -> None:
    event = read(headers_json=None)
    assert event.headers is None
    assert event.headers_json is None


def test_its_repr_has_no_payload() -> None:
    assert repr(read()) == f"Event(id={AN_ID}, topic='order.created', key='c-1', attempt=2)" == repr(made())


@pytest.mark.parametrize("make", [read, made])
@pytest.mark.parametrize("was_read", [False, True])
@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, *(lambda e, p=p: pickle.loads(pickle.dumps(e, p)) for p in range(2, 6))],
    ids=["copy", "deepcopy", "pickle 2", "pickle 3", "pickle 4", "pickle 5"],
)
def test_a_copy_equals_the_event_and_has_its_text(make: Any, was_read: bool, again: Any) -> None:
    event = make()
    if was_read:
        assert event.payload == {"n": 1}
        assert event.headers == {"trace": "t"}
    other = again(event)
    assert other == event
    assert other.payload == {"n": 1}
    assert other.headers == {"trace": "t"}
    assert json.loads(other.payload_json) == {"n": 1}


def test_ids_are_version_7_and_grow_within_a_process() -> None:
    ids = [uuid7() for _ in range(1_000)]
    assert {made.version for made in ids} == {7}
    assert ids == sorted(set(ids))
