"""Processes that die in the middle of a charge, and a provider that dies too: nobody pays twice.

The provider is `examples.payments.server`, a process of its own, and a forgetful one: it ignores
idempotency keys and charges at every request. Only the record and the verifier stand between the
card and a second charge.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from examples.payments.client import Payments
from examples.payments.server import Ledger
from oncely import EffectFailed, Effects, EffectUnknown
from oncely.effects import Status
from tests.acceptance.effects_owner import ARGS, STALE_AFTER
from tests.database import Database
from tests.effects import make_effects, record_of
from tests.waiting import until

on_both = pytest.mark.parametrize("any_database", ["asyncpg", "aiosqlite"], indirect=True)
on_postgresql = pytest.mark.parametrize("any_database", ["asyncpg"], indirect=True)
on_sqlite = pytest.mark.parametrize("any_database", ["aiosqlite"], indirect=True)

ROOT = Path(__file__).parents[2]


class Provider:
    """The payment server as a process; `charges` are what it has in its books."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "payments.sock"
        self._ledger = folder / "ledger.db"
        self._process: subprocess.Popen[bytes] | None = None
        self._new_client()

    def _new_client(self) -> None:
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://payments", timeout=10)
        self.payments = Payments(self.http)

    @property
    def charges(self) -> list[dict[str, Any]]:
        return Ledger(self._ledger).charges()

    async def start(self) -> None:
        """Returns when the server answers; at once when it is running."""
        if self._process is None or self._process.poll() is not None:
            self.socket.unlink(missing_ok=True)
            self._process = _start(self._ledger, self.socket)
        await until(self._answers)

    async def begin_test(self) -> None:
        self._new_client()  # of this test's event loop
        self._ledger.unlink(missing_ok=True)
        Ledger(self._ledger)
        await self.start()

    async def end_test(self) -> None:
        await self.http.aclose()

    async def fail_next(self, fault: str) -> None:
        (await self.http.put("/fault", params={"fault": fault})).raise_for_status()

    def has_died(self) -> None:
        """Returns when the server is no more."""
        assert self._process is not None
        self._process.wait(20)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def _answers(self) -> bool:
        try:
            return (await self.http.get("/charges")).is_success
        except httpx.TransportError:
            return False


def _start(ledger: Path, socket: Path) -> subprocess.Popen[bytes]:
    options = ["--forgetful", "--ledger", str(ledger), "--uds", str(socket)]
    return subprocess.Popen(
        [sys.executable, "-m", "examples.payments.server", *options],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,  # a broken reply is reported there
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    provider = Provider(tmp_path_factory.mktemp("provider"))
    yield provider
    provider.close()


@pytest.fixture
async def provider(running: Provider) -> AsyncIterator[Provider]:
    await running.begin_test()
    yield running
    await running.end_test()


@pytest.fixture
async def effects(any_engine: AsyncEngine) -> Effects:
    return await make_effects(any_engine, stale_after=STALE_AFTER)


class Owners:
    """Starts owners of the effect `k` as processes."""

    def __init__(self, database: Database, provider: Provider) -> None:
        self._arguments = [database.url, database.schema or "", str(provider.socket), "k"]
        self._started: list[Process] = []

    async def start(self, death: str) -> Process:
        """One that is about to send its request, or waits for another that is."""
        owner = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.acceptance.effects_owner", *self._arguments, death),
            cwd=ROOT,
            stdout=PIPE,
        )
        self._started.append(owner)
        return owner

    async def close(self) -> None:
        for owner in self._started:
            if owner.returncode is None:
                owner.kill()
            await owner.wait()


@pytest.fixture
async def owners(any_database: Database, provider: Provider) -> AsyncIterator[Owners]:
    owners = Owners(any_database, provider)
    yield owners
    await owners.close()


async def says(owner: Process) -> str:
    """The next line that the owner prints."""
    assert owner.stdout is not None
    async with asyncio.timeout(20):
        return (await owner.stdout.readline()).decode().strip()


async def is_unknown(effects: Effects) -> None:
    async def unknown() -> bool:
        return (await record_of(effects, "k")).status is Status.UNKNOWN

    await until(unknown)


async def run(effects: Effects, provider: Provider) -> Any:
    async def charge(provider_token: str) -> object:
        return await provider.payments.charge(provider_token, ARGS)

    return await effects.run("k", charge, args=ARGS, verify=provider.payments.verify)


