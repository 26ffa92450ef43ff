"""`oncely run`: a process that is a worker."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from oncely.cli.failure import WRONG_USE, Failure, reported
from oncely.cli.health import with_health_server
from oncely.cli.place import AppDir
from oncely.cli.target import load
from oncely.process import LoopFactory
from oncely.worker import Service, Worker

__all__ = ["run"]


@reported
def run(
    target: Annotated[str, typer.Argument(help="package.module:attribute", metavar="TARGET")],
    app_dir: AppDir = Path(),
    uvloop: Annotated[bool, typer.Option("--uvloop", help="Use uvloop's event loop.")] = False,
    health_port: Annotated[
        int | None,
        typer.Option(help="Answer GET /live and GET /health here.", min=0, max=65_535, show_default=False),
    ] = None,
    health_host: Annotated[str, typer.Option(help="On this address.")] = "127.0.0.1",
) -> None:
    """Run a Worker until SIGTERM or SIGINT.

    It then finishes what it has begun, within the worker's grace; a second signal does not wait for that.
    A database or a broker that is away is waited for. Logs go to stderr, if the target does not say where.

    With --health-port it answers GET /live with 200 as long as it works at all, and GET /health with 503
    while a service waits for something; both say in JSON how each service is.

    Exit codes: 0 stopped, with everything finished or given back; 1 a service failed, and the log has its
    traceback; 2 TARGET is no worker; 3 something had not ended within the grace; 143 or 130 a second
    SIGTERM or SIGINT. After 3, 143 and 130 what was in flight comes again, as after a crash.
    """
    worker = load(target, app_dir=app_dir)
    if not isinstance(worker, Worker):
        remedy = "; make it one: Worker(…)" if isinstance(worker, Service) else ""
        raise Failure(
            f"{target!r} is of type {type(worker).__name__}, and not a Worker{remedy}", exit_code=WRONG_USE
        )
    if health_port is not None:
        worker = with_health_server(worker, host=health_host, port=health_port)
    loop_factory = _uvloop() if uvloop else None
    # Does nothing when the target has given the root logger a handler.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    raise typer.Exit(worker.main(loop_factory=loop_factory))


def _uvloop() -> LoopFactory:
    try:
        import uvloop
    except ModuleNotFoundError:
        raise Failure("--uvloop needs uvloop: pip install uvloop", exit_code=WRONG_USE) from None
    return uvloop.new_event_loop
