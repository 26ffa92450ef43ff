"""Records as lines of a log: their names and fields, and the fields again as `extra`.

Outbox(metadata, observer=LoggingObserver())

EventFailed outbox=outbox topic=order.paid error=ValueError attempt=1 retry_in=1.0
"""

from __future__ import annotations

import logging
from dataclasses import fields
from datetime import timedelta

from oncely.arguments import check_callable
from oncely.telemetry.records import (
    BatchClaimed,
    BatchSettled,
    ClaimLost,
    DeadLettersMeasured,
    EventDied,
    EventFailed,
    EventsTakenOver,
    MessageHandled,
    Outage,
    OutboxMeasured,
    Record,
    StreamMeasured,
    WebhookAttempted,
    WebhooksExpired,
    WebhooksMeasured,
)

__all__ = ["LoggingObserver"]


class LoggingObserver:
    """Writes each record to `logger`, by default `oncely.telemetry.records`.

    ERROR: something needs a person (dead events and messages, rejected and quarantined webhooks). WARNING:
    something failed and is tried again. DEBUG: batches and gauges, which are many. INFO: all else. A handler
    that writes JSON finds the fields in the log record's `oncely`, durations in seconds.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        if logger is not None:
            check_callable(getattr(logger, "log", None), "logger.log")
        self._logger = logger if logger is not None else logging.getLogger("oncely.telemetry.records")

    def __call__(self, record: Record) -> None:
        level = _level(record)
        if not self._logger.isEnabledFor(level):
            return
        name = type(record).__name__
        facts = {field.name: _plain(getattr(record, field.name)) for field in fields(record)}
        text = " ".join(f"{field}={value}" for field, value in facts.items())
        self._logger.log(level, "%s %s", name, text, extra={"oncely": {"record": name, **facts}})


def _level(record: Record) -> int:
    match record:
        case EventDied() | WebhooksExpired() | MessageHandled(result="dead" | "lost"):
            return logging.ERROR
        case WebhookAttempted(outcome="rejected" | "expired" | "quarantined"):
            return logging.ERROR
        case EventFailed() | ClaimLost() | EventsTakenOver() | Outage() | MessageHandled(result="retry"):
            return logging.WARNING
        case WebhookAttempted(outcome="retry" | "lost"):
            return logging.WARNING
        case BatchClaimed() | BatchSettled() | OutboxMeasured() | WebhooksMeasured():
            return logging.DEBUG
        case StreamMeasured() | DeadLettersMeasured():
            return logging.DEBUG
        case _:
            return logging.INFO


def _plain(value: object) -> object:
    return value.total_seconds() if isinstance(value, timedelta) else value
