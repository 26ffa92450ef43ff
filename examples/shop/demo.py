"""Lets customers into the shop, kills the relay while it works, and counts what there is in the end.

    python -m examples.shop.demo [--orders 200] [--fresh-keys]

Ends with 0 when every number is what it has to be, and with 1 when one is not. PostgreSQL and a
Redis-compatible server are started for it, or ONCELY_TEST_DATABASE_URL and ONCELY_TEST_REDIS_URL name
others: there it keeps to a schema and a stream of its own, and removes them.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from sqlalchemy.ext.asyncio import async_sessionmaker

from examples.shop.client import Client, Customer
from examples.shop.inspector import Inspector
from examples.shop.processes import Process, WebServer, WorkerProcess
from examples.shop.stage import servers, stream, tables
from examples.shop.tally import Tally, count

KILLS = 3

PATIENCE = 30.0
"""How long the shop may take to finish what is left when every customer has an answer, in seconds."""


async def demo(orders: int, *, fresh_keys: bool, console: Console) -> bool:
    """Runs it all; whether every number is right."""
    end_on_sigterm()
    customers = make_customers(orders)
    seats = sorted({customer.seat for customer in customers})
    console.print(f"{orders} customers want {len(seats)} seats. Opening the shop …")
    kills: list[bool] = []
    async with servers(), tables(seats) as engine, stream() as redis:
        inspector = Inspector(async_sessionmaker(engine), redis)
        with (
            WorkerProcess("examples.shop.relay:make_worker") as relay,
            WorkerProcess("examples.shop.consumer:make_worker") as consumer,
            WebServer() as web,
        ):
            client = Client(web.socket_path, fresh_keys=fresh_keys)
            async with bars(inspector, customers, len(seats), console):
                for number in range(KILLS):
                    async with asyncio.TaskGroup() as crowd:
                        killing = crowd.create_task(kill(relay, inspector, console))
                        for customer in customers[number::KILLS]:
                            crowd.create_task(client.order(customer))
                    kills.append(killing.result())
                await wait_until_done(inspector, [relay, consumer, web])
            died = [process.log() for process in (relay, consumer, web) if process.has_died]
            unclean = stop([relay, consumer])
        async with inspector.sessions() as session:
            tally = await count(session, client, customers)
    mistakes = tally.mistakes()
    console.print(table_of(tally, kills))
    for mistake in mistakes:
        console.print(f"Wrong: {mistake}.", style="red")
    for log in died:
        console.print("A process ended by itself:", log, style="red", markup=False)
    for log in unclean:
        console.print("A worker that was told to stop did not end with 0:", log, style="red", markup=False)
    return not mistakes and not died and not unclean


def make_customers(orders: int) -> list[Customer]:
    """Three customers for two seats; two or three copies of each order."""
    seats = max(1, orders * 2 // 3)
    return [
        Customer(name=f"customer {number}", seat=f"seat {number % seats}", copies=2 + number % 2)
        for number in range(orders)
    ]


async def kill(relay: Process, inspector: Inspector, console: Console) -> bool:
    """Kills the relay and starts another; whether it had sent a batch and not yet marked it as sent.

    It is frozen, looked at and let go on until it is found so. After two seconds it is killed anyway.
    """
    deadline = time.monotonic() + 2
    caught = False
    while not caught and time.monotonic() < deadline:
        relay.freeze()
        try:
            caught = await inspector.is_relay_in_the_middle()
        finally:
            if not caught:
                relay.thaw()
        await asyncio.sleep(0.001)
    relay.kill()
    relay.start()
    console.print(
        f"The relay was killed {'in the middle of a batch' if caught else 'at rest'}; another began."
    )
    return caught


async def wait_until_done(inspector: Inspector, processes: Sequence[Process]) -> None:
    """Returns when nothing is left to do, or will be done: then the numbers show it."""
    deadline = time.monotonic() + PATIENCE
    while not await inspector.is_all_done():
        if time.monotonic() > deadline or any(process.has_died for process in processes):
            return
        await asyncio.sleep(0.05)


def stop(workers: Sequence[WorkerProcess]) -> list[str]:
    """Tells the workers to stop; the logs of those that did not end in order."""
    for worker in workers:
        worker.stop()
    # One that has only just been started is ended by the signal itself: it had begun nothing.
    in_order = (0, -signal.SIGTERM)
    return [worker.log() for worker in workers if worker.exit_code not in in_order]


@asynccontextmanager
async def bars(
    inspector: Inspector, customers: Sequence[Customer], seats: int, console: Console
) -> AsyncIterator[None]:
    """Shows how far everything is."""
    columns = TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console) as progress:
        served = progress.add_task("customers answered", total=len(customers))
        published = progress.add_task("events published", total=seats)
        handled = progress.add_task("messages handled", total=seats)

        async def update() -> None:
            _, sent, done = await inspector.progress()
            progress.update(served, completed=sum(bool(customer.answers) for customer in customers))
            progress.update(published, completed=sent)
            progress.update(handled, completed=done)

        async def keep_updating() -> None:
            while True:
                await update()
                await asyncio.sleep(0.2)

        updating = asyncio.create_task(keep_updating())
        try:
            yield
            await update()
        finally:
            updating.cancel()
            await asyncio.wait({updating})


def table_of(tally: Tally, kills: Sequence[bool]) -> Table:
    """What is shown in the end."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for what, number in (
        ("requests sent", tally.requests),
        ("  cut before the answer", tally.cut),
        ("answers", tally.answers),
        ("  replayed", tally.replayed),
        ("orders", tally.orders),
        ("  refused: the seat was taken", tally.refused),
        ("events published", tally.published),
        ("  relays killed", len(kills)),
        ("  in the middle of a batch", sum(kills)),
        ("messages handled", tally.handled),
        ("  handlings that failed", tally.failures),
        ("  duplicates delivered", tally.duplicates),
    ):
        table.add_row(what, str(number))
    table.add_section()
    once = not tally.astray and tally.orders == tally.accepted
    table.add_row("each order exists once", "[green]yes" if once else "[red]no")
    return table


def end_on_sigterm() -> None:
    """Lets SIGTERM end this task as Ctrl-C does, so that everything is cleared away."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def main() -> int:
    """The exit status: 0 right, 1 wrong, 130 and 143 when a signal ended it."""
    parser = argparse.ArgumentParser(prog="python -m examples.shop.demo")
    parser.add_argument("--orders", type=int, default=200, help="how many customers come")
    parser.add_argument(
        "--fresh-keys",
        action="store_true",
        help="a new key for each request: what happens without the promise",
    )
    arguments = parser.parse_args()
    if arguments.orders < 1:
        parser.error("--orders must be 1 or more")
    try:
        right = asyncio.run(
            demo(arguments.orders, fresh_keys=arguments.fresh_keys, console=Console(highlight=False))
        )
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
