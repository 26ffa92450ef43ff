"""What the tests of telemetry share: an observer that keeps what it is told."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, get_args

import pytest

from oncely.telemetry import Record

__all__ = ["RECORDS", "Recorder", "records_made", "without_times"]

RECORDS: tuple[type, ...] = get_args(Record)
"""Every class of record there is."""


class Recorder:
    """Keeps the records, in order."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def __call__(self, record: Record) -> None:
        self.records.append(record)

    def of(self, *kinds: type) -> list[Record]:
        """Those of these classes, without their times."""
        return [without_times(record) for record in self.records if isinstance(record, kinds)]

    @property
    def timeless(self) -> list[Record]:
        """All of them, without their times."""
        return [without_times(record) for record in self.records]


def records_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of all records that are made from now on, whoever makes them."""
    made: list[str] = []

    def counting(kind: Any) -> Any:
        make = kind.__init__

        def count(self: object, **fields: object) -> None:
            made.append(kind.__name__)
            make(self, **fields)

        return count

    for kind in RECORDS:
        monkeypatch.setattr(kind, "__init__", counting(kind))
    return made


def without_times(record: Record) -> Record:
    """The record with a duration of zero, so that it compares; a duration must be there and be positive."""
    if not hasattr(record, "duration"):
        return record
    assert record.duration > timedelta(0)
    fields = {name: getattr(record, name) for name in record.__slots__}
    return type(record)(**fields | {"duration": timedelta(0)})
