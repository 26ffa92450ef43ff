"""The worker: the services of one process, started together, watched, and stopped together.

    worker = Worker(relay, consumer, retention, close=[redis.aclose, engine.dispose])

    if __name__ == "__main__":
        sys.exit(worker.main())

A *service* runs until it is told to stop. It waits by itself for a database or a broker that is away,
and says so; whatever else ends it is a bug. Then the others are stopped in order, and the worker ends
with that error: a process that goes on without one of its services would look healthy to its supervisor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from inspect import isawaitable
from typing import Protocol, runtime_checkable

from oncely.arguments import check_duration, check_kind
from oncely.errors import TablesMissing
from oncely.loop import complete, is_cancelled, one_at_a_time, wait_for_either, within
from oncely.process import LoopFactory, run_process
from oncely.transaction import sqlstates

__all__ = ["Service", "ServiceHealth", "Worker"]

_log = logging.getLogger(__name__)

_REFUSALS = frozenset({"28000", "28P01", "3D000"})
"""No such role, or a wrong password; no such database."""


@runtime_checkable
class Service(Protocol):
    """What a worker runs: a Relay, a StreamConsumer, a WebhookWorker, a Retention, or one of your own."""

    @property
    def name(self) -> str:
        """What the log and `Worker.health` call it; a second one of a name gets a number there."""
        ...

    @property
    def waits_for(self) -> str | None:
        """What it waits for while that is away, such as "database"."""
        ...

    @property
    def last_success(self) -> datetime | None:
        """When it last did what it is there for, be it that there was nothing to do."""
        ...

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Work until `stop` is set, or the task is cancelled."""
        ...


@dataclass(frozen=True, slots=True)
class ServiceHealth:
    """How a service is. `alive`: it runs. `waits_for`: what is away ("broker", "database")."""

    name: str
    alive: bool
    last_success: datetime | None
    waits_for: str | None

    @property
    def healthy(self) -> bool:
        """It runs, and nothing that it needs is away."""
        return self.alive and self.waits_for is None

    def to_json(self) -> dict[str, str | bool | None]:
        """As JSON has it; times as ISO 8601."""
        return {
            "name": self.name,
            "alive": self.alive,
            "healthy": self.healthy,
            "last_success": self.last_success.isoformat() if self.last_success is not None else None,
            "waits_for": self.waits_for,
        }


