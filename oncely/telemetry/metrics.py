"""Which metrics the adapters make of the records: one list for all of them.

A metric has its OpenTelemetry name here, `oncely.outbox.lag` in `s`. In Prometheus that is
`oncely_outbox_lag_seconds`, and a counter ends with `_total`: the names that an OpenTelemetry Collector
gives them, too, so dashboards and alerts do not depend on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Literal, TypeVar

from oncely.telemetry.records import (
    BatchClaimed,
    BatchSettled,
    ClaimLost,
    DeadLettersMeasured,
    EffectRun,
    EventDied,
    EventFailed,
    EventsEmitted,
    EventsPublished,
    EventsTakenOver,
    MessageHandled,
    MessageReceived,
    MessagesTakenOver,
    Outage,
    OutboxMeasured,
    Record,
    RequestGuarded,
    RowsPruned,
    StreamMeasured,
    WebhookAttempted,
    WebhookEnqueued,
    WebhooksExpired,
    WebhooksMeasured,
)

__all__ = ["METRICS", "SPANS", "Metric", "check_labels"]

_T = TypeVar("_T")

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds that a few statements take, and waiting for another request."""

_SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds that handlers, brokers and other people's endpoints take."""

_SIZES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Made of `record`: labelled with its fields `labels`, by its field `value`; without one, each counts 1.

    `buckets` are the upper bounds of a histogram's. `unit` is `s` or, in braces, what is counted.
    """

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    record: type[Record]
    labels: tuple[str, ...]
    about: str
    value: str | None = None
    unit: str
    buckets: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """Its name in Prometheus; a histogram's series add `_bucket`, `_sum` and `_count`."""
        name = self.name.replace(".", "_") + ("_seconds" if self.unit == "s" else "")
        return f"{name}_total" if self.kind == "counter" else name

    def amount(self, record: Record) -> float:
        """What the record adds, or says."""
        if self.value is None:
            return 1
        value: int | timedelta = getattr(record, self.value)
        return value if isinstance(value, int) else value.total_seconds()

    def by_labels(
        self, make: Callable[[dict[str, str]], _T], *, without: Collection[str]
    ) -> Callable[[Record], _T]:
        """Finds what `make` has made of a record's labels, once for each combination of them."""
        names = tuple(name for name in self.labels if name not in without)
        if not names:
            only = make({})
            return lambda record: only
        values = attrgetter(*names)
        made: dict[object, _T] = {}

        def find(record: Record) -> _T:
            key = values(record)
            found = made.get(key)
            if found is None:
                found = made[key] = make({name: _text(getattr(record, name)) for name in names})
            return found

        return find


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _count(name: str, record: type[Record], labels: str, about: str, value: str | None = None) -> Metric:
    unit = "{" + name.split(".")[1].removesuffix("s") + "}"
    labels_ = tuple(labels.split())
    return Metric(
        name=name, kind="counter", record=record, labels=labels_, about=about, value=value, unit=unit
    )


def _seconds(
    name: str, record: type[Record], labels: str, about: str, buckets: tuple[float, ...] = _FAST
) -> Metric:
    return Metric(
        name=name,
        kind="histogram",
        record=record,
        labels=tuple(labels.split()),
        about=about,
        value="duration",
        unit="s",
        buckets=buckets,
    )


def _level(name: str, record: type[Record], labels: str, about: str, *, unit: str) -> Metric:
    value = name.rpartition(".")[2]
    labels_ = tuple(labels.split())
    return Metric(name=name, kind="gauge", record=record, labels=labels_, about=about, value=value, unit=unit)


