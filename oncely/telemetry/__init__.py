"""Telemetry: what oncely does, told to an observer of yours as frozen records.

    rooms ─▶ record ─▶ observer ─▶ logging · Prometheus · OpenTelemetry · any callable of yours

An observer is passed to what it is to hear of, and is called at once: `IdempotencyKeys`, `Outbox` (which
tells of its relays, too), `StreamConsumer`, `Inbox`, `Effects`, `Webhooks` (and their workers),
`Retention`, `Gauges`. What it raises is logged, and changes nothing. Without one, no record is made.

`records.py` says what each record means and when it is true. The adapters, `oncely.telemetry.logging`,
`.prometheus` and `.opentelemetry`, import their vendor when they are imported. In OpenTelemetry a metric is
called `oncely.outbox.lag` where Prometheus says `oncely_outbox_lag_seconds`, and labels are the same.

| record | its fields | metrics (Prometheus) | span |
|---|---|---|---|
| `RequestGuarded` | keys, outcome, duration | `oncely_requests_total{keys, outcome}` | |
| | | `oncely_request_duration_seconds{keys, outcome}` | |
| `EventsEmitted` | outbox, topic, count, repeated | `oncely_events_emitted_total{outbox, topic}` | |
| | | `oncely_events_repeated_total{outbox, topic}` | |
| `BatchClaimed` | outbox, events, duration | `oncely_batch_size{outbox}` | |
| | | `oncely_claim_duration_seconds{outbox}` | |
| `BatchSettled` | outbox, published, failed, dead, released, duration | `oncely_batch_duration_seconds{outbox}` | `publish <outbox>` |
| | | `oncely_events_released_total{outbox}` | |
| `EventsPublished` | outbox, topic, count | `oncely_events_published_total{outbox, topic}` | |
| `EventFailed` | outbox, topic, error, attempt, retry_in | `oncely_events_failed_total{outbox, topic, error}` | |
| `EventDied` | outbox, topic, error, attempts | `oncely_events_died_total{outbox, topic, error}` | |
| `ClaimLost` | outbox, events | `oncely_claims_lost_total{outbox}` | |
| `EventsTakenOver` | outbox, count | `oncely_events_taken_over_total{outbox}` | |
| `Outage` | service, name, waits_for, error, retry_in | `oncely_outages_total{service, name, waits_for}` | |
| `MessageHandled` | stream, group, topic, result, attempt, error, duration | `oncely_messages_handled_total{stream, group, topic, result}` | `process <topic>` |
| | | `oncely_message_duration_seconds{stream, group, topic}` | |
| `MessagesTakenOver` | stream, group, count | `oncely_messages_taken_over_total{stream, group}` | |
| `MessageReceived` | inbox, consumer, outcome | `oncely_messages_received_total{inbox, consumer, outcome}` | |
| `EffectRun` | effects, outcome, error, duration | `oncely_effects_run_total{effects, outcome}` | |
| | | `oncely_effect_duration_seconds{effects, outcome}` | |
| `WebhookEnqueued` | webhooks, type, repeated | `oncely_webhooks_enqueued_total{webhooks, type, repeated}` | |
| `WebhookAttempted` | webhooks, type, outcome, attempt, error, duration | `oncely_webhooks_attempted_total{webhooks, type, outcome}` | |
| | | `oncely_webhook_duration_seconds{webhooks, outcome}` | |
| `WebhooksExpired` | webhooks, count | `oncely_webhooks_expired_total{webhooks}` | |
| `RowsPruned` | table, count, duration | `oncely_rows_pruned_total{table}` | |
| | | `oncely_prune_duration_seconds{table}` | |
| `OutboxMeasured` | outbox, ready, deferred, in_flight, retrying, dead, lag | `oncely_outbox_ready{outbox}` | |
| | | `oncely_outbox_deferred{outbox}` | |
| | | `oncely_outbox_in_flight{outbox}` | |
| | | `oncely_outbox_retrying{outbox}` | |
| | | `oncely_outbox_dead{outbox}` | |
| | | `oncely_outbox_lag_seconds{outbox}` | |
| `StreamMeasured` | stream, group, unread, pending, oldest_pending | `oncely_stream_unread{stream, group}` | |
| | | `oncely_stream_pending{stream, group}` | |
| | | `oncely_stream_oldest_pending_seconds{stream, group}` | |
| `DeadLettersMeasured` | stream, dead | `oncely_stream_dead{stream}` | |
| `WebhooksMeasured` | webhooks, pending, failing, quarantined, oldest | `oncely_webhooks_pending{webhooks}` | |
| | | `oncely_webhooks_failing{webhooks}` | |
| | | `oncely_webhooks_quarantined{webhooks}` | |
| | | `oncely_webhooks_oldest_seconds{webhooks}` | |
"""

from oncely.telemetry.gauges import Gauges
from oncely.telemetry.observer import Observer, Tracer, observers
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
    "Gauges",
    "MessageHandled",
    "MessageReceived",
    "MessagesTakenOver",
    "Observer",
    "Outage",
    "OutboxMeasured",
    "Record",
    "RequestGuarded",
    "RowsPruned",
    "StreamMeasured",
    "Tracer",
    "WebhookAttempted",
    "WebhookEnqueued",
    "WebhooksExpired",
    "WebhooksMeasured",
    "observers",
]
