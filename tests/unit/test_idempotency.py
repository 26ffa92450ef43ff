"""Keys without a database: what is a key, what is an answer, what may be tried again."""

from __future__ import annotations

import http
import pickle
from collections.abc import Iterator
from datetime import timedelta

import asyncpg
import psycopg.errors
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import MetaData
from sqlalchemy.exc import DBAPIError, OperationalError

from oncely import Answer, IdempotencyKeys, Outcome, fingerprint, is_retryable, is_valid_key
from oncely.answer import read_answer
from oncely.claim import check_ttl
from oncely.errors import TableNameTaken


@pytest.mark.parametrize(
    "key", ["12345678", "x" * 255, "!~#$%&'*+-.^_`|", "9f8b7c6d-0000-4000-8000-000000000000"]
)
def test_a_client_may_send_8_to_255_printable_ascii_characters(key: str) -> None:
    assert is_valid_key(key)


NOT_SENT = ["", "1234567", "x" * 256, "with space", "12345678\n", "\n12345678", "tab\t5678", "ключ-12345"]
NOT_SENT += ["nul\x005678", "delete\x7f8", "12345678\u2028", "\ud80012345678"]


@pytest.mark.parametrize("key", [*NOT_SENT, None, 12345678, b"12345678"])
def test_a_client_may_not_send_anything_else(key: object) -> None:
    assert not is_valid_key(key)


def test_a_fingerprint_is_32_bytes_and_the_same_for_text_and_its_utf_8() -> None:
    assert len(fingerprint("POST", "/orders")) == 32
    assert fingerprint("POST", "naïve") == fingerprint(b"POST", "naïve".encode())


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_fingerprints_are_equal_only_for_equal_parts(one: list[str], other: list[str]) -> None:
    assert (fingerprint(*one) == fingerprint(*other)) == (one == other)


def test_parts_do_not_run_together() -> None:
    distinct = {fingerprint("ab", "c"), fingerprint("a", "bc"), fingerprint("abc"), fingerprint("", "abc"),
                fingerprint("abc", ""), fingerprint(), fingerprint("")}  # fmt: skip
    assert len(distinct) == 7


def test_a_part_of_a_fingerprint_is_text_or_bytes() -> None:
    with pytest.raises(TypeError, match=r"^fingerprint takes str and bytes; part 1 is int$"):
        fingerprint("order", 7)  # type: ignore[arg-type]  # that is the mistake


def test_a_fingerprint_takes_text_that_has_no_utf_8() -> None:
    assert fingerprint("\ud800") != fingerprint("\ud801")


def test_an_outcome_hashes_also_with_headers() -> None:
    one = Outcome(201, b"made", False, [("Link", "a"), ("Link", "b")])
    assert one == Outcome(201, b"made", False, (("Link", "a"), ("Link", "b")))
    assert hash(one) == hash(Outcome(201, b"made", False, (("Link", "a"), ("Link", "b"))))
    assert one != Outcome(201, b"made", True, one.headers)
    assert pickle.loads(pickle.dumps(one)) == one


def test_an_outcome_takes_its_fields_in_order() -> None:
    assert Outcome(204, None, True) == Outcome(status=204, body=None, replayed=True, headers=())


def pairs() -> Iterator[tuple[str, str]]:
    yield "Location", "/orders/1"
    yield "Link", "</orders>; rel=up"


@pytest.mark.parametrize(
    "headers", [dict(pairs()), list(pairs()), tuple(pairs()), pairs(), [list(p) for p in pairs()]]
)
def test_headers_are_kept_as_a_tuple_of_pairs(headers: list[tuple[str, str]]) -> None:
    assert Answer(201, None, headers).headers == (("Location", "/orders/1"), ("Link", "</orders>; rel=up"))


