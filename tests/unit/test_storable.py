"""The JSON that payloads, headers and results are written in, and the text that keys may be."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass

from oncely.errors import InvalidKey
from oncely.storable import DEEPEST, LONGEST_KEY, check_key, decode_json, encode_json

AN_ID = UUID("018f2b1c-0000-7000-8000-000000000001")
NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


class Plain(Enum):
    RED = "red"
    BOTH = ("red", "blue")
    NESTED = {"at": NOON}  # noqa: RUF012  what an Enum's value may be


class Word(StrEnum):
    PAID = "paid"


class OldWord(str, Enum):  # noqa: UP042  StrEnum's older form
    PAID = "paid"


class Number(IntEnum):
    TWO = 2


class Share(float, Enum):
    HALF = 0.5


@dataclass
class Line:
    sku: str
    price: Decimal
    parts: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Slotted:
    word: Word


@pydantic_dataclass
class Checked:
    count: int


class Customer(BaseModel):
    id: UUID
    since: datetime


class Order(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    customer: Customer
    lines: list[Line]
    state: Word = Word.PAID


class Point(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (None, None),
        (True, True),
        (0, 0),
        (-1.5, -1.5),
        (10**4000, 10**4000),
        ("", ""),
        ("é \U0001f600 \x01 \x7f \u2028", "é \U0001f600 \x01 \x7f \u2028"),
        ([], []),
        ({}, {}),
        ((1, (2, ())), [1, [2, []]]),
        (Point(1, 2), [1, 2]),
        (NOON, "2026-03-01T12:00:00+00:00"),
        (
            datetime(2026, 3, 1, 12, 0, 0, 5, tzinfo=timezone(timedelta(hours=-3, minutes=-30))),
            "2026-03-01T12:00:00.000005-03:30",
        ),
        (date(2026, 3, 1), "2026-03-01"),
        (AN_ID, str(AN_ID)),
        (Decimal("99.90"), "99.90"),
        (Decimal("1E+3"), "1E+3"),
        (Decimal("-0"), "-0"),
        (Plain.RED, "red"),
        (Plain.BOTH, ["red", "blue"]),
        (Plain.NESTED, {"at": "2026-03-01T12:00:00+00:00"}),
        (Word.PAID, "paid"),
        (OldWord.PAID, "paid"),
        (Number.TWO, 2),
        (Share.HALF, 0.5),
        ({Word.PAID: OldWord.PAID, OldWord.PAID.name: Number.TWO}, {"paid": "paid", "PAID": 2}),
        (Line("a", Decimal("1.0"), [Line("b", Decimal(2))]), None),
        (Slotted(Word.PAID), {"word": "paid"}),
        (Checked(count=3), {"count": 3}),
        ([{"of": [AN_ID, {"the": NOON}]}], [{"of": [str(AN_ID), {"the": NOON.isoformat()}]}]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_accepted_type_has_one_form(value: object, stored: object) -> None:
    if isinstance(value, Line):
        stored = {"sku": "a", "price": "1.0", "parts": [{"sku": "b", "price": "2", "parts": []}]}
    assert decode_json(encode_json(value)) == stored


def test_pydantic_models_are_their_fields_at_any_depth() -> None:
    order = Order(customer=Customer(id=AN_ID, since=NOON), lines=[Line("a", Decimal("1.10"))])
    assert decode_json(encode_json({"order": [order]})) == {
        "order": [
            {
                "customer": {"id": str(AN_ID), "since": "2026-03-01T12:00:00+00:00"},
                "lines": [{"sku": "a", "price": "1.10", "parts": []}],
                "state": "paid",
            }
        ]
    }


def test_names_of_objects_become_strings_as_json_has_no_others() -> None:
    assert decode_json(encode_json({1: "a", 1.5: "b", False: "c", None: "d"})) == {
        "1": "a",
        "1.5": "b",
        "false": "c",
        "null": "d",
    }


def test_text_is_compact_and_not_escaped() -> None:
    assert encode_json({"a": [1, "é"]}) == '{"a":[1,"é"]}'


@pytest.mark.parametrize("text", ["\\u0000", 'a "\\u0000" b', "\\\\u0000"])
def test_a_backslash_before_u0000_is_no_nul(text: str) -> None:
    assert decode_json(encode_json({text: [text]})) == {text: [text]}


def test_a_cycle_of_shared_values_is_none() -> None:
    shared = [1]
    text = "\\u0000"  # has the value walked
    assert decode_json(encode_json([shared, shared, {"a": shared}, text])) == [[1], [1], {"a": [1]}, text]


BAD_VALUES: list[tuple[object, str]] = [
    (b"x", "a value of type bytes is not JSON"),
    (bytearray(b"x"), "a value of type bytearray is not JSON"),
    (float("nan"), "nan is not JSON"),
    (float("inf"), "inf is not JSON"),
    (float("-inf"), "-inf is not JSON"),
    (Decimal("NaN"), "Decimal NaN is not JSON"),
    (Decimal("sNaN"), "Decimal sNaN is not JSON"),
    (Decimal("-Infinity"), "Decimal -Infinity is not JSON"),
    ("a\0b", "a NUL character cannot be stored"),
    ("a\ud800b", "an unpaired surrogate cannot be stored"),
    ("\ud83d\ude00", "an unpaired surrogate cannot be stored"),
    (datetime(2026, 3, 1), "a datetime without a time zone is not JSON"),  # noqa: DTZ001  the point
    ({1, 2}, "a value of type set is not JSON"),
    (frozenset(), "a value of type frozenset is not JSON"),
    (timedelta(1), "a value of type timedelta is not JSON"),
    (1j, "a value of type complex is not JSON"),
    (object, "a value of type type is not JSON"),
    (Line, "a value of type type is not JSON"),
    (Order, "a value of type ModelMetaclass is not JSON"),
    (10**5000, "an integer with too many digits"),
    (Customer.model_construct(since=NOON.replace(tzinfo=None)), "['since']: a datetime without"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    ("around", "place"),
    [
        (lambda bad: bad, "payload"),
        (lambda bad: [1, "x", bad], "payload[2]"),
        (lambda bad: (0, [bad]), "payload[1][0]"),
        (lambda bad: {"a": 1, "b": {"c d": bad}}, "payload['b']['c d']"),
        (lambda bad: Line("a", Decimal(1), [0, bad]), "payload['parts'][1]"),
        (lambda bad: {"deep": [Line("a", Decimal(1), [{"x": bad}])]}, "payload['deep'][0]['parts'][0]['x']"),
        (
            lambda bad: Order.model_construct(lines=[Line("a", Decimal(1), [bad])]),
            "payload['lines'][0]['parts'][0]",
        ),
    ],
    ids=["bare", "list", "tuple", "dict", "dataclass", "mixed", "pydantic"],
)
def test_a_refusal_names_the_place_and_the_reason(bad: object, reason: str, around: Any, place: str) -> None:
    with pytest.raises(ValueError) as raised:
        encode_json(around(bad))
    assert str(raised.value).startswith(place + ("" if reason.startswith("[") else ": ") + reason)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a\0", "payload['x'] key 'a\\x00': a NUL character cannot be stored"),
        ("\ud800", "payload['x'] key '\\ud800': an unpaired surrogate cannot be stored"),
        (float("nan"), "payload['x'] key nan: nan is not JSON"),
        ((1, 2), "payload['x']: a key of type tuple; keys are strings"),
        (AN_ID, "payload['x']: a key of type UUID; keys are strings"),
        (b"a", "payload['x']: a key of type bytes; keys are strings"),
        (Plain.RED, "payload['x']: a key of type Plain; keys are strings"),
        (10**5000, "a key of payload['x']: an integer with too many digits"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_refused_name_of_an_object_is_shown(name: object, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        encode_json({"x": {name: 1}})
    assert str(raised.value) == message


def test_the_caller_names_the_value_in_the_message() -> None:
    with pytest.raises(ValueError, match=r"^result\['a'\]: a value of type bytes is not JSON$"):
        encode_json({"a": b""}, what="result")


def a_list_in_itself() -> list[object]:
    value: list[object] = [1]
    value.append({"again": value})
    return value


def a_dataclass_in_itself() -> Line:
    line = Line("a", Decimal(1))
    line.parts.append(line)
    return line


class Folder(BaseModel):
    inside: list[Any]


def a_model_in_itself() -> Folder:
    folder = Folder(inside=[])
    folder.inside.append(folder)
    return folder


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (a_list_in_itself(), "payload[1]['again']: the value contains itself"),
        (a_dataclass_in_itself(), "payload['parts'][0]: the value contains itself"),
    ],
    ids=["list", "dataclass"],
)
def test_a_cycle_is_refused_with_its_place(value: object, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        encode_json(value)
    assert str(raised.value) == message


def test_a_cycle_of_pydantic_models_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^payload\[.inside.\].*: the value contains itself$"):
        encode_json(a_model_in_itself())


def nested(levels: int, innermost: object = 1) -> object:
    value = innermost
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize("innermost", [1, "\\u0000", "[[{{" * 500, '\\"[' * 500])
def test_the_deepest_payload_is_accepted_whatever_is_in_it(innermost: object) -> None:
    assert decode_json(encode_json(nested(DEEPEST, innermost))) == nested(DEEPEST, innermost)


@pytest.mark.parametrize("levels", [DEEPEST + 1, 10_000])
def test_a_deeper_payload_is_refused_with_its_place(levels: int) -> None:
    with pytest.raises(ValueError) as raised:
        encode_json(nested(levels))
    path, reason = str(raised.value).split(": ")
    assert reason == "nested too deeply"
    assert path.count("[") == DEEPEST


def test_many_values_side_by_side_are_not_deep() -> None:
    wide = [{"lines": [[], {"a": "]["}]}] * 2_000
    assert decode_json(encode_json(wide)) == wide


if sys.version_info < (3, 12):  # the encoder has a stack of its own there

    def test_a_stack_that_is_nearly_used_up_is_a_refusal_too() -> None:
        def call(more: int) -> str:
            return call(more - 1) if more else encode_json(nested(DEEPEST))

        def call_from_ever_deeper() -> None:
            for frames in range(100, sys.getrecursionlimit(), 20):
                call(frames)

        with pytest.raises(ValueError, match=r"^payload: nested too deeply$"):
            call_from_ever_deeper()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters()), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_it_writes_what_json_dumps_writes_or_refuses(value: object) -> None:
    try:
        text = encode_json(value)
    except ValueError:
        expected = json.dumps(value, ensure_ascii=False)
        assert any(word in expected for word in ("NaN", "Infinity", "\\u0000")) or not _has_utf8(expected)
    else:
        assert json.loads(text) == value
        assert json.loads(json.dumps(value)) == json.loads(text)


def _has_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


@pytest.mark.parametrize(
    "value", ["", "x", " ", "é" * (LONGEST_KEY // 2), "x" * LONGEST_KEY, Word.PAID, OldWord.PAID]
)
def test_a_key_of_up_to_1000_bytes_is_accepted(value: str) -> None:
    check_key(value, "key")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x" * 1_001, "key has 1,001 bytes; at most 1,000 are stored"),
        ("é" * 501, "key has 1,002 bytes; at most 1,000 are stored"),
        ("\U0001f600" * 251, "key has 1,004 bytes; at most 1,000 are stored"),
        ("a\0", "key: a NUL character cannot be stored"),
        ("\udc80", "key: an unpaired surrogate cannot be stored"),
        (7, "key must be a str, not int"),
        (b"x", "key must be a str, not bytes"),
        (None, "key must be a str, not NoneType"),
    ],
)
def test_a_key_that_cannot_be_stored_is_refused(value: object, message: str) -> None:
    with pytest.raises(InvalidKey) as raised:
        check_key(value, "key")
    assert str(raised.value) == message
