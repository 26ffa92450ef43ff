"""Standard Webhooks: what is signed verifies by another library, what was changed does not."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
import standardwebhooks
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from oncely.errors import SignatureInvalid
from oncely.webhooks import (
    HttpSignatures,
    HttpSignaturesVerifier,
    Message,
    StandardWebhooks,
    StandardWebhooksVerifier,
    Verified,
)

ID = uuid.UUID("01a2281b-01fd-7553-8e1c-f94500c7de22")
URL = "https://hooks.example.com/in%7e/x?a='b'&c=%2F"
BODY = json.dumps({"größe": 1.10, "nested": {"b": [1, 2], "a": "☃"}}, ensure_ascii=False).encode()
JSON = (("Content-Type", "application/json"),)

OLD, NEW, OTHER = ("whsec_" + base64.b64encode(bytes([n]) * 32).decode() for n in (1, 2, 3))
PRIVATE = Ed25519PrivateKey.from_private_bytes(b"p" * 32)
PUBLIC = PRIVATE.public_key()


def message(
    *, at: datetime | None = None, body: bytes = BODY, headers: tuple[tuple[str, str], ...] = JSON
) -> Message:
    return Message(ID, at or datetime.now(UTC), URL, headers, body)


def later(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def test_the_library_standardwebhooks_verifies_what_is_signed() -> None:
    headers = dict(StandardWebhooks(NEW).sign(message()))
    assert standardwebhooks.Webhook(NEW).verify(BODY, headers) == json.loads(BODY)


def test_the_signature_is_the_one_that_the_library_makes() -> None:
    signer = StandardWebhooks("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    at = datetime(2021, 1, 1, tzinfo=UTC)
    signed = dict(signer.sign(message(at=at, body=b'{"test": 2432232314}')))
    expected = standardwebhooks.Webhook("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").sign(
        str(ID), at, '{"test": 2432232314}'
    )
    assert signed == {
        "webhook-id": str(ID),
        "webhook-timestamp": "1609459200",
        "webhook-signature": expected,
    }


def test_while_secrets_rotate_receivers_of_either_are_content() -> None:
    headers = dict(StandardWebhooks(NEW, OLD).sign(message()))
    for secret in (OLD, NEW):
        assert standardwebhooks.Webhook(secret).verify(BODY, headers) == json.loads(BODY)
        assert StandardWebhooksVerifier(secret).verify(headers, BODY).id == str(ID)
    assert StandardWebhooksVerifier(OTHER, OLD).verify(headers, BODY).id == str(ID)
    with pytest.raises(SignatureInvalid):
        StandardWebhooksVerifier(OTHER).verify(headers, BODY)


def test_each_attempt_has_the_same_id_and_a_time_and_signature_of_its_own() -> None:
    signer = StandardWebhooks(NEW)
    first, second = (dict(signer.sign(message(at=later(minutes)))) for minutes in (-600, 0))
    assert first["webhook-id"] == second["webhook-id"]
    assert int(second["webhook-timestamp"]) - int(first["webhook-timestamp"]) in (600, 601)
    assert first["webhook-signature"] != second["webhook-signature"]
    StandardWebhooksVerifier(NEW).verify(second, BODY)
    with pytest.raises(SignatureInvalid, match="untimely"):
        StandardWebhooksVerifier(NEW).verify(first, BODY)


@pytest.mark.parametrize("body", [b"", b"\x00\xff\xfe", b"x" * 100_000])
def test_bodies_are_bytes_and_need_not_be_text(body: bytes) -> None:
    headers = StandardWebhooks(NEW).sign(message(body=body))
    assert StandardWebhooksVerifier(NEW).verify(headers, body).id == str(ID)
    with pytest.raises(SignatureInvalid, match="mismatch"):
        StandardWebhooksVerifier(NEW).verify(headers, body + b"x")


def test_a_verifier_takes_what_others_sign() -> None:
    at = datetime.now(UTC)
    signature = standardwebhooks.Webhook(NEW).sign("msg_2abc", at, '{"a": 1}')
    headers = {
        "Webhook-Id": "msg_2abc",
        "Webhook-Timestamp": str(int(at.timestamp())),
        "Webhook-Signature": f"v1a,xxxx {signature}",
    }
    verified = StandardWebhooksVerifier(NEW).verify(headers, b'{"a": 1}')
    assert verified == Verified("msg_2abc", at.replace(microsecond=0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda headers: headers.pop("webhook-id"), "missing"),
        (lambda headers: headers.pop("webhook-timestamp"), "missing"),
        (lambda headers: headers.pop("webhook-signature"), "missing"),
        (lambda headers: headers.update({"webhook-id": ""}), "malformed"),
        (lambda headers: headers.update({"webhook-id": "other"}), "mismatch"),
        (lambda headers: headers.update({"webhook-timestamp": "soon"}), "malformed"),
        (lambda headers: headers.update({"webhook-timestamp": "-1"}), "malformed"),
        (lambda headers: headers.update({"webhook-timestamp": "٣"}), "malformed"),
        (lambda headers: headers.update({"webhook-timestamp": "9" * 400}), "malformed"),
        (lambda headers: headers.update({"webhook-timestamp": "0"}), "untimely"),
        (lambda headers: headers.update({"webhook-id": "\udcff"}), "malformed"),
        (lambda headers: headers.update({"webhook-timestamp": "\udcff"}), "malformed"),
        (lambda headers: headers.update({"webhook-signature": "v1,\udcff"}), "mismatch"),
        (lambda headers: headers.update({"webhook-signature": ""}), "mismatch"),
        (lambda headers: headers.update({"webhook-signature": "v1,é v2, ,"}), "mismatch"),
        (
            lambda headers: headers.update(
                {"webhook-signature": headers["webhook-signature"].replace("v1,", "v2,")}
            ),
            "mismatch",
        ),
        (
            lambda headers: headers.update(
                {"webhook-signature": headers["webhook-signature"].replace("v1,", "")}
            ),
            "mismatch",
        ),
    ],
)
def test_what_was_changed_is_refused(change: Callable[[dict[str, str]], object], reason: str) -> None:
    headers = dict(StandardWebhooks(NEW).sign(message()))
    change(headers)
    with pytest.raises(SignatureInvalid) as refused:
        StandardWebhooksVerifier(NEW).verify(headers, BODY)
    assert refused.value.reason == reason


def test_a_header_that_is_there_twice_is_refused() -> None:
    headers = StandardWebhooks(NEW).sign(message())
    for name in ("webhook-id", "webhook-timestamp", "webhook-signature"):
        with pytest.raises(SignatureInvalid, match="missing"):
            StandardWebhooksVerifier(NEW).verify([*headers, (name.title(), "x")], BODY)


@pytest.mark.parametrize("scheme", ["standard", "rfc9421"])
@pytest.mark.parametrize(("seconds", "accepted"), [(-50, True), (50, True), (-70, False), (70, False)])
def test_a_message_is_accepted_within_the_tolerance_to_both_sides(
    scheme: str, seconds: float, accepted: bool
) -> None:
    minute = timedelta(minutes=1)
    at = later(seconds)

    def verify() -> Verified:
        if scheme == "standard":
            headers = StandardWebhooks(NEW).sign(message(at=at))
            return StandardWebhooksVerifier(NEW, tolerance=minute).verify(headers, BODY)
        signed = [*JSON, *HttpSignatures(PRIVATE, key_id="k").sign(message(at=at))]
        return HttpSignaturesVerifier({"k": PUBLIC}, tolerance=minute).verify("POST", URL, signed, BODY)

    if accepted:
        assert verify() == Verified(str(ID), at.replace(microsecond=0))
    else:
        with pytest.raises(SignatureInvalid) as refused:
            verify()
        assert refused.value.reason == "untimely"


BAD_SECRETS = ["whsec_" + "QUFB" * 7 + "QQ=", "", "whsec_", "whsec_QUFB", "not base64!", "A" * 96]


@pytest.mark.parametrize("secret", BAD_SECRETS)
def test_a_secret_is_base64_of_24_to_64_bytes_and_not_quoted(secret: str) -> None:
    for make in (StandardWebhooks, StandardWebhooksVerifier):
        with pytest.raises(ValueError, match="a secret") as refused:
            make(secret)
        assert len(secret) < 10 or secret not in str(refused.value)
        with pytest.raises(ValueError, match="at least one secret"):
            make()


def test_an_id_that_is_no_uuid_becomes_one_that_stays() -> None:
    now = datetime.now(UTC)
    assert Verified(str(ID), now).event_id == ID
    ids = ("msg_1", "msg_1", "msg_2", str(ID).upper(), ID.hex)
    foreign = [Verified(each, now).event_id for each in ids]
    assert foreign[0] == foreign[1] == uuid.UUID("346b9638-513b-5505-9233-8e6de444749b")
    assert len({*foreign, ID}) == 5


def test_no_repr_shows_a_secret() -> None:
    shown = repr((StandardWebhooks(NEW), HttpSignatures(PRIVATE, key_id="k"), message()))
    assert shown.startswith(
        "(StandardWebhooks(1 secrets), HttpSignatures(key_id='k', tag='webhook'), Message("
    )
    assert "in%7e" not in shown
    assert "nested" not in shown