def test_a_status_may_be_an_enum_and_is_kept_as_an_int() -> None:
    status = Answer(http.HTTPStatus.CREATED, None).status
    assert (status, type(status)) == (201, int)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("201", "made"), "status must be an int, not str"),
        ((True, "made"), "status must be an int, not bool"),
        ((None, "made"), "status must be an int, not NoneType"),
        ((201, {"id": 1}), "body must be str, bytes or None, not dict; encode it first"),
        ((201, bytearray(b"made")), "body must be str, bytes or None, not bytearray; encode it first"),
        ((201, 0), "body must be str, bytes or None, not int; encode it first"),
        ((201, None, [("Link", 1)]), r"headers must be pairs of str, not \('Link', 1\)"),
        ((201, None, ["Link"]), r"headers must be pairs of str, not \('L', 'i', 'n', 'k'\)"),
    ],
)
def test_an_answer_of_another_type_is_a_type_error_that_says_so(
    arguments: tuple[int, str], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        Answer(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2**31, None), "status 2147483648 is not a 32-bit integer"),
        ((200, "a\x00b"), "body: text with a NUL character cannot be stored; pass bytes"),
        ((200, "a\ud800b"), "body: text with an unpaired surrogate cannot be stored; pass bytes"),
        ((200, None, {"Link": "a\x00b"}), "headers.*NUL"),
        ((200, None, {"Link": "a\ud800b"}), "headers.*surrogate"),
    ],
)
def test_an_answer_that_a_row_cannot_hold_is_a_value_error_that_says_so(
    arguments: tuple[int, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Answer(*arguments)


@pytest.mark.parametrize(
    ("headers", "read"),
    [
        (None, ()),
        ("{}", ()),
        ("[]", ()),
        ('{"Location": "/orders/1", "ETag": "x"}', (("Location", "/orders/1"), ("ETag", "x"))),
        ('[["Link", "a"], ["Link", "b"]]', (("Link", "a"), ("Link", "b"))),
    ],
)
def test_headers_of_version_0_1_0_are_read_as_well(
    headers: str | None, read: tuple[tuple[str, str], ...]
) -> None:
    assert read_answer(201, headers, "made", None) == Outcome(201, "made", True, read)


@pytest.mark.parametrize("ttl", [None, timedelta(microseconds=1), timedelta(days=365_000)])
def test_a_ttl_is_positive(ttl: timedelta | None) -> None:
    check_ttl(ttl)


@pytest.mark.parametrize("ttl", [timedelta(0), timedelta(seconds=-1), timedelta.max])
def test_a_ttl_that_is_none_or_beyond_the_calendar_is_refused(ttl: timedelta) -> None:
    with pytest.raises(ValueError, match="ttl must be above zero and at most 365,000 days"):
        check_ttl(ttl)


BARE = [
    asyncpg.SerializationError("once more"),
    asyncpg.DeadlockDetectedError("once more"),
    psycopg.errors.SerializationFailure("once more"),
    psycopg.errors.DeadlockDetected("once more"),
]
OTHERS = [
    asyncpg.UniqueViolationError("taken"),
    asyncpg.LockNotAvailableError("busy"),
    psycopg.errors.UniqueViolation("taken"),
    psycopg.OperationalError("gone"),
    ValueError("40001"),
]


def wrapped(error: Exception) -> list[BaseException]:
    """The error as callers meet it: bare, inside SQLAlchemy's, and as a cause, once and twice."""
    outer = DBAPIError("SELECT 1", {}, error)
    caused = RuntimeError("could not place the order")
    caused.__cause__ = outer
    twice = LookupError("no order")
    twice.__cause__ = caused
    bare_cause = OperationalError("SELECT 1", {}, Exception("adapter"))
    bare_cause.__cause__ = error
    return [error, outer, caused, twice, bare_cause]


@pytest.mark.parametrize("error", BARE)
def test_serialization_failures_and_deadlocks_are_retryable(error: Exception) -> None:
    assert [is_retryable(form) for form in wrapped(error)] == [True] * 5


@pytest.mark.parametrize("error", OTHERS)
def test_other_errors_are_not(error: Exception) -> None:
    assert [is_retryable(form) for form in wrapped(error)] == [False] * 5


def test_an_error_that_causes_itself_is_looked_at_once() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert not is_retryable(one)


def test_the_same_keys_twice_are_the_same_table() -> None:
    metadata = MetaData()
    assert IdempotencyKeys(metadata).table is IdempotencyKeys(metadata).table
    assert IdempotencyKeys(metadata, "others", schema="tenant").table.fullname == "tenant.others"


def test_a_table_of_that_name_that_is_not_ours_is_refused() -> None:
    from oncely import Outbox

    metadata = MetaData()
    Outbox(metadata, table_name="messages")
    with pytest.raises(TableNameTaken):
        IdempotencyKeys(metadata, "messages")
