"""Which handlers a topic has: those subscribed to it, and those subscribed to a prefix of it."""

from __future__ import annotations

import logging

from oncely.event import Handler

__all__ = ["Routes"]

_REMEMBERED = 1000  # topics; they are the application's, so a few

logger = logging.getLogger("oncely.streams")


class Routes:
    """Handlers by topic. `"order.*"` stands for every topic that begins with `order.`, `"*"` for all."""

    def __init__(self) -> None:
        self._routes: list[tuple[str, Handler]] = []
        self._found: dict[str, tuple[Handler, ...]] = {}

    def add(self, topic: str, handler: Handler) -> None:
        if not topic or "*" in topic[:-1]:
            raise ValueError(f"a topic is a name or a prefix that ends with '*', not {topic!r}")
        if not callable(handler):
            raise TypeError(f"a handler is an async callable that takes an event, not {handler!r}")
        self._routes.append((topic, handler))
        self._found.clear()

    def __bool__(self) -> bool:
        """Whether any handler is subscribed."""
        return bool(self._routes)

    def find(self, topic: str) -> tuple[Handler, ...]:
        """The topic's handlers, in the order in which they were subscribed."""
        found = self._found.get(topic)
        if found is None:
            found = tuple(handler for route, handler in self._routes if _covers(route, topic))
            if len(self._found) < _REMEMBERED:
                self._found[topic] = found
                if not found:  # said once for each topic that is remembered
                    logger.warning("no handler for topic %r: its events are acknowledged and skipped", topic)
        return found


def _covers(route: str, topic: str) -> bool:
    return topic.startswith(route[:-1]) if route.endswith("*") else topic == route
