"""Tables on the user's MetaData: made once, never in the place of another, never with a name cut short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table

import oncely.tables
from oncely.errors import TableNameTaken
from oncely.outbox import Outbox

Maker = Callable[[MetaData, str, str | None], Any]

MAKERS: list[Maker] = [getattr(oncely.tables, name) for name in oncely.tables.__all__]

every_kind = pytest.mark.parametrize("make", MAKERS, ids=oncely.tables.__all__)


@every_kind
def test_asking_twice_gives_the_same_tables(make: Maker) -> None:
    metadata = MetaData()
    first = make(metadata, "things", None)
    made = set(metadata.tables)
    again = make(metadata, "things", None)
    both = zip(first, again, strict=True) if isinstance(first, tuple) else [(first, again)]
    assert all(one is other for one, other in both)
    assert set(metadata.tables) == made


@every_kind
def test_the_metadatas_schema_and_the_same_one_given_are_one_table(make: Maker) -> None:
    metadata = MetaData(schema="shop")
    make(metadata, "things", None)
    made = set(metadata.tables)
    make(metadata, "things", "shop")
    assert set(metadata.tables) == made
    make(metadata, "things", "elsewhere")
    assert {name.replace("elsewhere", "shop") for name in metadata.tables} == made


@every_kind
def test_another_table_of_that_name_is_not_touched(make: Maker) -> None:
    metadata = MetaData(schema="shop")
    Table("things", metadata, Column("id", Integer))
    with pytest.raises(TableNameTaken) as refused:
        make(metadata, "things", None)
    assert refused.value.name == "shop.things"
    assert isinstance(refused.value, ValueError)
    assert list(metadata.tables) == ["shop.things"]


@pytest.mark.parametrize("other", [make for make in MAKERS if make is not oncely.tables.idempotency_table])
def test_a_table_of_another_kind_is_not_taken_for_ones_own(other: Maker) -> None:
    metadata = MetaData()
    oncely.tables.idempotency_table(metadata, "things", None)
    with pytest.raises(TableNameTaken):
        other(metadata, "things", None)
    assert list(metadata.tables) == ["things"]


def test_a_table_in_the_place_of_the_claims_leaves_no_outbox_behind() -> None:
    metadata = MetaData()
    Table("outbox_claims", metadata, Column("id", Integer))
    with pytest.raises(TableNameTaken) as refused:
        Outbox(metadata)
    assert refused.value.name == "outbox_claims"
    assert list(metadata.tables) == ["outbox_claims"]


@every_kind
@pytest.mark.parametrize("name", ["x" * 64, "x" * 50, "é" * 30])
def test_a_name_that_postgresql_would_cut_short_is_refused(make: Maker, name: str) -> None:
    metadata = MetaData()
    with pytest.raises(ValueError, match=r"is too long: .* bytes, and PostgreSQL keeps 63"):
        make(metadata, name, None)
    assert list(metadata.tables) == []


def test_two_objects_on_one_metadata_share_their_tables() -> None:
    metadata = MetaData()
    first, second = Outbox(metadata), Outbox(metadata, on_dead="park")
    other = Outbox(metadata, table_name="letters")
    assert first.table is second.table
    assert first.claims is second.claims
    assert sorted(metadata.tables) == ["letters", "letters_claims", "outbox", "outbox_claims"]
    assert other.table is metadata.tables["letters"]
