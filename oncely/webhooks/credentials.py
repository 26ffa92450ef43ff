"""Credentials: which sender makes an attempt, asked for each anew, so that secrets rotate.

Either one for all, or a resolver that knows one for every signing scope.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeAlias

from oncely.errors import SigningScopeUnknown
from oncely.webhooks.sending import WebhookSender

__all__ = ["Credentials", "Resolver"]

_log = logging.getLogger(__name__)

Resolver: TypeAlias = Callable[[str], Awaitable[WebhookSender]]
"""The sender for a signing scope. It raises SigningScopeUnknown for a scope that will never have any;
anything else is tried again later."""


class Credentials:
    """Exactly one of `sender` and `resolver`, for attempts under leases of this length."""

    def __init__(self, *, sender: WebhookSender | None, resolver: Resolver | None, lease: timedelta) -> None:
        if (sender is None) == (resolver is None):
            raise ValueError("give exactly one of sender and resolver")
        self._sender = sender
        self._resolver = resolver
        self._lease = lease
        if sender is not None:
            self._check(sender)

    async def sender_for(self, scope: str | None) -> WebhookSender:
        """The sender for a signing scope. Raises SigningScopeUnknown when there will never be one."""
        if self._sender is not None:
            if scope is not None:
                raise SigningScopeUnknown("this worker's sender takes no signing scope")
            return self._sender
        assert self._resolver is not None  # noqa: S101  one of the two is there
        if scope is None:
            raise SigningScopeUnknown("this worker's resolver needs a signing scope")
        sender = await self._resolver(scope)
        try:
            self._check(sender)
        except ValueError as error:
            _log.error("the resolver's sender is not used: %s", error)
            raise
        return sender

    def _check(self, sender: WebhookSender) -> None:
        if self._lease < sender.deadline + _MARGIN:
            raise ValueError(
                f"lease ({self._lease}) must be {_MARGIN} longer than the sender's deadline "
                f"({sender.deadline}), or an attempt could outlive it"
            )


_MARGIN = timedelta(seconds=5)
"""So much longer than the sender's deadline a lease must be."""
