"""Signing: headers that prove who sent a webhook and that nobody changed it, made anew for every attempt.

Two schemes. Standard Webhooks: an HMAC over id, time and body, with a secret that both sides have.
RFC 9421: an Ed25519 signature over method, address, id, time and the body's digest; the receiver needs
the public key only. In both the id stays the same over all attempts, the time is the attempt's own.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Protocol
from uuid import UUID

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from http_message_signatures.algorithms import (
    ED25519,  # pyright: ignore[reportPrivateImportUsage]  documented there
)
from http_message_signatures.resolvers import MappingKeyResolver
from http_message_signatures.signatures import HTTPMessageSigner

from oncely.arguments import check_duration

__all__ = [
    "HttpSignatures",
    "Message",
    "Request",
    "Signer",
    "StandardWebhooks",
    "check_ed25519",
    "decode_secret",
    "hmac_signature",
]


@dataclass(frozen=True, slots=True)
class Message:
    """What is signed: one attempt of one webhook, at its own time (whole seconds on the wire)."""

    id: UUID
    at: datetime
    url: str = field(repr=False)
    headers: tuple[tuple[str, str], ...] = field(repr=False)
    body: bytes = field(repr=False)


class Signer(Protocol):
    """Makes the headers that are added to an attempt."""

    def sign(self, message: Message) -> Sequence[tuple[str, str]]:
        """The headers as pairs. What it raises ends the attempt, which is tried again."""
        ...


class StandardWebhooks:
    """Signs as Standard Webhooks say, with every secret given: several while they are rotated.

    Secrets are base64, with or without `whsec_` in front, of 24 to 64 bytes. The new one comes first;
    the old one goes when every receiver has the new one.
    """

    def __init__(self, *secrets: str) -> None:
        if not secrets:
            raise ValueError("at least one secret is needed")
        self._secrets = [decode_secret(secret) for secret in secrets]

    def sign(self, message: Message) -> list[tuple[str, str]]:
        """`webhook-id`, `webhook-timestamp` and `webhook-signature`."""
        name, timestamp = _name_and_time(message)
        signatures = [hmac_signature(secret, name, timestamp, message.body) for secret in self._secrets]
        return [
            ("webhook-id", name),
            ("webhook-timestamp", timestamp),
            ("webhook-signature", " ".join(signatures)),
        ]

    def __repr__(self) -> str:
        return f"StandardWebhooks({len(self._secrets)} secrets)"


class HttpSignatures:
    """Signs as RFC 9421 says, with an Ed25519 key (or its unencrypted PEM).

    Covered: the method, the whole address, `content-digest`, `webhook-id`, `webhook-timestamp`, and
    `content-type` if there is one. `tag` tells this application's signatures from others in the same
    message. The signature says itself that it ends `valid_for` after the attempt.
    """

    def __init__(
        self,
        private_key: Ed25519PrivateKey | bytes,
        *,
        key_id: str,
        tag: str = "webhook",
        valid_for: timedelta = timedelta(minutes=5),
    ) -> None:
        check_duration(valid_for, "valid_for")
        if valid_for < timedelta(seconds=1):
            raise ValueError(f"valid_for must be a second or more, not {valid_for}")
        check_ed25519(private_key=private_key)
        self.key_id = key_id
        self.tag = tag
        self.valid_for = valid_for
        self._signer = HTTPMessageSigner(
            signature_algorithm=ED25519,
            key_resolver=MappingKeyResolver(public_keys={}, private_keys={key_id: private_key}),
        )
        # An id or tag that cannot be written is found out now, instead of at every message.
        HttpSignatures.sign(self, Message(UUID(int=0), datetime.now(UTC), "https://oncely.invalid/", (), b""))

    def sign(self, message: Message) -> list[tuple[str, str]]:
        """`webhook-id`, `webhook-timestamp`, `Content-Digest`, `Signature-Input` and `Signature`."""
        name, timestamp = _name_and_time(message)
        ours = {"webhook-id": name, "webhook-timestamp": timestamp}
        content_type = [value for name, value in message.headers if name.lower() == "content-type"]
        covered = ["@method", "@target-uri", "webhook-id", "webhook-timestamp", "content-digest"]
        request = Request("POST", message.url, dict(ours))
        if content_type:
            request.headers["content-type"] = ", ".join(content_type)
            covered.append("content-type")
        # The body must be given, or its digest is not covered.
        self._signer.sign(
            request,
            key_id=self.key_id,
            created=message.at,
            expires=message.at + self.valid_for,
            label=_LABEL,
            tag=self.tag,
            covered_component_ids=covered,
            body=message.body,
        )
        return [(name, value) for name, value in request.headers.items() if name != "content-type"]

    def __repr__(self) -> str:
        return f"HttpSignatures(key_id={self.key_id!r}, tag={self.tag!r})"


def check_ed25519(**key: object) -> None:
    """Raise what is wrong with a `private_key` or `public_key` now, instead of at every message."""
    ED25519(**key)  # type: ignore[no-untyped-call]  # so in http_message_signatures


def decode_secret(secret: str) -> bytes:
    """The bytes of a Standard Webhooks secret. Raises ValueError, which does not quote it."""
    try:
        decoded = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("a secret is base64, with or without whsec_ in front") from None
    if not 24 <= len(decoded) <= 64:
        raise ValueError(f"a secret has 24 to 64 bytes, not {len(decoded)}")
    return decoded


def hmac_signature(secret: bytes, name: str, timestamp: str, body: bytes) -> str:
    """The signature of Standard Webhooks over the message's bytes, whatever they are."""
    digest = hmac.digest(secret, b".".join((name.encode(), timestamp.encode(), body)), hashlib.sha256)
    return f"v1,{base64.b64encode(digest).decode()}"


@dataclass(slots=True)
class Request:
    """A message as http_message_signatures wants it."""

    method: str
    url: str
    headers: dict[str, str]


_LABEL = "webhook"


def _name_and_time(message: Message) -> tuple[str, str]:
    return str(message.id), str(int(message.at.timestamp()))
