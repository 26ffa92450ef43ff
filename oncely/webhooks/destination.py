"""Where a webhook goes, and with which headers: checked when it is enqueued, so that sending cannot trip.

An address is written in one way only: scheme and host in lower case, no port where it is 443, a path.
So what is stored, signed, compared and sent is the same text. Messages of errors here name the part that
is wrong and never quote it: an address carries secrets in its path and query.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from typing import Any, TypeAlias

__all__ = ["Destination", "HeadersLike", "check_headers", "pairs_of"]

HeadersLike: TypeAlias = Mapping[str, str] | Iterable[tuple[str, str]]
"""Headers as a mapping, or as pairs where a name comes twice."""

LONGEST_URL = 2_048
"""In bytes."""

LARGEST_HEADERS = 16_384
"""The most bytes of all names and values together."""


@dataclass(frozen=True, slots=True)
class Destination:
    """An HTTPS address in its parts. `target` is the path and query, as it stands in the request line."""

    origin: str
    host: str
    port: int
    target: str = field(repr=False)

    @classmethod
    def parse(cls, url: str) -> Destination:
        """The parts of a URL. Raises ValueError for what is no HTTPS address, or may not be sent to."""
        if not isinstance(url, str):
            raise ValueError(f"url must be a str, not {type(url).__name__}")  # noqa: TRY004  one error for all
        if not url.isascii():
            raise ValueError("url: only ASCII; write the host in punycode and the rest percent-encoded")
        if len(url) > LONGEST_URL:
            raise ValueError(f"url has {len(url):,} bytes; at most {LONGEST_URL:,} are sent to")
        if url[:8].lower() != "https://":
            raise ValueError("url must begin with https://")
        if "#" in url:
            raise ValueError("url has a fragment, which is never sent")
        authority = re.split("[/?]", url[8:], maxsplit=1)[0]
        if "@" in authority:
            raise ValueError("url has a user name or password; put credentials into a header")
        match = _URL.fullmatch(url)
        if match is None:
            raise ValueError("url is not a valid URI (RFC 3986): a character that must be percent-encoded?")
        host, port = _host(match["host"].lower()), int(match["port"] or 443)
        path, query = match["path"], match["query"]
        if not 1 <= port <= 65_535 or host is None:
            raise ValueError("url has an impossible host or port")
        origin = f"https://{host}" if port == 443 else f"https://{host}:{port}"
        return cls(origin, host.strip("[]"), port, (path or "/") + (query or ""))

    @property
    def url(self) -> str:
        """The address as it is stored and signed."""
        return self.origin + self.target

    @property
    def authority(self) -> str:
        """Host and port, as they stand in the request's Host header."""
        return self.origin.removeprefix("https://")

    @property
    def digest(self) -> bytes:
        """SHA-256 of the address."""
        return hashlib.sha256(self.url.encode()).digest()


def check_headers(headers: HeadersLike) -> tuple[tuple[str, str], ...]:
    """The headers as pairs, in the order given.

    Raises ValueError for a name that is no token, a value that is not printable ASCII (no CR, LF or
    NUL, no space around it), names that belong to the sender, and more than 16 KiB.
    """
    pairs = pairs_of(headers)
    size = 0
    for name, value in pairs:
        if _NAME.fullmatch(name) is None:
            raise ValueError("a header's name is not a token (RFC 9110)")
        if name.lower() in RESERVED:
            raise ValueError(f"header {name}: the sender writes it")
        if _VALUE.fullmatch(value) is None:
            raise ValueError(f"header {name}: its value must be printable ASCII without space around it")
        size += len(name) + len(value)
    if size > LARGEST_HEADERS:
        raise ValueError(f"headers have {size:,} bytes; at most {LARGEST_HEADERS:,} are sent")
    return pairs


def pairs_of(headers: HeadersLike) -> tuple[tuple[str, str], ...]:
    """Headers as pairs, however they were given. Raises TypeError for what is none."""
    given: Any = headers.items() if isinstance(headers, Mapping) else headers
    try:
        pairs = tuple((name, value) for name, value in given)
    except (TypeError, ValueError):
        raise TypeError(f"headers must be pairs of str, not {type(headers).__name__}") from None
    if not all(isinstance(word, str) for pair in pairs for word in pair):
        raise TypeError("headers must be pairs of str")
    return pairs


def _host(host: str) -> str | None:
    """The host in its one spelling; None if it is none.

    What ends in a number is an IPv4 address (so WHATWG's URLs), and is written as one: systems read
    numbers, octal and hexadecimal ones and fewer than four in ways of their own.
    """
    try:
        if host.startswith("["):
            return f"[{IPv6Address(host[1:-1])}]"
        if _NUMBER.fullmatch(host.rpartition(".")[2]):
            return str(IPv4Address(host))
    except ValueError:
        return None
    return host if len(host) <= 253 else None


RESERVED = frozenset(
    {
        # What is about the connection and the message's frame, not about its content.
        "connection",
        "content-length",
        "expect",
        "host",
        "http2-settings",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        # What signs, and what is signed.
        "content-digest",
        "signature",
        "signature-input",
        "webhook-id",
        "webhook-signature",
        "webhook-timestamp",
    }
)

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_ESCAPED = r"%[0-9A-Fa-f]{2}"
_PATH = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|{_ESCAPED})*"
_URL = re.compile(
    rf"[A-Za-z]+://(?P<host>{_LABEL}(?:\.{_LABEL})*|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{{1,5}}))?"
    rf"(?P<path>/{_PATH})?(?P<query>\?(?:{_PATH}|\?)*)?"
)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"(?:[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?)?")
