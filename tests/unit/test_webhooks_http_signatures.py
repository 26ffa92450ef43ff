"""RFC 9421: what is signed verifies by the standard's own words, what was changed does not."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from http_message_signatures import HTTPMessageSigner
from http_message_signatures.algorithms import ED25519
from http_message_signatures.resolvers import MappingKeyResolver

from oncely.errors import SignatureInvalid
from oncely.webhooks import HttpSignatures, HttpSignaturesVerifier, Message
from oncely.webhooks.destination import Destination

ID = uuid.UUID("01a2281b-01fd-7553-8e1c-f94500c7de22")
URL = "https://hooks.example.com/in%7e/x?a='b'&c=%2F"
BODY = json.dumps({"größe": 1.10, "nested": {"b": [1, 2], "a": "☃"}}, ensure_ascii=False).encode()
JSON = (("Content-Type", "application/json"),)

PRIVATE = Ed25519PrivateKey.from_private_bytes(b"p" * 32)
PUBLIC = PRIVATE.public_key()


def message(
    *, at: datetime | None = None, body: bytes = BODY, headers: tuple[tuple[str, str], ...] = JSON
) -> Message:
    return Message(ID, at or datetime.now(UTC), URL, headers, body)


def signature_base(headers: dict[str, str], method: str, url: str) -> tuple[bytes, bytes]:
    """By RFC 9421, section 2.5, for the signature labelled "webhook": its base, and the signature."""
    match = re.fullmatch(r"webhook=(\((.*?)\);.*)", headers["signature-input"])
    assert match is not None
    values = {"@method": method, "@target-uri": url} | headers
    lines = [f"{name}: {values[name.strip(chr(34))]}" for name in match[2].split(" ")]
    base = "\n".join([*lines, f'"@signature-params": {match[1]}'])
    signature = re.fullmatch(r"webhook=:(.*):", headers["signature"])
    assert signature is not None
    return base.encode("ascii"), base64.b64decode(signature[1], validate=True)


def test_the_standards_own_words_verify_what_is_signed() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)
    signed = HttpSignatures(PRIVATE, key_id="acme-1").sign(message(at=at))
    headers = {name.lower(): value for name, value in [*JSON, *signed]}
    base, signature = signature_base(headers, "POST", URL)
    PUBLIC.verify(signature, base)
    digest = base64.b64encode(hashlib.sha256(BODY).digest()).decode()
    created = int(at.timestamp())
    assert base.decode() == "\n".join(
        [
            '"@method": POST',
            f'"@target-uri": {URL}',
            f'"webhook-id": {ID}',
            f'"webhook-timestamp": {created}',
            f'"content-digest": sha-256=:{digest}:',
            '"content-type": application/json',
            (
                '"@signature-params": ("@method" "@target-uri" "webhook-id" "webhook-timestamp"'
                f' "content-digest" "content-type");created={created};keyid="acme-1";alg="ed25519"'
                f';expires={created + 300};tag="webhook"'
            ),
        ]
    )


def signed(**fields: object) -> dict[str, str]:
    fields = {"at": datetime.now(UTC)} | fields
    made = message(**fields)  # type: ignore[arg-type]  # its own fields
    return dict([*made.headers, *HttpSignatures(PRIVATE, key_id="k").sign(made)])


VERIFIER = HttpSignaturesVerifier({"k": PUBLIC})


@pytest.mark.parametrize("body", [b"", BODY, b"\x00\xff"])
@pytest.mark.parametrize("headers", [(), JSON])
def test_it_verifies_whatever_the_body(body: bytes, headers: tuple[tuple[str, str], ...]) -> None:
    fields = signed(body=body, headers=headers)
    assert VERIFIER.verify("post", URL, fields, body).event_id == ID
    with pytest.raises(SignatureInvalid, match="mismatch"):
        VERIFIER.verify("POST", URL, fields, body + b" ")


Fields = dict[str, str]


def becomes(name: str, value: str | None) -> Callable[[Fields], object]:
    return lambda fields: fields.pop(name) if value is None else fields.update({name: value})


def swapped(name: str, old: str, new: str) -> Callable[[Fields], object]:
    return lambda fields: fields.update({name: fields[name].replace(old, new, 1)})


@pytest.mark.parametrize(
    "change",
    [
        becomes("webhook-id", str(uuid.UUID(int=7))),
        becomes("webhook-timestamp", "1"),
        becomes("Content-Type", "text/plain"),
        becomes("Content-Type", None),
        becomes("webhook-id", None),
        becomes("WEBHOOK-ID", "twice"),
        becomes("Content-Digest", None),
        becomes("Content-Digest", "sha-256=:AAAA:"),
        becomes("Signature", "nonsense("),
        swapped("Signature", "=:", "=:AAAA"),
        swapped("Signature-Input", '"k"', '"other"'),
        swapped("Signature-Input", "created=1", "created=2"),
        swapped("Signature-Input", 'tag="webhook"', 'tag="x"'),
        swapped("Signature-Input", ' "content-digest"', ""),
    ],
)
def test_what_was_changed_in_transit_is_refused(change: Callable[[Fields], object]) -> None:
    fields = signed()
    before = dict(fields)
    VERIFIER.verify("POST", URL, fields, BODY)
    change(fields)
    assert fields != before
    with pytest.raises(SignatureInvalid, match="mismatch"):
        VERIFIER.verify("POST", URL, fields, BODY)


def test_another_method_or_address_is_refused() -> None:
    fields = signed()
    for method, url in (("PUT", URL), ("POST", URL + "&x"), ("POST", URL.replace("https", "http"))):
        with pytest.raises(SignatureInvalid, match="mismatch"):
            VERIFIER.verify(method, url, fields, BODY)


@pytest.mark.parametrize("spelled", ["HTTPS://Shop.Example:443?n=1", "https://shop.example:0443/?n=1"])
def test_an_address_may_be_spelled_as_the_sender_was_given_it(spelled: str) -> None:
    signed = Message(ID, datetime.now(UTC), Destination.parse(spelled).url, JSON, BODY)
    fields = [*JSON, *HttpSignatures(PRIVATE, key_id="k").sign(signed)]
    verifier = HttpSignaturesVerifier({"k": PUBLIC})
    assert verifier.verify("POST", spelled, fields, BODY).id == str(ID)
    assert verifier.verify("POST", "https://shop.example/?n=1", fields, BODY).id == str(ID)
    with pytest.raises(SignatureInvalid):
        verifier.verify("POST", "https://shop.example/?N=1", fields, BODY)


def test_without_a_signature_it_says_so() -> None:
    for name in ("Signature", "Signature-Input"):
        fields = signed()
        del fields[name]
        with pytest.raises(SignatureInvalid, match="missing"):
            VERIFIER.verify("POST", URL, fields, BODY)


def test_a_signature_that_covers_too_little_is_refused_though_it_is_genuine() -> None:
    resolver = MappingKeyResolver(public_keys={}, private_keys={"k": PRIVATE})
    signer = HTTPMessageSigner(signature_algorithm=ED25519, key_resolver=resolver)

    @dataclasses.dataclass
    class Request:
        method: str
        url: str
        headers: dict[str, str]

    everything = ["@method", "@target-uri", "webhook-id", "content-digest"]
    for missing in everything:
        request = Request("POST", URL, {"webhook-id": "x"})
        body = None if missing == "content-digest" else BODY
        covered = [name for name in everything if name not in (missing, "content-digest")]
        signer.sign(request, key_id="k", tag="webhook", covered_component_ids=covered, body=body)
        with pytest.raises(SignatureInvalid, match="mismatch"):
            VERIFIER.verify("POST", URL, request.headers, BODY)


def test_of_two_signatures_of_one_tag_nobody_can_say_which_counts() -> None:
    fields = signed()
    for name in ("Signature", "Signature-Input"):
        fields[name] += ", " + fields[name].replace("webhook=", "other=", 1)
    with pytest.raises(SignatureInvalid, match="malformed"):
        VERIFIER.verify("POST", URL, fields, BODY)


def test_a_signature_is_valid_for_a_second_or_more() -> None:
    with pytest.raises(ValueError, match=r"^valid_for must be a second or more, not 0:00:00.900000$"):
        HttpSignatures(PRIVATE, key_id="k", valid_for=timedelta(milliseconds=900))


def test_a_tolerance_is_positive() -> None:
    with pytest.raises(ValueError, match=r"^tolerance must be positive, not 0:00:00$"):
        HttpSignaturesVerifier({"k": PUBLIC}, tolerance=timedelta(0))


def test_another_key_of_that_name_is_refused() -> None:
    other = Ed25519PrivateKey.generate().public_key()
    with pytest.raises(SignatureInvalid, match="mismatch"):
        HttpSignaturesVerifier({"k": other}).verify("POST", URL, signed(), BODY)


def test_keys_may_be_pem_and_wrong_ones_are_refused_at_once() -> None:
    private = PRIVATE.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = PUBLIC.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    fields = [*JSON, *HttpSignatures(private, key_id="k").sign(message())]
    assert HttpSignaturesVerifier({"k": public}).verify("POST", URL, fields, BODY).id == str(ID)
    with pytest.raises(ValueError):
        HttpSignatures(b"no key", key_id="k")
    with pytest.raises(ValueError):
        HttpSignaturesVerifier({"k": b"no key"})


@pytest.mark.parametrize("names", [{"key_id": "ключ"}, {"key_id": "k\n"}, {"key_id": "k", "tag": "é"}])
def test_an_id_or_tag_that_no_header_can_say_is_refused_at_once(names: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        HttpSignatures(PRIVATE, **names)  # type: ignore[arg-type]  # key_id is among them
