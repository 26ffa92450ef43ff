"""What is sealed opens with its key and in its own row, and nowhere else."""

from __future__ import annotations

import dataclasses
import uuid

import pytest

from oncely.errors import InvalidKey, SealBroken, SealingKeyMissing
from oncely.webhooks import Keyring
from oncely.webhooks.sealing import Content, Routing

ONE, TWO = b"1" * 32, b"2" * 32
CONTENT = Content("https://a.example/SECRET", (("X-Token", "SECRET"), ("x-token", "é")), b"\x00SECRET\xff")
ROUTING = Routing(
    table="webhooks",
    id=uuid.UUID(int=1),
    origin="https://a.example",
    url_digest=b"u" * 32,
    caller="shop",
    account=None,
    type="order.paid",
    signing_scope="acme",
    key="k",
    dedup_digest=b"d" * 32,
)


@pytest.mark.parametrize("body", [b"", b"\x00\xff", b"x" * 1_000_000])
def test_what_was_sealed_comes_back_byte_for_byte(body: bytes) -> None:
    keyring = Keyring({"one": ONE}, write="one")
    content = dataclasses.replace(CONTENT, body=body)
    assert keyring.open(keyring.seal(content, ROUTING), ROUTING) == content


def test_the_same_content_is_sealed_differently_each_time() -> None:
    keyring = Keyring({"one": ONE}, write="one")
    sealed = [keyring.seal(CONTENT, ROUTING) for _ in range(200)]
    assert len({each.nonce for each in sealed}) == 200
    assert len({each.ciphertext for each in sealed}) == 200
    assert {len(each.nonce) for each in sealed} == {12}
    assert not any(b"SECRET" in each.ciphertext for each in sealed)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("table", "webhooks_2"),
        ("id", uuid.UUID(int=2)),
        ("origin", "https://b.example"),
        ("url_digest", b"v" * 32),
        ("caller", "shop2"),
        ("account", ""),
        ("account", "null"),
        ("type", "order.paid2"),
        ("signing_scope", None),
        ("key", "k2"),
        ("dedup_digest", b"e" * 32),
    ],
)
def test_it_does_not_open_under_another_routing(field: str, other: object) -> None:
    keyring = Keyring({"one": ONE}, write="one")
    sealed = keyring.seal(CONTENT, ROUTING)
    with pytest.raises(SealBroken):
        keyring.open(sealed, dataclasses.replace(ROUTING, **{field: other}))  # type: ignore[arg-type]  # one each


def test_every_field_of_the_routing_is_tried_above() -> None:
    [mark] = test_it_does_not_open_under_another_routing.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in mark.args[1]} == {field.name for field in dataclasses.fields(Routing)}


def test_texts_that_run_together_are_not_taken_for_one_another() -> None:
    keyring = Keyring({"one": ONE}, write="one")
    sealed = keyring.seal(CONTENT, dataclasses.replace(ROUTING, caller="a", account="bc"))
    with pytest.raises(SealBroken):
        keyring.open(sealed, dataclasses.replace(ROUTING, caller="ab", account="c"))


def test_a_changed_byte_breaks_the_seal() -> None:
    keyring = Keyring({"one": ONE, "two": ONE}, write="one")
    sealed = keyring.seal(CONTENT, ROUTING)
    flipped = bytes([sealed.ciphertext[0] ^ 1]) + sealed.ciphertext[1:]
    for broken in (
        dataclasses.replace(sealed, ciphertext=flipped),
        dataclasses.replace(sealed, ciphertext=sealed.ciphertext[:-1]),
        dataclasses.replace(sealed, ciphertext=b""),
        dataclasses.replace(sealed, nonce=bytes(12)),
        dataclasses.replace(sealed, nonce=b"short"),
        dataclasses.replace(sealed, key_id="two"),  # the same key by another name
    ):
        with pytest.raises(SealBroken):
            keyring.open(broken, ROUTING)


def test_one_key_writes_and_all_read() -> None:
    old = Keyring({"one": ONE}, write="one")
    both = Keyring({"one": ONE, "two": TWO}, write="two")
    new = Keyring({"two": TWO}, write="two")
    by_old, by_both = old.seal(CONTENT, ROUTING), both.seal(CONTENT, ROUTING)
    assert (by_old.key_id, by_both.key_id) == ("one", "two")
    assert both.open(by_old, ROUTING) == both.open(by_both, ROUTING) == new.open(by_both, ROUTING) == CONTENT
    with pytest.raises(SealingKeyMissing) as missing:
        new.open(by_old, ROUTING)
    assert missing.value.key_id == "one"


def test_another_key_of_the_same_name_does_not_open_it() -> None:
    sealed = Keyring({"one": ONE}, write="one").seal(CONTENT, ROUTING)
    with pytest.raises(SealBroken):
        Keyring({"one": TWO}, write="one").open(sealed, ROUTING)


def test_a_keyring_has_its_writing_key_and_keys_of_32_bytes() -> None:
    with pytest.raises(ValueError, match="no key 'two' to write with"):
        Keyring({"one": ONE}, write="two")
    with pytest.raises(ValueError, match="must have 32 bytes"):
        Keyring({"one": b"1" * 16}, write="one")
    with pytest.raises(InvalidKey):
        Keyring({"o\0ne": ONE}, write="o\0ne")
    assert len(Keyring.new_key()) == 32
    assert Keyring.new_key() != Keyring.new_key()


def test_no_repr_shows_what_is_hidden() -> None:
    key = b"KEYKEYKEYKEYKEYKEYKEYKEYKEYKEYKE"
    keyring = Keyring({"one": key}, write="one")
    shown = repr((keyring, CONTENT, keyring.seal(CONTENT, ROUTING), vars(keyring)))
    assert "KEYKEY" not in shown
    assert "SECRET" not in shown
    assert repr(keyring) == "Keyring(['one'], write='one')"