class Worker:
    """Runs `services` until it is stopped, or one of them fails.

    After a stop each service ends by its own grace (10 seconds, and as long again to give back), and all
    of them by `grace`: those that have not ended after four fifths of it are cancelled. It is to be shorter
    than what the supervisor waits for, and longer than twice the services'. Then each of `close` is
    called, and awaited if it is async, in this order: `redis.aclose`, `engine.dispose`.
    """

    def __init__(
        self,
        *services: Service,
        grace: timedelta = timedelta(seconds=25),
        close: Iterable[Callable[[], object]] = (),
    ) -> None:
        if not services:
            raise ValueError("a worker without services has nothing to do")
        check_duration(grace, "grace")
        self._named: dict[str, Service] = {}
        for service in services:
            if isinstance(service, type) or not isinstance(service, Service):
                raise TypeError(
                    f"a service has run(stop), name, waits_for and last_success, which {service!r} has not"
                )
            if any(service is other for other in self._named.values()):
                raise ValueError(f"{service.name} is given twice")
            self._named[self._free_name(service.name)] = service
        self.services = services
        self.grace = grace
        check_kind(close, Iterable, "close")
        self.closing = tuple(close)
        for each in self.closing:
            if not callable(each):
                raise TypeError(
                    "close takes functions, to be called and awaited in the end, such as engine.dispose "
                    f"(without parentheses), not {type(each).__name__}"
                )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending = asyncio.Event()

    @property
    def patience(self) -> timedelta:
        """How long after a stop the services are waited for, before they are cancelled."""
        return self.grace * 4 / 5

    def health(self) -> tuple[ServiceHealth, ...]:
        """How each service is, in the order in which they were given; a second one of a name has a number."""
        return tuple(
            ServiceHealth(
                name=name,
                alive=name in self._tasks and not self._tasks[name].done(),
                last_success=service.last_success,
                waits_for=service.waits_for,
            )
            for name, service in self._named.items()
        )

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Work until `stop` is set or the task is cancelled, then end in order. No signals are touched.

        Raises what a service failed with; when several did, an ExceptionGroup of that.
        """
        failures = await self._run(stop if stop is not None else asyncio.Event())
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup("several services failed", failures)

    def main(self, *, loop_factory: LoopFactory | None = None) -> int:
        """Be the whole process, in its main thread: run until SIGTERM or SIGINT. Returns the exit code.

        0: stopped, and everything was finished or given back. 1: a service failed; the log says with
        what. Two ends are those of a crash, so this does not return, and what was in flight comes
        again when its lease is over: 3, something had not ended within `grace`; 128 and the signal's
        number, a second signal. `loop_factory` makes the event loop: `uvloop.new_event_loop`.
        """

        async def work(stop: asyncio.Event) -> int:
            _log.info("running %s; a stop takes up to %s", ", ".join(self._named), self.grace)
            failures = await self._run(stop)
            _log.info("ended")
            return 1 if failures else 0

        return run_process(work, grace=self.grace, loop_factory=loop_factory)

    @one_at_a_time
    async def _run(self, stop: asyncio.Event) -> list[Exception]:
        """What the services failed with, each of it logged when it happened."""
        self._ending = asyncio.Event()
        failures: list[Exception] = []
        try:
            async with asyncio.TaskGroup() as group:
                for name, service in self._named.items():
                    self._tasks[name] = group.create_task(
                        self._serve(name, service, stop, failures), name=name
                    )
                group.create_task(self._end(stop))
        finally:
            self._tasks = {}
            await complete(self._close(), patience=self.grace / 10)
        return failures

    async def _serve(
        self, name: str, service: Service, stop: asyncio.Event, failures: list[Exception]
    ) -> None:
        try:
            await service.run(self._ending)
            if not self._ending.is_set() and not stop.is_set():
                raise RuntimeError(f"{name} has returned, and nobody had stopped it")
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self._fail(name, RuntimeError(f"{name} has cancelled itself"), failures)
        except Exception as error:  # noqa: BLE001  a service's bug; it is logged here and raised in the end
            self._fail(name, error, failures)

    def _fail(self, name: str, error: Exception, failures: list[Exception]) -> None:
        while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        failures.append(error)
        if isinstance(error, TablesMissing) or not _REFUSALS.isdisjoint(sqlstates(error)):
            # A setting is wrong, not the code: the line says it all, and a traceback would hide it.
            _log.critical("%s has failed: %s; the worker ends", name, _in_a_line(error))
        else:
            _log.critical("%s has failed; the worker ends", name, exc_info=error)
        self._ending.set()

    async def _end(self, stop: asyncio.Event) -> None:
        """Waits for the end, tells the services, and sees that they keep to their time."""
        await wait_for_either(self._ending.wait(), stop)
        _log.info("stopping")
        self._ending.set()
        _, running = await asyncio.wait(self._tasks.values(), timeout=self.patience.total_seconds())
        for task in running:
            _log.error("%s has not ended in its time; it is cancelled", task.get_name())
            task.cancel()

    async def _close(self) -> None:
        for close in self.closing:
            try:
                # A server that does not answer is not waited for.
                await within(_called(close), self.grace / 10 / len(self.closing))
            except Exception as error:  # noqa: BLE001  the others are to be closed as well
                _log.warning("could not close %r: %r", close, error)

    def _free_name(self, name: str) -> str:
        number, free = 1, name
        while free in self._named:
            number += 1
            free = f"{name} {number}"
        return free


def _in_a_line(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]


async def _called(close: Callable[[], object]) -> None:
    result = close()
    if isawaitable(result):
        await result
