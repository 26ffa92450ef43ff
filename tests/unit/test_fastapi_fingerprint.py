"""What makes two requests the same request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from oncely.fastapi import request_fingerprint

JSON = "application/json"


async def fingerprint(
    body: bytes | str = b"", content_type: str | None = JSON, query: str = "", chunk: int = 1_000_000
) -> bytes:
    data = body.encode() if isinstance(body, str) else body
    chunks = [data[start : start + chunk] for start in range(0, len(data), chunk)] or [b""]

    async def receive() -> Message:
        part = chunks.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(chunks)}

    headers = [] if content_type is None else [(b"content-type", content_type.encode())]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "query_string": query.encode(),
        "headers": headers,
    }
    return await request_fingerprint(Request(scope, receive))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": [1, 2]}', '{"b":[1,2],\n "a":1}'),
        ('{"outer": {"a": 1, "b": 2}}', '{"outer": {"b": 2, "a": 1}}'),
        ('"\\u00fc"', '"ü"'),
        ("[1.50, true, null]", "[1.50,true,null]"),
        ('{"": {"": 1}}', '{ "" : {"":1} }'),
        ('{"amount": 12345678901234567890123}', '{"amount":12345678901234567890123}'),
    ],
)
async def test_the_same_json_is_the_same_request(one: str, other: str) -> None:
    assert await fingerprint(one) == await fingerprint(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "1.0"),
        ("1.0", "1.00"),
        ("1.0", "1e0"),
        ("1.0", '"1.0"'),
        ("1.0", '{"": "1.0"}'),
        ('{"": "1.0"}', '{"": 1.0}'),
        ('{"": {"": "1.0"}}', '{"": "1.0"}'),
        ("1234567890123456.01", "1234567890123456.02"),
        ("[1, 2]", "[2, 1]"),
        ("null", "{}"),
        ("null", ""),
        ("true", "1"),
        ("NaN", '"NaN"'),
        ('{"a": 1}', '{"a": 1, "b": null}'),
        ('{"a": 1, "a": 2}', '{"a": 2}'),
        ('{"a": 1, "a": 2}', '{"a": 2, "a": 1}'),
        ('{"a": 1', '{"a":1'),
    ],
)
async def test_other_json_is_another_request(one: str, other: str) -> None:
    assert await fingerprint(one) != await fingerprint(other)


async def test_the_character_set_of_json_does_not_matter() -> None:
    assert await fingerprint('{"a":1}', "application/json; charset=utf-8") == await fingerprint('{"a": 1}')


async def test_json_of_another_type_is_json_and_another_request() -> None:
    merge, patch = "application/merge-patch+json", "application/json-patch+json"
    assert await fingerprint('{"a": 1, "b": 2}', merge) == await fingerprint('{"b": 2, "a": 1}', merge)
    assert await fingerprint("[]", merge) != await fingerprint("[]", patch)


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/octet-stream", "application/x-www-form-urlencoded"]
)
async def test_any_other_body_counts_byte_for_byte(content_type: str | None) -> None:
    assert await fingerprint(b"a=1&b=2", content_type) == await fingerprint(b"a=1&b=2", content_type, chunk=3)
    assert await fingerprint(b"a=1&b=2", content_type) != await fingerprint(b"b=2&a=1", content_type)


async def test_the_same_bytes_of_another_type_are_another_request() -> None:
    kinds = ["text/plain", "text/plain; charset=latin-1", "text/html", JSON, None]
    assert len({await fingerprint(b"12", kind) for kind in kinds}) == 5


async def test_a_new_multipart_boundary_is_another_request() -> None:
    def form(boundary: str) -> tuple[str, str]:
        body = f'--{boundary}\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--{boundary}--\r\n'
        return body, f"multipart/form-data; boundary={boundary}"

    assert await fingerprint(*form("one")) == await fingerprint(*form("one"))
    assert await fingerprint(*form("one")) != await fingerprint(*form("two"))


@pytest.mark.parametrize(("one", "other"), [("a=1&b=2", "b=2&a=1"), ("a=x+y", "a=x%20y"), ("a=", "a")])
async def test_the_order_of_the_querys_names_does_not_matter(one: str, other: str) -> None:
    assert await fingerprint(query=one) == await fingerprint(query=other)


@pytest.mark.parametrize(
    ("one", "other"), [("", "dry=1"), ("a=1&a=2", "a=2&a=1"), ("a=1", "a=1&a=1"), ("a=b", "ab="), ("a", "b")]
)
async def test_another_query_is_another_request(one: str, other: str) -> None:
    assert await fingerprint(query=one) != await fingerprint(query=other)


async def test_a_body_does_not_run_into_the_query() -> None:
    assert await fingerprint(b"a", None, query="") != await fingerprint(b"", None, query="a")


async def test_json_nested_too_deep_to_read_counts_byte_for_byte() -> None:
    deep = "[" * 200_000 + "]" * 200_000
    assert await fingerprint(deep) == await fingerprint(deep)
    assert await fingerprint(deep) != await fingerprint(" " + deep)


JSON_VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=4),
    max_leaves=12,
)


@given(JSON_VALUES, JSON_VALUES)
async def test_two_values_are_one_request_only_when_they_are_equal(one: Any, other: Any) -> None:
    same = await fingerprint(json.dumps(one)) == await fingerprint(json.dumps(other, indent=1))
    assert same == (json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))
