"""The soak's ledger finds what is wrong: a soak that could not fail would prove nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oncely import Event
from oncely.outbox import uuid7
from tests.soak.ledger import Balance, Order, Trend

RIGHT = Balance(
    committed=100,
    published=30,
    pruned=68,
    pending=0,
    dead=2,
    claims=0,
    handled=95,
    handled_twice=0,
    refused_by_publisher=2,
    refused_by_handler=3,
    never_handled=0,
    longest_pause=1.0,
    dead_letters=3,
)


def test_a_balance_that_is_right_has_no_mistakes() -> None:
    assert RIGHT.mistakes() == []


@pytest.mark.parametrize(
    ("change", "mistakes"),
    [
        ({"published": 29}, ["committed = published + pruned + pending + dead: 100 ≠ 99"]),
        ({"published": 29, "pending": 1}, ["nothing is pending: 1 ≠ 0"]),
        ({"claims": 1}, ["no claim is left: 1 ≠ 0"]),
        ({"published": 29, "dead": 3}, ["dead is what the publisher refused: 3 ≠ 2"]),
        ({"dead_letters": 2}, ["a dead letter is what a handler refused: 2 ≠ 3"]),
        ({"handled": 94}, ["handled is all that nobody refused: 94 ≠ 95"]),
        ({"handled_twice": 1}, ["nothing was handled twice: 1 ≠ 0"]),
        ({"dead_for": "a reason"}, ["dead, and nobody refused it: a reason"]),
        ({"never_handled": 1}, ["nothing was never handled: 1 ≠ 0"]),
    ],
)
def test_whatever_does_not_add_up_is_a_mistake(change: dict[str, Any], mistakes: list[str]) -> None:
    assert replace(RIGHT, **change).mistakes() == mistakes


def test_an_event_that_arrives_after_a_later_one_of_its_key_is_out_of_order_but_a_repeated_one_is_not() -> (
    None
):
    order = Order()
    for number in (1, 2, 1, 4, 3):
        order._note(Event(uuid7(), "order", {"key": "k", "number": number}, key="k"))
    assert (order.arrived, order.repeated, order.out_of_order) == (5, 1, 1)


def test_a_figure_that_grows_is_a_mistake_and_one_that_goes_up_and_down_is_not() -> None:
    assert Trend("bytes", 10, [50.0, 90.0, 60.0] * 10).mistakes() == []
    assert Trend("bytes", 10, [float(number) for number in range(30)]).mistakes() == []
    assert Trend("bytes", 10, [100.0 * number for number in range(30)]).mistakes() == [
        "bytes grows: 1,900, then 2,900"
    ]
