"""Kind: what an object is of whose class needs an extra: there only if that is installed and imported."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from oncely.streams import StreamConsumer
    from oncely.webhooks import Webhooks, WebhookWorker

__all__ = ["is_consumer", "is_webhook_worker", "is_webhooks"]


def is_consumer(found: object) -> TypeGuard[StreamConsumer]:
    return _is_a(found, "oncely.streams.consumer", "StreamConsumer")


def is_webhook_worker(found: object) -> TypeGuard[WebhookWorker]:
    return _is_a(found, "oncely.webhooks.worker", "WebhookWorker")


def is_webhooks(found: object) -> TypeGuard[Webhooks]:
    return _is_a(found, "oncely.webhooks.outbox", "Webhooks")


def _is_a(found: object, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(found, getattr(loaded, name))
