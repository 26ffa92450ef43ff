"""What an observer is told: one frozen record for each thing that has happened.

A record is told when it is true. What happens in the caller's transaction is told after that transaction
was committed, and never when it was rolled back; on a bare AsyncConnection, which says nothing of its
commits, it is told at the statement. A session that joins a transaction which somebody else has begun on its
connection commits as far as it knows. What oncely commits itself is told after its commit.

No record holds a payload, a key, a header's value, an address or the message of an error: only names of
tables, streams, groups, topics and classes, counts and durations. `topic`, `type` and `consumer` are the
application's own names. Metrics are labelled with them, so they must be few: `order.paid`, and not
`order.4711.paid`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

__all__ = [
    "BatchClaimed",
    "BatchSettled",
    "ClaimLost",
    "DeadLettersMeasured",
    "EffectRun",
    "EventDied",
    "EventFailed",
    "EventsEmitted",
    "EventsPublished",
    "EventsTakenOver",
    "MessageHandled",
    "MessageReceived",
    "MessagesTakenOver",
    "Outage",
    "OutboxMeasured",
    "Record",
    "RequestGuarded",
    "RowsPruned",
    "StreamMeasured",
    "WebhookAttempted",
    "WebhookEnqueued",
    "WebhooksExpired",
    "WebhooksMeasured",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestGuarded:
    """A request came with an idempotency key, and this is how it went.

    first: its work was done, and the answer stored. refused: the work refused, and the refusal is stored.
    replayed: it got the stored answer. in_flight: another request works on its key, and it did not want to
    wait longer. reused: its key belongs to another request. in_use: the key was used inside its own work.
    unanswered: the key was committed without an answer. Work that fails leaves nothing, and tells nothing.

    `duration` is from the look at the key to the answer, without the commit.
    """

    keys: str
    outcome: Literal["first", "refused", "replayed", "in_flight", "reused", "in_use", "unanswered"]
    duration: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsEmitted:
    """New events of one topic by one call of emit; `repeated` had been there, found by their dedup_key."""

    outbox: str
    topic: str
    count: int
    repeated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchClaimed:
    """A relay has taken so many events; `duration` is what the claim took."""

    outbox: str
    events: int
    duration: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettled:
    """What became of a claimed batch is written down; `duration` is from the end of the claim until then.

    `released` events were given back untried.
    """

    outbox: str
    published: int
    failed: int
    dead: int
    released: int
    duration: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsPublished:
    """So many events of one topic have left, and are marked."""

    outbox: str
    topic: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFailed:
    """A try of an event has failed, and it is tried again after `retry_in`."""

    outbox: str
    topic: str
    error: str
    attempt: int
    retry_in: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDied:
    """An event is dead: nobody tries it again until somebody decides.

    `error` is ClaimExpired when no relay that published it came back to tell.
    """

    outbox: str
    topic: str
    error: str
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimLost:
    """A relay has lost its claim on so many events: what it had sent of them may be sent again."""

    outbox: str
    events: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsTakenOver:
    """A relay did not come back with so many events, by the end of its lease: they are tried again, alone."""

    outbox: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A service waits for a broker or a database that is away; told again at each try that fails.

    `name` is the service's table or stream, for retention "".
    """

    service: Literal["relay", "consumer", "webhooks", "retention", "gauges"]
    name: str
    waits_for: Literal["broker", "database"]
    error: str
    retry_in: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageHandled:
    """A delivery of a message has ended, and Redis knows it; `result` is that of `OnResult`.

    `topic` is "" and `attempt` 0 when there was nothing to read: trimmed away, or no event. `error` is
    "" without one.
    """

    stream: str
    group: str
    topic: str
    result: Literal["ok", "retry", "dead", "lost"]
    attempt: int
    error: str
    duration: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesTakenOver:
    """A worker has taken over messages that were delivered before: retries, and those of dead workers."""

    stream: str
    group: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReceived:
    """The inbox was asked. first: the message was handled now. duplicate: before, so nothing was done."""

    inbox: str
    consumer: str
    outcome: Literal["first", "duplicate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectRun:
    """A run of an effect has ended. With the call made by this run:

    done: its result is recorded. failed: it is known not to have happened. unknown: nobody can tell.
    lost: its claim ended before the end of the call could be recorded. And without a call:
    stored: an earlier result was returned. found: so was what the verifier found out. refused: an earlier
    failure was. pending: another owner is calling. in_doubt: unknown, and no verifier decided.
    reused: other arguments.
    """

    effects: str
    outcome: Literal[
        "done", "failed", "unknown", "lost", "stored", "found", "refused", "pending", "in_doubt", "reused"
    ]
    error: str
    duration: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookEnqueued:
    """A webhook was enqueued; `repeated`: it was there before."""

    webhooks: str
    type: str
    repeated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookAttempted:
    """An attempt of a webhook has ended, as `Outcome` says; `error` is a class, "HTTP n" or ""."""

    webhooks: str
    type: str
    outcome: Literal["delivered", "retry", "rejected", "expired", "quarantined", "released", "lost"]
    attempt: int
    error: str
    duration: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhooksExpired:
    """So many webhooks were found to be overdue, without an attempt."""

    webhooks: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsPruned:
    """Retention has deleted so many rows of a table, and committed that."""

    table: str
    count: int
    duration: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxMeasured:
    """One look at an outbox by `Gauges`: the fields of `OutboxStats`."""

    outbox: str
    ready: int
    deferred: int
    in_flight: int
    retrying: int
    dead: int
    lag: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMeasured:
    """One look at a group of a stream by `Gauges`; `oldest_pending` is zero when nothing is pending."""

    stream: str
    group: str
    unread: int
    pending: int
    oldest_pending: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLettersMeasured:
    """One look at the dead letters of a stream by `Gauges`: how many nobody has decided about."""

    stream: str
    dead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhooksMeasured:
    """One look at webhooks by `Gauges`, as in `WebhookStats`; `oldest` is zero when none waits."""

    webhooks: str
    pending: int
    failing: int
    quarantined: int
    oldest: timedelta


Record: TypeAlias = (
    RequestGuarded
    | EventsEmitted
    | BatchClaimed
    | BatchSettled
    | EventsPublished
    | EventFailed
    | EventDied
    | ClaimLost
    | EventsTakenOver
    | Outage
    | MessageHandled
    | MessagesTakenOver
    | MessageReceived
    | EffectRun
    | WebhookEnqueued
    | WebhookAttempted
    | WebhooksExpired
    | RowsPruned
    | OutboxMeasured
    | StreamMeasured
    | DeadLettersMeasured
    | WebhooksMeasured
)
"""All of them, in the order of the line."""