@on_both
async def test_an_owner_that_dies_between_the_answer_and_the_record_charges_once(
    effects: Effects, provider: Provider, owners: Owners
) -> None:
    owner = await owners.start("after")
    assert await owner.wait() == 1
    assert len(provider.charges) == 1
    await is_unknown(effects)
    assert await run(effects, provider) == provider.charges[0]
    assert await run(effects, provider) == provider.charges[0]
    assert len(provider.charges) == 1


@on_sqlite
async def test_an_owner_that_dies_before_its_request_is_followed_by_one_charge(
    effects: Effects, provider: Provider, owners: Owners
) -> None:
    owner = await owners.start("before")
    assert await owner.wait() == 1
    await is_unknown(effects)
    dead = await record_of(effects, "k")
    charge = await run(effects, provider)
    assert provider.charges == [charge]
    assert charge["idempotency_key"] == dead.provider_token
    assert (await record_of(effects, "k")).attempts == 2


@on_postgresql
async def test_an_owner_that_is_killed_while_it_waits_for_the_answer_charges_once(
    effects: Effects, provider: Provider, owners: Owners
) -> None:
    await provider.fail_next("hang")
    owner = await owners.start("none")

    async def charged() -> bool:
        return len(provider.charges) == 1

    await until(charged)
    owner.kill()
    await owner.wait()
    await is_unknown(effects)
    assert await run(effects, provider) == provider.charges[0]
    assert len(provider.charges) == 1


@on_both
async def test_an_owner_that_stood_still_does_not_charge_after_the_next_one_has(
    effects: Effects, provider: Provider, owners: Owners
) -> None:
    owner = await owners.start("stop")
    assert await says(owner) == "calling"
    await is_unknown(effects)
    charge = await run(effects, provider)
    owner.send_signal(signal.SIGCONT)
    assert await says(owner) == "lost"
    assert provider.charges == [charge]
    assert (await record_of(effects, "k")).result == charge


@on_postgresql
async def test_owners_at_once_of_whom_some_die_charge_once(
    effects: Effects, provider: Provider, owners: Owners
) -> None:
    several = [await owners.start(death) for death in ("after", "before", "none", "none")]
    said = []
    for owner in several:
        async with asyncio.timeout(30):
            output, _ = await owner.communicate()
        said.append(output.decode().split())
    (charge,) = provider.charges
    assert [lines[-1] for lines in said[2:]] == [charge["id"]] * 2
    assert await run(effects, provider) == charge


@on_sqlite
async def test_a_lost_reply_is_not_a_second_charge(effects: Effects, provider: Provider) -> None:
    await provider.fail_next("lose-reply")
    with pytest.raises(httpx.RemoteProtocolError):
        await run(effects, provider)

    async def charge(provider_token: str) -> object:
        raise AssertionError("made again")

    with pytest.raises(EffectUnknown) as caught:
        await effects.run("k", charge, args=ARGS)
    assert caught.value.record is not None
    assert str(caught.value.record.error).startswith("RemoteProtocolError: ")
    assert await effects.run("k", charge, args=ARGS, verify=provider.payments.verify) == provider.charges[0]
    assert len(provider.charges) == 1


@on_sqlite
@pytest.mark.parametrize(("fault", "charges"), [("die", 1), ("die-before", 0)])
async def test_while_the_provider_is_away_nothing_is_decided(
    effects: Effects, provider: Provider, fault: str, charges: int
) -> None:
    await provider.fail_next(fault)
    with pytest.raises(httpx.TransportError):
        await run(effects, provider)
    provider.has_died()
    before = await record_of(effects, "k")
    with pytest.raises(httpx.TransportError):
        await run(effects, provider)
    assert await record_of(effects, "k") == before
    await provider.start()
    assert len(provider.charges) == charges
    charge = await run(effects, provider)
    assert provider.charges == [charge]


@on_sqlite
async def test_a_declined_card_is_a_failure_that_stays(effects: Effects, provider: Provider) -> None:
    await provider.fail_next("decline")
    for _ in range(2):
        with pytest.raises(EffectFailed, match=r"^card declined$"):
            await run(effects, provider)
    assert provider.charges == []