METRICS = (
    _count("oncely.requests", RequestGuarded, "keys outcome", "Requests with an idempotency key"),
    _seconds("oncely.request.duration", RequestGuarded, "keys outcome", "From the look at the key to its answer"),
    _count("oncely.events.emitted", EventsEmitted, "outbox topic", "Events whose transaction was committed", "count"),
    _count("oncely.events.repeated", EventsEmitted, "outbox topic", "Emits of an event that was there", "repeated"),
    Metric(
        name="oncely.batch.size",
        kind="histogram",
        record=BatchClaimed,
        labels=("outbox",),
        about="Events in a claimed batch",
        value="events",
        unit="{event}",
        buckets=_SIZES,
    ),
    _seconds("oncely.claim.duration", BatchClaimed, "outbox", "What the claim of a batch took"),
    _seconds("oncely.batch.duration", BatchSettled, "outbox", "From the claim of a batch to its end", _SLOW),
    _count("oncely.events.released", BatchSettled, "outbox", "Claimed events given back untried", "released"),
    _count("oncely.events.published", EventsPublished, "outbox topic", "Events that have left", "count"),
    _count("oncely.events.failed", EventFailed, "outbox topic error", "Tries of events that failed"),
    _count("oncely.events.died", EventDied, "outbox topic error", "Events that are not tried any more"),
    _count("oncely.claims.lost", ClaimLost, "outbox", "Batches published for longer than their lease"),
    _count("oncely.events.taken_over", EventsTakenOver, "outbox", "Events of relays that did not come back", "count"),
    _count("oncely.outages", Outage, "service name waits_for", "Tries that found a broker or database away"),
    _count("oncely.messages.handled", MessageHandled, "stream group topic result", "Deliveries that have ended"),
    _seconds("oncely.message.duration", MessageHandled, "stream group topic", "What the handlers took", _SLOW),
    _count("oncely.messages.taken_over", MessagesTakenOver, "stream group", "Messages delivered once more", "count"),
    _count("oncely.messages.received", MessageReceived, "inbox consumer outcome", "Messages the inbox was asked about"),
    _count("oncely.effects.run", EffectRun, "effects outcome", "Runs of effects"),
    _seconds("oncely.effect.duration", EffectRun, "effects outcome", "What the runs of effects took", _SLOW),
    _count("oncely.webhooks.enqueued", WebhookEnqueued, "webhooks type repeated", "Webhooks that were committed"),
    _count("oncely.webhooks.attempted", WebhookAttempted, "webhooks type outcome", "Attempts of webhooks"),
    _seconds("oncely.webhook.duration", WebhookAttempted, "webhooks outcome", "From a webhook's claim to its end", _SLOW),
    _count("oncely.webhooks.expired", WebhooksExpired, "webhooks", "Webhooks found overdue", "count"),
    _count("oncely.rows.pruned", RowsPruned, "table", "Finished rows that were deleted", "count"),
    _seconds("oncely.prune.duration", RowsPruned, "table", "What a batch of deletions took"),
    _level("oncely.outbox.ready", OutboxMeasured, "outbox", "Events that may leave", unit="{event}"),
    _level("oncely.outbox.deferred", OutboxMeasured, "outbox", "Events whose time has not come", unit="{event}"),
    _level("oncely.outbox.in_flight", OutboxMeasured, "outbox", "Events that relays have", unit="{event}"),
    _level("oncely.outbox.retrying", OutboxMeasured, "outbox", "Events that have failed before", unit="{event}"),
    _level("oncely.outbox.dead", OutboxMeasured, "outbox", "Dead events that nobody has decided about", unit="{event}"),
    _level("oncely.outbox.lag", OutboxMeasured, "outbox", "How long the first in line has been due", unit="s"),
    _level("oncely.stream.unread", StreamMeasured, "stream group", "Entries given to no worker", unit="{message}"),
    _level("oncely.stream.pending", StreamMeasured, "stream group", "Entries not acknowledged", unit="{message}"),
    _level("oncely.stream.oldest_pending", StreamMeasured, "stream group", "Age of the oldest of those", unit="s"),
    _level("oncely.stream.dead", DeadLettersMeasured, "stream", "Dead letters that nobody has decided about", unit="{message}"),
    _level("oncely.webhooks.pending", WebhooksMeasured, "webhooks", "Webhooks that wait", unit="{webhook}"),
    _level("oncely.webhooks.failing", WebhooksMeasured, "webhooks", "Those of them that have failed", unit="{webhook}"),
    _level("oncely.webhooks.quarantined", WebhooksMeasured, "webhooks", "Webhooks that cannot be sent", unit="{webhook}"),
    _level("oncely.webhooks.oldest", WebhooksMeasured, "webhooks", "Age of the oldest that waits", unit="s"),
)  # fmt: skip
"""In the order of the records."""


def check_labels(without: Collection[str]) -> None:
    """Raise TypeError for a str, and ValueError for a label that no metric has: it would leave out none."""
    if isinstance(without, str):
        raise TypeError("without must be names of labels, not a str")
    unknown = set(without) - {label for metric in METRICS for label in metric.labels}
    if unknown:
        raise ValueError(f"no metric has a label {', '.join(sorted(unknown))}")


SPANS: dict[type[Record], str] = {
    BatchSettled: "publish <outbox>",
    MessageHandled: "process <topic>",
}
"""The spans that are made around what these records tell of, by their names."""
