"""An observer that records, and what an observer of yours has to keep to, as checks.

    @pytest.mark.parametrize("check", OBSERVER_CHECKS)
    def test_conforms(check): check(MyObserver())

oncely guards the work against an observer that breaks these; the checks find that before production does.
A check that fails raises AssertionError.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, TypeVar, get_args

from oncely.event import Event, uuid7
from oncely.storable import encode_json
from oncely.telemetry import Observer, Record, Tracer
from oncely.telemetry.observer import guarded

__all__ = ["OBSERVER_CHECKS", "SAMPLES", "RecordingObserver"]

_R = TypeVar("_R")


class RecordingObserver:
    """Keeps what it is told in `records`, in order."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def __call__(self, record: Record) -> None:
        self.records.append(record)

    def of(self, kind: type[_R]) -> list[_R]:
        """The records of this class."""
        return [record for record in self.records if isinstance(record, kind)]


def _sample(kind: Any) -> Record:
    """Texts and outcomes are called as their field; the checks want no more."""
    values = {"int": 3, "bool": True, "timedelta": timedelta(milliseconds=200)}
    sample: Record = kind(**{field.name: values.get(str(field.type), field.name) for field in fields(kind)})
    return sample


SAMPLES: tuple[Record, ...] = tuple(_sample(kind) for kind in get_args(Record))
"""One record of each class."""


def is_called_and_not_awaited(observer: Observer) -> None:
    """An observer is no coroutine function: nobody would await what it returns."""
    try:
        guarded(observer)
    except TypeError as error:
        raise AssertionError(str(error)) from error


def takes_every_record(observer: Observer) -> None:
    """Also those that it has no use for, and each of them twice."""
    for record in SAMPLES * 2:
        _call(observer, record)


def takes_a_record_that_it_does_not_know(observer: Observer) -> None:
    """Later versions of oncely tell of more."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Unheard:
        outbox: str

    _call(observer, Unheard(outbox="outbox"))


def writes_headers_that_can_be_stored(observer: Observer) -> None:
    """A tracer's headers are strings that a jsonb column takes."""
    if isinstance(observer, Tracer):
        headers = dict(observer.headers())
        _require(
            all(isinstance(text, str) for pair in headers.items() for text in pair),
            f"names and values are strings, not {headers!r}",
        )
        try:
            encode_json(headers)
        except ValueError as error:
            raise AssertionError(f"the headers cannot be stored: {error}") from error


def stands_around_events_of_any_headers(observer: Observer) -> None:
    """None, those of somebody else, and such as claim to be a trace."""
    if isinstance(observer, Tracer):
        for headers in (None, {"tenant": "7"}, {"traceparent": "nonsense", "tracestate": ",,="}):
            event = Event(uuid7(), "conformance", 1, headers=headers)
            with observer.publishing("outbox", [event, event]):
                pass
            with observer.handling("stream", "group", event):
                pass


def lets_errors_pass(observer: Observer) -> None:
    """What is raised inside of a tracer's span comes out of it as it is."""
    if isinstance(observer, Tracer):
        event = Event(uuid7(), "conformance", 1)
        for around in (
            observer.publishing("outbox", [event]),
            observer.handling("stream", "group", event),
        ):
            raised = LookupError("the work's own")
            try:
                with around:
                    raise raised
            except LookupError as error:
                _require(error is raised, f"another error came out: {error!r}")
            else:
                raise AssertionError("an error of the work was swallowed")


OBSERVER_CHECKS = (
    is_called_and_not_awaited,
    takes_every_record,
    takes_a_record_that_it_does_not_know,
    writes_headers_that_can_be_stored,
    stands_around_events_of_any_headers,
    lets_errors_pass,
)
"""For every observer; the last three ask nothing of one that is no Tracer."""


def _call(observer: Any, record: object) -> None:
    try:
        observer(record)
    except Exception as error:
        raise AssertionError(f"{record!r} made it raise {error!r}") from error


def _require(truth: bool, otherwise: str) -> None:
    if not truth:
        raise AssertionError(otherwise)
