"""Verifying: is this webhook from whom it says, unchanged, and signed just now?

For receivers. A verified message has an id that its sender keeps over all attempts; `event_id` is that
id as a UUID, for `Inbox`, which recognises what was handled before:

    verified = verifier.verify(request.headers, body)
    await inbox.run(session, verified.event_id, work, consumer="webhooks from acme")

A message is accepted for `tolerance` around the time when it was signed; within that it can be played
back, and the Inbox is what makes that harmless. Senders try again for days, each time signed anew, so
keep the Inbox's rows for longer than that: 14 days are enough for oncely's own.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid5

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from http_message_signatures.algorithms import (
    ED25519,  # pyright: ignore[reportPrivateImportUsage]  documented there
)
from http_message_signatures.exceptions import HTTPMessageSignaturesException
from http_message_signatures.resolvers import MappingKeyResolver
from http_message_signatures.signatures import HTTPMessageVerifier

from oncely.arguments import check_duration, check_kind
from oncely.errors import SignatureInvalid
from oncely.webhooks.destination import Destination, HeadersLike, pairs_of
from oncely.webhooks.signing import Request, check_ed25519, decode_secret, hmac_signature

__all__ = ["HttpSignaturesVerifier", "StandardWebhooksVerifier", "Verified"]

_TOLERANCE = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Verified:
    """What a valid signature says: the message's id, the same over all attempts, and when it was signed."""

    id: str
    signed_at: datetime

    @property
    def event_id(self) -> UUID:
        """The id as a UUID: itself if it is written as one (oncely's are), else the UUID v5 of its text.

        Ids are one sender's; two senders may use the same. So let `consumer` name the sender too.
        """
        try:
            parsed = UUID(self.id)
        except ValueError:
            parsed = None
        return parsed if parsed is not None and str(parsed) == self.id else uuid5(_NAMESPACE, self.id)


class StandardWebhooksVerifier:
    """Verifies Standard Webhooks, whoever sent them, with any of the secrets: several while they rotate."""

    def __init__(self, *secrets: str, tolerance: timedelta = _TOLERANCE) -> None:
        if not secrets:
            raise ValueError("at least one secret is needed")
        self._secrets = [decode_secret(secret) for secret in secrets]
        self._tolerance = _checked(tolerance)

    def verify(self, headers: HeadersLike, body: bytes) -> Verified:
        """What the signature says of these headers and the body's very bytes. Raises SignatureInvalid."""
        fields = _fields(headers)
        name = _only(fields, "webhook-id")
        timestamp = _only(fields, "webhook-timestamp")
        given = _only(fields, "webhook-signature").encode(errors="replace").split(b" ")
        if not _is_utf8(name) or not timestamp.isascii() or not timestamp.isdecimal() or len(timestamp) > 12:
            raise SignatureInvalid("malformed")
        if abs(time.time() - int(timestamp)) > self._tolerance.total_seconds():
            raise SignatureInvalid("untimely")
        for secret in self._secrets:
            expected = hmac_signature(secret, name, timestamp, body).encode()
            if any(hmac.compare_digest(expected, each) for each in given):
                return Verified(name, datetime.fromtimestamp(int(timestamp), UTC))
        raise SignatureInvalid("mismatch")


class HttpSignaturesVerifier:
    """Verifies RFC 9421 signatures as `HttpSignatures` makes them; `keys` are Ed25519 public keys by id."""

    def __init__(
        self,
        keys: Mapping[str, Ed25519PublicKey | bytes],
        *,
        tag: str = "webhook",
        tolerance: timedelta = _TOLERANCE,
    ) -> None:
        check_kind(keys, Mapping, "keys")
        check_kind(tag, str, "tag")
        for key in keys.values():
            check_ed25519(public_key=key)
        self._tag = tag
        self._tolerance = _checked(tolerance)
        self._verifier = HTTPMessageVerifier(
            signature_algorithm=ED25519,
            key_resolver=MappingKeyResolver(public_keys=keys, private_keys={}),
        )
        self._verifier.max_clock_skew = _ANY  # times are checked here, where it can be said what is wrong

    def verify(self, method: str, url: str, headers: HeadersLike, body: bytes) -> Verified:
        """What the signature says. `url` is the address that the sender was given, as the world sees it.

        Behind a proxy that is not what the framework says: put it together from the public host. It may
        be spelled as it was given to the sender, who signs it in one spelling (see `Destination`).
        Raises SignatureInvalid.
        """
        fields = _fields(headers)
        if "signature" not in fields or "signature-input" not in fields:
            raise SignatureInvalid("missing")
        joined = {name: ", ".join(values) for name, values in fields.items()}
        try:
            # Without the body and these components, a signature over nothing much would do.
            results = self._verifier.verify(
                Request(method.upper(), _in_one_spelling(url), joined),
                max_age=None,
                expect_tag=self._tag,
                require_components=("@method", "@target-uri", "content-digest", "webhook-id"),
                body=body,
            )
        except HTTPMessageSignaturesException:
            raise SignatureInvalid("mismatch") from None
        [result, *others] = results
        if others:
            raise SignatureInvalid("malformed")
        now, tolerance = time.time(), self._tolerance.total_seconds()
        created, expires = (int(result.parameters.get(name, now)) for name in ("created", "expires"))
        if abs(now - created) > tolerance or now - expires > tolerance:
            raise SignatureInvalid("untimely")
        return Verified(result.covered_components['"webhook-id"'], datetime.fromtimestamp(created, UTC))


_ANY = timedelta(days=36_500)
_NAMESPACE = UUID("3d0b1c2e-0a5e-5f0c-9d53-6b7a0c6a7f11")


def _checked(tolerance: timedelta) -> timedelta:
    check_duration(tolerance, "tolerance")
    return tolerance


def _in_one_spelling(url: str) -> str:
    try:
        return Destination.parse(url).url
    except ValueError:
        return url


def _fields(headers: HeadersLike) -> dict[str, list[str]]:
    """The values of each name, in lower case."""
    fields: dict[str, list[str]] = {}
    for name, value in pairs_of(headers):
        fields.setdefault(name.lower(), []).append(value)
    return fields


def _only(fields: Mapping[str, list[str]], name: str) -> str:
    """The value of a header that must be there once: of two, nobody can say which one was signed."""
    values = fields.get(name, [])
    if len(values) != 1:
        raise SignatureInvalid("missing")
    return values[0]


def _is_utf8(name: str) -> bool:
    """Some frameworks decode what is not UTF-8 into text that cannot be encoded again."""
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False
