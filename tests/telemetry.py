"""What the tests of telemetry share: an observer that keeps what it is told."""

from __future__ import annotations

import re
from dataclasses import fields
from datetime import timedelta
from typing import Any, get_args

import pytest

from oncely.telemetry import Record
from oncely.telemetry.metrics import METRICS, SPANS
from oncely.testing import RecordingObserver
from oncely.testing.observer import SAMPLES

__all__ = ["RECORDS", "Recorder", "a_record", "records_made", "table", "without_times"]

RECORDS: tuple[type, ...] = get_args(Record)
"""Every class of record there is."""


class Recorder(RecordingObserver):
    """Keeps the records, in order, and shows them without their times."""

    @property
    def timeless(self) -> list[Record]:
        """All of them, without their times."""
        return [without_times(record) for record in self.records]


def table() -> str:
    """The table of the documentation, made of the code: records, their fields, what adapters make of them."""
    lines = ["| record | its fields | metrics (Prometheus) | span |", "|---|---|---|---|"]
    for kind in RECORDS:
        made = [metric for metric in METRICS if metric.record is kind]
        metrics = [f"`{metric.prometheus}{{{', '.join(metric.labels)}}}`" for metric in made]
        names = ", ".join(field.name for field in fields(kind))
        span = f"`{SPANS[kind]}`" if kind in SPANS else ""
        for index, metric in enumerate(metrics or [""]):
            row = (f"`{kind.__name__}`", names, metric, span) if index == 0 else ("", "", metric, "")
            lines.append("| " + " | ".join(row) + " |")
    return re.sub(" +", " ", "\n".join(lines)) + "\n"


def a_record(kind: type) -> Any:
    """A record of this class."""
    [sample] = [sample for sample in SAMPLES if isinstance(sample, kind)]
    return sample


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
