"""What an endpoint's answer means."""

from __future__ import annotations

import socket
from datetime import timedelta

import httpx
import pytest

from oncely.webhooks.outcome import describe, judge, retry_after

WEEK = timedelta(days=7)


def test_every_status_has_a_meaning() -> None:
    meanings = {status: judge(status) for status in range(200, 1000)}
    assert {status for status, meaning in meanings.items() if meaning == "delivered"} == set(range(200, 300))
    assert {status for status, meaning in meanings.items() if meaning == "retry"} == {
        408,
        425,
        429,
        *range(500, 600),
    }
    assert meanings[301] == meanings[302] == meanings[307] == meanings[410] == meanings[404] == "rejected"


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("0", timedelta(0)),
        ("120", timedelta(minutes=2)),
        (" 5 ", timedelta(seconds=5)),
        ("604800", WEEK),
        ("99999999", WEEK),
        ("9" * 400, WEEK),
        ("0" * 20 + "5", timedelta(seconds=5)),
        ("", None),
        ("-1", None),
        ("1.5", None),
        ("soon", None),
        ("٣", None),
        ("Wed, 21 Oct 2026 07:30:00 GMT", timedelta(minutes=2)),
        ("Wednesday, 21-Oct-26 07:30:00 GMT", timedelta(minutes=2)),
        ("Wed Oct 21 07:30:00 2026", timedelta(minutes=2)),
        ("Wed, 21 Oct 2026 07:28:00 GMT", None),
        ("Wed, 21 Oct 2020 07:28:00 GMT", None),
        ("Wed, 21 Oct 2099 07:28:00 GMT", WEEK),
        ("Wed, 99 Oct 2026 07:28:00 GMT", None),
        ("Wed, 21 Oct 2026 07:28:00 +99999999999999999", None),
        ("Wed, 21 Oct 2026 07:28:099999999999 GMT", None),
    ],
)
def test_retry_after_in_seconds_or_as_a_date_by_the_answers_own_clock(
    value: str, wanted: timedelta | None
) -> None:
    headers = httpx.Headers({b"retry-after": value.encode(), b"date": b"Wed, 21 Oct 2026 07:28:00 GMT"})
    assert retry_after(headers) == wanted


def test_a_date_out_of_all_bounds_is_no_date() -> None:
    date = "Wed, 21 Oct 2026 07:28:00 +99999999999999999"
    headers = httpx.Headers({"retry-after": "Wed, 21 Oct 2099 07:28:00 GMT", "date": date})
    assert retry_after(headers) == WEEK


def test_without_a_date_of_its_own_this_machines_clock_counts() -> None:
    assert retry_after(httpx.Headers({"retry-after": "Wed, 21 Oct 2020 07:28:00 GMT"})) is None
    assert retry_after(httpx.Headers({"retry-after": "Wed, 21 Oct 2099 07:28:00 GMT", "date": "x"})) == WEEK
    assert retry_after(httpx.Headers()) is None


def test_an_error_is_named_by_its_class_or_by_what_caused_it() -> None:
    assert describe(ValueError("https://a.example/SECRET")) == "ValueError"
    assert describe(httpx.ReadTimeout("SECRET")) == "ReadTimeout"
    error = httpx.ConnectError("no connection")
    error.__cause__ = socket.gaierror("SECRET")
    assert describe(error) == "gaierror"
