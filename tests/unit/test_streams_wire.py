"""The wire's format without a wire: what is written, what is read, and what is refused."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as some

from oncely.event import Event, uuid7
from oncely.streams.faults import code_word
from oncely.streams.letter import compose, parse
from oncely.streams.wire import NotAnEvent, decode, encode, entries_in, key_of

TEXT = some.text(some.characters(exclude_categories=["Cs"], exclude_characters="\0"))
JSON: Any = some.recursive(
    some.none()
    | some.booleans()
    | some.integers(-(2**53), 2**53)
    | some.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: some.lists(inner) | some.dictionaries(TEXT, inner),
    max_leaves=10,
)
EVENT = Event(UUID(int=7), "order.paid", {"n": 1})


@given(
    id=some.uuids(),
    topic=TEXT,
    payload=JSON,
    headers=some.none() | some.dictionaries(TEXT, TEXT),
    key=some.none() | TEXT,
    created_at=some.none() | some.datetimes(timezones=some.just(UTC)),
)
def test_an_event_comes_back_as_it_was(**facts: Any) -> None:
    event = Event(**facts)
    back = decode(encode(event), 1, b"workers")
    assert back == event
    assert back is not None
    assert back.payload_json == event.payload_json
    assert key_of(encode(event)) == (None if event.key is None else event.key.encode())


def test_the_payloads_text_is_passed_on_untouched() -> None:
    text = ' {"b": 1.50,\n "a": [] } '
    event = Event.from_json(uuid7(), "t", text)
    back = decode(encode(event), 3, b"")
    assert back is not None
    assert back.payload_json == text
    assert back.payload == {"b": 1.5, "a": []}
    assert back.attempt == 3


def test_an_id_is_a_uuid_like_any_other() -> None:
    event = decode(encode(EVENT), 1, b"")
    assert event is not None
    assert (event.id, hash(event.id), str(event.id), repr(event.id)) == (
        EVENT.id,
        hash(EVENT.id),
        str(EVENT.id),
        repr(EVENT.id),
    )
    assert event.id.is_safe == EVENT.id.is_safe
    assert pickle.loads(pickle.dumps(event.id)) == EVENT.id
    assert (event.id.version, event.id.bytes) == (EVENT.id.version, EVENT.id.bytes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", None),
        ("id", b""),
        ("id", b"seven"),
        ("id", b"00000000-0000-0000-0000-00000000000"),
        ("id", b"00000000-0000-0000-0000-0000000000070"),
        ("id", b"0x000000-0000-0000-0000-000000000007"),
        ("id", b"+0000000-0000-0000-0000-000000000007"),
        ("id", b"0000_000-0000-0000-0000-000000000007"),
        ("id", "००००००००-0000-0000-0000-000000000007".encode()),
        ("topic", None),
        ("topic", b"\xff"),
        ("payload", None),
        ("payload", b""),
        ("payload", b"{"),
        ("payload", b"1 2"),
        ("payload", b'"\xff"'),
        ("payload", b"[" * 100_000),
        ("payload", b"9" * 5000),
        ("payload", b"NaN"),
        ("payload", b'[1, {"total": -Infinity}]'),
        ("payload", b' {"total": Infinity} '),
        ("headers", b"[]"),
        ("headers", b'{"a": 1}'),
        ("headers", b'{"a": NaN}'),
        ("headers", b"{"),
        ("headers", b"null"),
        ("key", b"\xff"),
        ("created_at", b"yesterday"),
        ("created_at", b"2026-01-02T03:04:05"),
    ],
)
def test_what_is_no_event_is_refused(name: str, value: bytes | None) -> None:
    fields = dict(zip(encode(EVENT)[::2], encode(EVENT)[1::2], strict=True))
    if value is None:
        del fields[name.encode()]
    else:
        fields[name.encode()] = value
    with pytest.raises(NotAnEvent):
        decode([word for pair in fields.items() for word in pair], 1, b"")


def test_unknown_fields_are_ignored() -> None:
    assert decode([b"x", b"y", *encode(EVENT), b"\xff", b"\xfe"], 1, b"") == EVENT


def test_an_entry_for_another_group_is_nobodys_here() -> None:
    fields = [*encode(EVENT), b"group", b"mailer"]
    assert decode(fields, 1, b"mailer") == EVENT
    assert decode(fields, 1, b"others") is None


def test_a_key_is_found_among_values_that_look_like_its_name() -> None:
    assert key_of([b"topic", b"key", b"payload", b"key", b"key", b"k"]) == b"k"
    assert key_of([b"topic", b"key"]) is None
    assert key_of([b"topic", b"key", b"x", b"y"]) is None
    assert key_of([]) is None


@pytest.mark.parametrize(
    "reply",
    [
        [[b"s", [[b"1-1", [b"a", b"b"]], [b"1-2", None]]]],
        {b"s": [[b"1-1", [b"a", b"b"]], [b"1-2", None]]},
        [[b"s", [(b"1-1", {b"a": b"b"}), (b"1-2", None)]]],
        {b"s": [(b"1-1", {b"a": b"b"}), (b"1-2", None)]},
        {b"s": [[(b"1-1", {b"a": b"b"}), (b"1-2", None)]]},
    ],
)
def test_every_shape_of_a_reply_gives_the_same_entries(reply: Any) -> None:
    assert [(entry_id, fields) for entry_id, fields in entries_in(reply)] == [
        (b"1-1", [b"a", b"b"]),
        (b"1-2", None),
    ]


@pytest.mark.parametrize("reply", [None, [], {}, [[b"s", []]], {b"s": []}, {b"s": [[]]}])
def test_an_empty_reply_gives_none(reply: Any) -> None:
    assert entries_in(reply) == []


def test_a_dead_letter_keeps_the_entrys_fields_apart_from_its_own() -> None:
    fields = [*encode(EVENT), b"error", b"mine", b"error", b"again", b"group", b"g"]
    letter = parse(
        [*compose(fields, ValueError("no\ud800"), attempts=3, group="g", entry=b"1-1"), b"dead_at", b"5"]
    )
    assert letter is not None
    assert letter._asdict() == {
        "fields": fields,
        "error": "ValueError: no?",
        "attempts": "3",
        "group": "g",
        "entry": "1-1",
        "dead_at": "5",
    }


def test_a_dead_letter_says_what_it_could_not_keep() -> None:
    fields = [b"x"] * 5000
    letter = parse(
        [*compose(fields, ValueError("e" * 9000), attempts=1, group="g", entry=b"1-1"), b"dead_at", b"5"]
    )
    assert letter is not None
    assert len(letter.fields) == 4000
    assert letter.error.startswith("ValueError: eee")
    assert letter.error.endswith(" (500 more fields were not kept)")
    assert len(letter.error) < 2100


def test_an_entry_of_somebody_else_is_no_dead_letter() -> None:
    assert parse(encode(EVENT)) is None
    assert parse([]) is None


def test_the_code_word_stands_first_or_behind_the_place_in_a_script() -> None:
    assert code_word("NOGROUP No such key") == "NOGROUP"
    assert code_word("NOREPLICAS Not enough. script: f_1a, on @user_script:25.") == "NOREPLICAS"
    assert code_word("@user_script: 10: -OOM command not allowed when used") == "OOM"
    assert code_word(
        "Error running script (call to f_1a): @user_script:4: @user_script: 4: -READONLY You"
    ) == ("READONLY")
    assert code_word("Error running script (call to f_1a): @user_script:4: NOGROUP No such key") == "NOGROUP"
    assert code_word("Error running script (call to f_1a): @user_script:4: wrong type of argument") == "ERR"
    assert code_word("wrong number of arguments") == "ERR"
    assert code_word("") == "ERR"


def test_times_keep_their_microseconds() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC) + timedelta(0)
    back = decode(encode(Event(uuid7(), "t", None, created_at=moment)), 1, b"")
    assert back is not None
    assert back.created_at == moment
