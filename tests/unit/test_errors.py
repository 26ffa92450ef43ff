"""What errors say: each names what it is about, and travels between processes with its facts."""

from __future__ import annotations

import pickle
from datetime import timedelta
from uuid import UUID

import pytest

from oncely.errors import (
    ClaimLost,
    DedupKeyReused,
    KeyInFlight,
    KeyInUse,
    OncelyError,
    PublishFailed,
    Refused,
    RowsHidden,
    SealingKeyMissing,
    TableNameTaken,
)

ONE, TWO, THREE, FOUR = (UUID(int=number) for number in range(1, 5))
NO = ValueError("no")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            KeyInFlight("shop", "k-1", timedelta(seconds=1.5)),
            "key 'k-1' in scope 'shop' is in flight; try again in 1.5 s",
        ),
        (KeyInUse("shop", "k-1"), "key 'k-1' in scope 'shop' is used inside its own work"),
        (
            TableNameTaken("outbox"),
            "the MetaData already has another table named 'outbox'; pass table_name=",
        ),
        (
            RowsHidden("outbox"),
            (
                "table 'outbox' neither took the row nor shows the one that is in its way; "
                "this role must see all rows, and no trigger may drop one"
            ),
        ),
        (
            DedupKeyReused("order.paid", "d-1", ONE),
            f"dedup_key 'd-1' of topic 'order.paid' belongs to event {ONE}, which has another key or payload",
        ),
        (ClaimLost([ONE, TWO]), "the claim on 2 events had expired before they were marked as published"),
        (PublishFailed({ONE: NO}), f"1 events were not published ({ONE}: ValueError('no'))"),
        (
            PublishFailed({ONE: NO, TWO: NO, THREE: NO, FOUR: NO}),
            (
                f"4 events were not published ({ONE}: ValueError('no'), {TWO}: ValueError('no'), "
                f"{THREE}: ValueError('no') and 1 more)"
            ),
        ),
        (SealingKeyMissing("2026-11"), "the keyring has no key '2026-11'"),
        (Refused(409, "taken"), "refused with status 409"),
    ],
)
def test_an_error_says_what_it_is_about_also_in_another_process(error: Exception, says: str) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert [str(error), str(there)] == [says, says]
    assert type(there) is type(error)


def test_a_failure_of_publishing_names_events_by_their_ids_and_nothing_else() -> None:
    with pytest.raises(TypeError) as raised:
        PublishFailed({str(ONE): NO})  # type: ignore[dict-item]
    assert str(raised.value) == f"PublishFailed names events by their id, a UUID, not by {str(ONE)!r}"
    assert not isinstance(raised.value, OncelyError)
