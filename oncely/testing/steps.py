"""Named steps of the relay, the inbox, the consumer and the webhook worker, to crash at.

    steps = crash_at("relay.settle.before")
    steps.watch(engine, redis)
    relay = Relay(outbox, async_sessionmaker(engine), steps.publisher(publish))

A process that runs this ends by SIGKILL when it has published its first batch and not marked it. The
steps are seen from outside, at the sockets that oncely is given: the statements that an engine sends,
the commands that a Redis client sends, the calls of a publisher and of a handler. Nothing of this is in
the code that runs in production. Each step has a `before` and an `after`: when `before` is reached it
has not been asked for, and when `after` is, it is done, and nothing that follows has been asked for.
"""

from __future__ import annotations

import os
import re
import signal as signals
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely.arguments import check_callable
from oncely.event import Event, Handler, Publisher

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["STEPS", "Steps", "crash_at"]

STEPS: dict[str, str] = {
    "relay.reap": "what a dead relay left is made due again, in the claim's transaction",
    "relay.claim": "a batch is claimed, in a transaction that is still open",
    "relay.commit": "that transaction is committed",
    "relay.publish": "the publisher is called, for a batch or for one event",
    "relay.renew": "the claim is renewed, while the publisher works",
    "relay.settle": "the batch is marked and its claim ended, in one statement",
    "consumer.read": "new entries are read; `after` when there were some",
    "consumer.take_over": "entries of others are taken over; `after` when there were some",
    "consumer.begin": "the delivery of an entry that was taken over is counted",
    "consumer.handler": "the handler is called",
    "inbox.insert": "the inbox's row is written, in the handler's transaction",
    "inbox.commit": "that transaction is committed, with the handler's writes",
    "consumer.acknowledge": "handled entries are acknowledged",
    "consumer.bury": "a dead letter is written and its entry acknowledged, in one script",
    "consumer.release": "entries are given back, at a stop",
    "webhook.lease": "webhooks are leased, in one statement",
    "webhook.look": "the lease is looked at; nothing is sent before `after`",
    "webhook.record": "the end of an attempt is recorded; at `before` the endpoint has answered or failed",
}
"""Every step, by its name without `.before` and `.after`."""

Part: TypeAlias = "AsyncEngine | Redis"


class Steps:
    """Calls `on_step` with the name of each step that is reached, `before` and `after` it.

    `on_step` is called where the step is made, and not awaited: it may end the process, stop it, cut a
    wire. What it raises is raised there, as if the step had failed. Names of your own are reached by
    calling `reached`.
    """

    def __init__(self, on_step: Callable[[str], object]) -> None:
        check_callable(on_step, "on_step")
        self.reached = on_step

    def watch(self, *parts: Part) -> None:
        """See the steps that are made by these engines and Redis clients.

        Of a client, those on connections that it makes from now on; a cluster's are not seen.
        """
        for part in parts:
            if isinstance(part, AsyncEngine):
                self._watch_engine(part)
            else:
                from oncely.testing.commands import watch_commands

                watch_commands(part, self.reached)

    def publisher(self, publish: Publisher) -> Publisher:
        """The same publisher, whose calls are the step `relay.publish`."""

        async def watched(events: Sequence[Event]) -> None:
            self.reached("relay.publish.before")
            await publish(events)
            self.reached("relay.publish.after")

        return watched

    def handler(self, handle: Handler) -> Handler:
        """The same handler, whose calls are the step `consumer.handler`."""

        async def watched(event: Event) -> None:
            self.reached("consumer.handler.before")
            await handle(event)
            self.reached("consumer.handler.after")

        return watched

    def _watch_engine(self, engine: AsyncEngine) -> None:
        event.listen(engine.sync_engine, "before_cursor_execute", self._before_statement)
        event.listen(engine.sync_engine, "after_cursor_execute", self._after_statement)
        event.listen(engine.sync_engine, "commit", self._before_commit)
        event.listen(engine.sync_engine, "rollback", self._forget)
        # The first thing that happens after a commit that the driver has seen through.
        event.listen(engine.sync_engine.pool, "checkin", self._after_commit)

    def _before_statement(self, connection: Connection, cursor: Any, sql: str, *_: Any) -> None:
        if (step := _step_of_statement(sql)) is not None:
            self.reached(f"{step}.before")

    def _after_statement(self, connection: Connection, cursor: Any, sql: str, *_: Any) -> None:
        if (step := _step_of_statement(sql)) is not None:
            if step in _COMMITS:
                connection.info[_COMMIT] = _COMMITS[step]
            self.reached(f"{step}.after")

    def _before_commit(self, connection: Connection) -> None:
        if (step := connection.info.pop(_COMMIT, None)) is not None:
            connection.info[_COMMITTED] = step
            self.reached(f"{step}.before")

    def _forget(self, connection: Connection) -> None:
        if not connection.invalidated:  # then its info is gone with it
            connection.info.pop(_COMMIT, None)

    def _after_commit(self, driver: Any, record: Any) -> None:
        if (step := record.info.pop(_COMMITTED, None)) is not None and driver is not None:
            self.reached(f"{step}.after")


def crash_at(name: str, *, nth: int = 1, signal: signals.Signals = signals.SIGKILL) -> Steps:
    """Steps that end the process, as a crash does, when the step `name` is reached for the `nth` time.

    SIGSTOP freezes it there instead, until another process sends SIGCONT: so stalls a machine that
    comes back. `name` is one of `STEPS` with `.before` or `.after`, or a name of your own with another
    first word; then call `steps.reached(name)` where it is to be.
    """
    if nth < 1:
        raise ValueError(f"nth must be 1 or more, not {nth}")
    step, _, side = name.rpartition(".")
    ours = {step.partition(".")[0] for step in STEPS}
    if name.partition(".")[0] in ours and (step not in STEPS or side not in ("before", "after")):
        raise ValueError(f"there is no step {name!r}; see oncely.testing.STEPS")
    left = nth

    def on_step(reached: str) -> None:
        nonlocal left
        if reached == name:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal)

    return Steps(on_step)


_COMMIT = "oncely.testing.commit"
_COMMITTED = "oncely.testing.committed"
_COMMITS = {"relay.claim": "relay.commit", "inbox.insert": "inbox.commit"}
"""The statements whose transaction's commit is a step too."""

_STATEMENTS = {
    "relay.reap": r"\bWITH expired AS MATERIALIZED \( SELECT number, event_ids\b",
    "relay.claim": r"\bclaim AS \( INSERT INTO ",
    "relay.renew": r"^ ?UPDATE \S+ SET expires_at = statement_timestamp\(\) \+ ",
    "relay.settle": r"^ ?WITH ended AS \(DELETE FROM ",
    "inbox.insert": r"^ ?INSERT INTO \S+ \(consumer, event_id\) VALUES ",
    "webhook.lease": r"^ ?WITH RECURSIVE expired AS \( ?UPDATE ",
    "webhook.look": r"^ ?SELECT retry_until > statement_timestamp\(\) FROM ",
    "webhook.record": r"^ ?UPDATE \S+ SET (state = \S+, last_error = \S+, )?token = NULL, (last_e|fini)",
}


@lru_cache(maxsize=1024)
def _step_of_statement(sql: str) -> str | None:
    words = " ".join(sql.split())
    return next((step for step, pattern in _STATEMENTS.items() if re.search(pattern, words)), None)
