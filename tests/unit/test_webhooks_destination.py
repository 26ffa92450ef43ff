"""Where a webhook may go and with which headers; refused with a reason that quotes nothing."""

from __future__ import annotations

import hashlib

import pytest

from oncely.webhooks.destination import RESERVED, Destination, check_headers


@pytest.mark.parametrize(
    ("given", "origin", "host", "port", "target"),
    [
        ("https://a.example/x?y=1", "https://a.example", "a.example", 443, "/x?y=1"),
        ("https://a.example", "https://a.example", "a.example", 443, "/"),
        ("https://a.example?q", "https://a.example", "a.example", 443, "/?q"),
        ("HTTPS://A.Example:443/X", "https://a.example", "a.example", 443, "/X"),
        ("https://a.example:8443/", "https://a.example:8443", "a.example", 8443, "/"),
        ("https://[2606:4700::1]:8443/x", "https://[2606:4700::1]:8443", "2606:4700::1", 8443, "/x"),
        ("https://a_b.xn--bcher-kva.example/%7e%C3%A9", "https://a_b.xn--bcher-kva.example", None, 443, None),
        ("https://[2606:4700:0:0::0001]/", "https://[2606:4700::1]", "2606:4700::1", 443, "/"),
        ("https://10.0.0.1/", "https://10.0.0.1", "10.0.0.1", 443, "/"),
    ],
)
def test_an_address_has_one_spelling(
    given: str, origin: str, host: str | None, port: int, target: str | None
) -> None:
    parsed = Destination.parse(given)
    assert (parsed.origin, parsed.port) == (origin, port)
    assert host is None or (parsed.host, parsed.target) == (host, target)
    assert parsed.url == origin + parsed.target
    assert Destination.parse(parsed.url) == parsed
    assert parsed.digest == hashlib.sha256(parsed.url.encode()).digest()


def test_the_spelling_of_path_and_query_is_kept() -> None:
    for target in ("/a%7eb%7Ec/../'d'?x='y'&&z=%2f?/", "//a//", "/;p=1,2?+%20"):
        assert Destination.parse("https://a.example" + target).url == "https://a.example" + target


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://a.example/",
        "ftp://a.example/",
        "https:/a.example/",
        "https:///path",
        "https://",
        "https://user@a.example/",
        "https://user:secret@a.example/",
        "https://a.example@127.0.0.1/",
        "https://a.example/#fragment",
        "https://a.example#",
        "https://a.example/a b",
        "https://a.example/\r\nx: y",
        "https://a.example/\x00",
        "https://a.example/\x7f",
        "https://a.example\\@127.0.0.1/",
        "https://a.example/%zz",
        "https://a.example/%4",
        "https://a..example/",
        "https://.example/",
        "https://a.example./",
        "https://-a.example/",
        f"https://{'a' * 64}.example/",
        f"https://{'a.' * 130}example/",
        "https://a.example:0/",
        "https://a.example:65536/",
        "https://a.example:/",
        "https://a.example:4x3/",
        "https://[::1/",
        "https://[:::1]/",
        "https://[fe80::1%25eth0]/",
        "https://::1/",
        "https://0/",
        "https://2130706433/",
        "https://127.1/",
        "https://0177.0.0.1/",
        "https://010.8.8.8/",
        "https://999.1.1.1/",
        "https://1.2.3.4.5/",
        "https://0x7f000001/",
        "https://1.2.3.0x4/",
        "https://a.0X/",
        "https://bücher.example/",
        "https://a.example/é",
        "https://a%2eexample/",
        " https://a.example/",
        "https://a.example/ ",
        "https://a.example/" + "x" * 2031,
    ],
)
def test_what_is_no_plain_https_address_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(ValueError) as refused:
        Destination.parse(url)
    assert len(url) < 3 or url not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_an_address_is_text() -> None:
    with pytest.raises(ValueError, match=r"^url must be a str, not bytes$"):
        Destination.parse(b"https://a.example/secret")  # type: ignore[arg-type]  # that is the mistake


def test_an_address_may_have_2048_bytes() -> None:
    url = "https://a.example/" + "x" * 2030
    assert (len(url), Destination.parse(url).url) == (2048, url)


def test_a_repr_shows_no_path() -> None:
    assert "SECRET" not in repr(Destination.parse("https://a.example/SECRET?SECRET"))


def test_headers_are_kept_as_pairs_in_order() -> None:
    pairs = [("X-One", "1"), ("x-one", "a b\tc"), ("Empty", "")]
    assert check_headers(pairs) == tuple(pairs)
    assert check_headers(iter(pairs)) == tuple(pairs)
    assert check_headers({"Content-Type": "application/json"}) == (("Content-Type", "application/json"),)
    assert check_headers(()) == ()


@pytest.mark.parametrize("name", ["", "a b", "a:", "a\r\nb", "ä", "a\0", "(a)", "a\n"])
def test_a_header_name_is_a_token(name: str) -> None:
    with pytest.raises(ValueError, match="not a token"):
        check_headers({name: "x"})


@pytest.mark.parametrize("value", ["a\r\nb", "a\n", "a\r", "a\0", " a", "a ", "\ta", "ä", "\x7f", "a\x0bb"])
def test_a_header_value_is_printable_and_not_quoted(value: str) -> None:
    with pytest.raises(ValueError, match="header X-Token: its value must be printable ASCII") as refused:
        check_headers({"X-Token": value})
    assert repr(value) not in str(refused.value)


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_the_senders_own_headers_cannot_be_given(name: str) -> None:
    with pytest.raises(ValueError, match="the sender writes it"):
        check_headers({name.title(): "x"})


def test_headers_have_16_kib_at_most() -> None:
    check_headers({"x": "y" * 16_383})
    with pytest.raises(ValueError, match="16,385 bytes"):
        check_headers({"x": "y" * 16_384})
