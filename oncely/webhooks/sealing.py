"""Sealing: what a webhook says and where it goes is readable with the keyring only.

AES-256-GCM with a random nonce per row. What the row says openly (its routing) is bound to what it
hides: a row whose routing was changed, or whose sealed part was moved to another row, does not open.
One key of the ring writes, all of them read. A random nonce is safe for some four thousand million
rows per key: begin to write with a new one long before that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from oncely.arguments import check_kind
from oncely.errors import SealBroken, SealingKeyMissing
from oncely.storable import check_key

__all__ = ["Content", "Keyring", "Routing", "Sealed"]


@dataclass(frozen=True, slots=True)
class Content:
    """What is hidden: the address, the headers and the body's bytes, as they will be sent."""

    url: str = field(repr=False)
    headers: tuple[tuple[str, str], ...] = field(repr=False)
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Routing:
    """What a row says openly and never changes."""

    table: str
    id: UUID
    origin: str
    url_digest: bytes
    caller: str
    account: str | None
    type: str
    signing_scope: str | None
    key: str
    dedup_digest: bytes


@dataclass(frozen=True, slots=True)
class Sealed:
    """A content as it is stored."""

    key_id: str
    nonce: bytes
    ciphertext: bytes = field(repr=False)


class Keyring:
    """The keys that seal webhooks: `write` names the one that seals, all of `keys` open.

        Keyring({"2026-07": os.urandom(32), "2026-01": …}, write="2026-07")

    Keys are 32 bytes, from `new_key` or a secret store. To rotate: first give the new key to every
    process, then write with it. An old key must stay until no row is sealed with it any more
    (`Webhooks.sealed_with`).
    """

    def __init__(self, keys: Mapping[str, bytes], *, write: str) -> None:
        check_kind(keys, Mapping, "keys")
        check_kind(write, str, "write")
        for key_id, key in keys.items():
            check_key(key_id, "key id")
            check_kind(key, bytes, f"key {key_id!r}")
            if len(key) != 32:
                raise ValueError(f"key {key_id!r} must have 32 bytes")
        if write not in keys:
            raise ValueError(f"the keyring has no key {write!r} to write with")
        self.write = write
        self._ciphers = {key_id: AESGCM(key) for key_id, key in keys.items()}

    @staticmethod
    def new_key() -> bytes:
        """A random key."""
        return AESGCM.generate_key(256)

    def seal(self, content: Content, routing: Routing) -> Sealed:
        """Hide a content in the row with this routing, with the key that writes."""
        nonce = os.urandom(_NONCE)
        addition = _additional_data(routing, self.write)
        return Sealed(self.write, nonce, self._ciphers[self.write].encrypt(nonce, _pack(content), addition))

    def open(self, sealed: Sealed, routing: Routing) -> Content:
        """The content of a row. Raises SealingKeyMissing and SealBroken."""
        cipher = self._ciphers.get(sealed.key_id)
        if cipher is None:
            raise SealingKeyMissing(sealed.key_id)
        try:
            addition = _additional_data(routing, sealed.key_id)
            return _unpack(cipher.decrypt(sealed.nonce, sealed.ciphertext, addition))
        except (InvalidTag, ValueError):
            raise SealBroken("a webhook does not open with its key") from None

    def __repr__(self) -> str:
        return f"Keyring({list(self._ciphers)}, write={self.write!r})"


_VERSION = 1
_NONCE = 12


def _additional_data(routing: Routing, key_id: str) -> bytes:
    """All that the row says openly, in one form only: a JSON array tells a text from none, and places."""
    return json.dumps(
        [
            _VERSION,
            routing.table,
            routing.id.hex,
            routing.origin,
            routing.url_digest.hex(),
            routing.caller,
            routing.account,
            routing.type,
            routing.signing_scope,
            routing.key,
            key_id,
            routing.dedup_digest.hex(),
        ]
    ).encode()


def _pack(content: Content) -> bytes:
    head = json.dumps([content.url, content.headers]).encode()
    return len(head).to_bytes(4, "big") + head + content.body


def _unpack(packed: bytes) -> Content:
    """Raises ValueError for what `_pack` did not write."""
    length = int.from_bytes(packed[:4], "big")
    url, headers = json.loads(packed[4 : 4 + length])
    return Content(url, tuple((name, value) for name, value in headers), packed[4 + length :])
