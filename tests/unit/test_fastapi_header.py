"""What a client may send as its Idempotency-Key."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from oncely.fastapi import InvalidKeyHeader
from oncely.fastapi.header import key_parameter, read_key
from oncely.idempotency import is_valid_key

PATTERN = key_parameter(required=True)["schema"]["pattern"]


def read(*values: str) -> str | None:
    return read_key(Headers(raw=[(b"idempotency-key", value.encode("latin-1")) for value in values]))


def test_without_the_header_there_is_no_key() -> None:
    assert read() is None


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("8e03978e-40d5-43e8-bc93-6894a57f9324", "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        ('"8e03978e-40d5-43e8-bc93-6894a57f9324"', "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        (r'"a \"quoted\" key"'.replace(" ", "-"), 'a-"quoted"-key'),
        (r'"back\\slash"', r"back\slash"),
        (r"back\slash", r"back\slash"),
        (' \t"with-white-space-around" ', "with-white-space-around"),
        ("12345678", "12345678"),
        ("k" * 255, "k" * 255),
        ('"' + "k" * 255 + '"', "k" * 255),
        ('"' + r"\"" * 255 + '"', '"' * 255),
    ],
)
def test_a_string_and_a_bare_value_are_the_same_key(value: str, key: str) -> None:
    assert read(value) == key


@pytest.mark.parametrize(
    ("values", "flaw"),
    [
        ([""], "is empty"),
        (['""'], "is empty"),
        (["  "], "is empty"),
        (["1234567"], "is a key of 7 characters"),
        (['"1234567"'], "is a key of 7 characters"),
        (["k" * 256], "is a key of 256 characters"),
        (["k" * 10_000], "is a key of 10000 characters"),
        (["two words"], "has a space or a character that is not printable ASCII"),
        (['"two words"'], "has a space or a character that is not printable ASCII"),
        (["tab\tinside"], "has a space or a character that is not printable ASCII"),
        (["schlüssel-1"], "has a space or a character that is not printable ASCII"),
        (["line\x0bbreak"], "has a space or a character that is not printable ASCII"),
        (['"not-closed'], "begins with a quotation mark"),
        (['"closed"-too-early'], "begins with a quotation mark"),
        (['"with-a-parameter";a=1'], "begins with a quotation mark"),
        (['"one-of-two","two-of-two"'], "begins with a quotation mark"),
        ([r'"escaped\n-wrongly"'], "begins with a quotation mark"),
        (['"'], "begins with a quotation mark"),
        (['"schlüssel-1"'], "begins with a quotation mark"),
        (["same-key", "same-key"], "was sent 2 times"),
        (["one-key-1", "one-key-2", "one-key-3"], "was sent 3 times"),
    ],
)
def test_a_malformed_header_is_refused_with_its_flaw(values: list[str], flaw: str) -> None:
    with pytest.raises(InvalidKeyHeader) as caught:
        read(*values)
    assert flaw in caught.value.detail
    assert not caught.value.missing


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF), max_size=300).map(lambda s: s.strip()))
def test_the_documented_pattern_says_what_is_accepted(value: str) -> None:
    accepted = re.fullmatch(PATTERN.removeprefix("^").removesuffix("$"), value) is not None
    try:
        assert (read(value) is not None) == accepted
    except InvalidKeyHeader:
        assert not accepted


@given(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=8, max_size=255))
def test_every_valid_key_comes_back_from_its_string(key: str) -> None:
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    assert is_valid_key(key)
    assert read(f'"{escaped}"') == key


def test_the_parameter_is_described() -> None:
    parameter = key_parameter(required=False)
    assert (parameter["name"], parameter["in"], parameter["required"]) == ("Idempotency-Key", "header", False)
