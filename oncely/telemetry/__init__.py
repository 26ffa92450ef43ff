"""Telemetry: what oncely does, told to an observer of yours as frozen records.

rooms ─▶ record ─▶ observer ─▶ logging · Prometheus · OpenTelemetry · any callable of yours
"""

from oncely.telemetry.observer import Observer, Tracer, observers
from oncely.telemetry.records import (
    BatchClaimed,
    BatchSettled,
    ClaimLost,
    EffectRun,
    EventDied,
    EventFailed,
    EventsEmitted,
    EventsPublished,
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
    "EffectRun",
    "EventDied",
    "EventFailed",
    "EventsEmitted",
    "EventsPublished",
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
