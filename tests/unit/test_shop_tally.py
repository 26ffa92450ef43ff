"""The demo's numbers: which of them are right, and that every other is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from examples.shop.client import Answer, Customer, from_http, to_http
from examples.shop.tally import Tally, is_contradicted, told_of_orders

RIGHT = Tally(
    customers=30,
    seats=20,
    requests=112,
    cut=36,
    put_off=1,
    answers=75,
    replayed=50,
    accepted=20,
    refused=10,
    contradicted=0,
    keys=30,
    orders=20,
    astray=0,
    events=20,
    published=20,
    handled=20,
    failures=4,
    duplicates=6,
    misprinted=0,
)


def test_right_numbers_have_no_mistakes() -> None:
    assert RIGHT.mistakes() == []
    assert replace(RIGHT, replayed=75, failures=0, duplicates=0).mistakes() == []


@pytest.mark.parametrize(
    "number",
    [
        "customers",
        "seats",
        "requests",
        "cut",
        "put_off",
        "answers",
        "accepted",
        "refused",
        "contradicted",
        "keys",
        "orders",
        "astray",
        "events",
        "published",
        "handled",
        "misprinted",
    ],
)
@pytest.mark.parametrize("change", [1, -1])
def test_a_wrong_number_is_a_mistake(number: str, change: int) -> None:
    assert replace(RIGHT, **{number: getattr(RIGHT, number) + change}).mistakes() != []


def test_a_mistake_says_what_was_found_and_what_is_right() -> None:
    assert replace(RIGHT, handled=19).mistakes() == ["messages handled: 19, not 20"]


def customer(*answers: Answer) -> Customer:
    return Customer("alice", "seat 1", copies=len(answers), answers=list(answers))


FIRST, AGAIN = Answer(201, '{"order": "1"}', replayed=False), Answer(201, '{"order": "1"}', replayed=True)
OTHER, REFUSED = Answer(201, '{"order": "2"}', replayed=True), Answer(409, "{}", replayed=False)


@pytest.mark.parametrize("answers", [(FIRST,), (AGAIN,), (FIRST, AGAIN, AGAIN), (REFUSED,)])
def test_one_answer_however_often_is_no_contradiction(answers: tuple[Answer, ...]) -> None:
    assert not is_contradicted(customer(*answers))


@pytest.mark.parametrize("answers", [(), (FIRST, FIRST), (FIRST, OTHER), (AGAIN, REFUSED)])
def test_two_answers_and_none_are_a_contradiction(answers: tuple[Answer, ...]) -> None:
    assert is_contradicted(customer(*answers))


def test_a_customer_is_told_of_orders_by_acceptances_only() -> None:
    assert told_of_orders(customer(FIRST, AGAIN, OTHER, REFUSED)) == {"1", "2"}


def test_a_request_on_the_wire_names_its_key_and_its_length() -> None:
    head, _, body = to_http(customer(), "the-key").partition(b"\r\n\r\n")
    assert b"\r\nIdempotency-Key: the-key\r\n" in head
    assert f"\r\nContent-Length: {len(body)}\r\n".encode() in head
    assert body == b'{"seat": "seat 1"}'


def test_a_response_is_read_from_the_wire() -> None:
    response = from_http(b"HTTP/1.1 409 Conflict\r\nRetry-After: 1.0\r\nServer: x\r\n\r\n{}\r\n\r\n")
    assert (response.status, response.headers, response.body) == (
        409,
        {"retry-after": "1.0", "server": "x"},
        "{}\r\n\r\n",
    )
