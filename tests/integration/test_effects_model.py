"""Several owners, expiry, takeover, late ends and purges, in any order, against a model of a few lines.

The model knows hours. A lease lasts an hour and a half and a ttl two and a half, so that nothing
ends just when somebody looks; time passes by moving the stored times back. Whoever held a record,
and whatever was read of it, may come back at any time later.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncEngine

from oncely.effects import EffectRecord, Effects, Status
from tests.database import Database
from tests.effects import HOUR, make_effects, pass_time

LEASE, TTL = 1.5, 2.5
KEYS = st.sampled_from(["a", "b"])
WEIGHTS = {
    "claim": 1,
    "finish": 2,
    "extend": 1,
    "take": 2,
    "renew": 2,
    "time": 3,
    "purge": 1,
    "delete": 1,
    "list": 1,
}
EVENTS = [event for event, weight in WEIGHTS.items() for _ in range(weight)]
FINISHED = (Status.DONE, Status.FAILED)
AGO = st.sampled_from([0, 0, 0, 1, 2])
"""Which owner acts, or which reading is acted on: mostly the last one."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Row:
    """A record as the model has it; times are in the model's hours."""

    status: Status
    token: str
    provider_token: str
    attempts: int
    changed: float
    ends: float | None
    version: int
    result: object = None


@dataclass(frozen=True)
class Seen:
    """A record as it was read, the model's row then, and how far time had been moved."""

    record: EffectRecord
    row: Row
    moved: timedelta


class World:
    """The real thing, driven from a test that is not async: a database, and the loop that it is used in."""

    def __init__(self, database: Database) -> None:
        self._runner = asyncio.Runner()
        self.engine: AsyncEngine = database.engine()
        self.effects: Effects = self.do(make_effects(self.engine, stale_after=LEASE * HOUR))

    def do(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._runner.run(work)

    def empty(self) -> None:
        async def delete_all() -> None:
            async with self.engine.begin() as connection:
                await connection.execute(delete(self.effects.table))

        self.do(delete_all())

    def close(self) -> None:
        self.do(self.engine.dispose())
        self._runner.close()


class Owners(RuleBasedStateMachine):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.effects = world.effects
        self.now = 0.0
        self.moved = timedelta(0)
        self.changes = 0
        self.rows: dict[str, Row] = {}
        self.tokens: set[str] = set()
        self.owners: dict[str, list[str]] = defaultdict(lambda: ["nobody's"])
        self.read: dict[str, list[Seen]] = defaultdict(list)
        world.empty()

    # One rule, so that every run has all kinds of events in it.
    @rule(
        what=st.sampled_from(EVENTS),
        key=KEYS,
        ago=AGO,
        status=st.sampled_from(Status),
        yes=st.booleans(),
        hours=st.integers(0, 3),
    )
    def happens(self, what: str, key: str, ago: int, status: Status, yes: bool, hours: int) -> None:
        match what:
            case "claim":
                self.claim(key)
            case "extend":
                self.extend(key, ago)
            case "finish" if status is not Status.PENDING:
                self.finish(key, ago, status, frees=yes)
            case "take" if self.read[key]:
                self.take(key, ago, status, frees=yes)
            case "renew" if self.read[key]:
                self.renew(key, ago)
            case "delete":
                self.delete(key, ago, by_owner=yes)
            case "purge":
                self.purge(hours)
            case "time":
                self.time_passes(hours)
            case "list":
                self.a_person_sees_what_is_open()

    def claim(self, key: str) -> None:
        token = self.world.do(self.effects.claim(key, b"args"))
        assert (token is None) == (key in self.rows)
        if token is not None:
            self.own(key, token, attempts=1)

    def extend(self, key: str, ago: int) -> None:
        token, row = self.owner(key, ago), self.rows.get(key)
        may = row is not None and row.token == token and self.status(row) is Status.PENDING
        self.move(timedelta(milliseconds=2))  # so that SQLite's clock tells this change from the one before
        assert self.world.do(self.effects.extend(key, token, LEASE * HOUR)) == may
        if may and row is not None:
            self.put(key, row, ends=self.now + LEASE)

    def finish(self, key: str, ago: int, status: Status, frees: bool) -> None:
        token, row = self.owner(key, ago), self.rows.get(key)
        # An owner that is late may still finish, as long as nobody took its record.
        may = row is not None and row.token == token and row.status is Status.PENDING
        end = self.an_end(status, frees)
        assert self.world.do(self.effects.finish(key, token, status, **end)) == may
        if may and row is not None:
            self.end(key, row, status, end)

    def take(self, key: str, ago: int, status: Status, frees: bool) -> None:
        seen, row = self.reading(key, ago), self.rows.get(key)
        may = row is not None and row == seen.row and self.status(row) is Status.UNKNOWN
        end = self.an_end(status, frees)
        token = self.world.do(self.effects.take(self.as_it_was(seen), status, **end))
        assert (token is not None) == may
        if token is None or row is None:
            return
        if status is Status.PENDING:
            self.own(key, token, row.attempts + 1, row.provider_token)
        else:
            assert token not in self.tokens
            self.tokens.add(token)
            self.end(key, replace(row, token=token), status, end)

    def renew(self, key: str, ago: int) -> None:
        seen, row = self.reading(key, ago), self.rows.get(key)
        may = row is not None and row == seen.row and row.status in FINISHED and self.has_ended(row)
        token = self.world.do(self.effects.renew(self.as_it_was(seen), b"args"))
        assert (token is not None) == may
        if token is not None:
            self.own(key, token, attempts=1)

    def delete(self, key: str, ago: int, by_owner: bool) -> None:
        token, row = self.owner(key, ago), self.rows.get(key)
        may = row is not None and (not by_owner or (row.token == token and row.status is Status.PENDING))
        assert self.world.do(self.effects.delete(key, token=token if by_owner else None)) == may
        if may:
            del self.rows[key]

    def purge(self, hours: int) -> None:
        old = {
            key
            for key, row in self.rows.items()
            if row.status in FINISHED
            and row.changed <= self.now - hours
            and (row.ends is None or self.has_ended(row))
        }
        assert self.world.do(self.effects.purge(hours * HOUR)) == len(old)
        self.rows = {key: row for key, row in self.rows.items() if key not in old}

    def time_passes(self, hours: int) -> None:
        self.move(hours * HOUR)
        self.now += hours

    def a_person_sees_what_is_open(self) -> None:
        listed = {record.key for record in self.world.do(self.effects.records())}
        assert listed == {key for key, row in self.rows.items() if row.status not in FINISHED}

    @invariant()
    def the_table_is_as_the_model(self) -> None:
        records = self.world.do(self.effects.records(list(Status)))
        assert {record.key for record in records} == self.rows.keys()
        for record in records:
            row = self.rows[record.key]
            assert (record.status, record.expired) == (self.status(row), self.has_ended(row))
            assert (record.token, record.provider_token) == (row.token, row.provider_token)
            assert (record.attempts, record.result) == (row.attempts, row.result)
            readings = self.read[record.key]
            if not readings or readings[-1].row != row:
                readings.append(Seen(record, row, self.moved))

    def owner(self, key: str, ago: int) -> str:
        return self.owners[key][-1 - ago :][0]

    def reading(self, key: str, ago: int) -> Seen:
        return self.read[key][-1 - ago :][0]

    def as_it_was(self, seen: Seen) -> EffectRecord:
        """The record with its times moved like those in the table, which time itself does not do."""
        return replace(seen.record, updated_at=seen.record.updated_at - (self.moved - seen.moved))

    def own(self, key: str, token: str, attempts: int, provider_token: str | None = None) -> None:
        assert token not in self.tokens
        record = self.world.do(self.effects.get(key))
        assert record is not None
        if provider_token is None:
            provider_token = record.provider_token
            assert provider_token not in self.tokens
        self.tokens |= {token, provider_token}
        self.owners[key].append(token)
        row = Row(Status.PENDING, token, provider_token, attempts, self.now, None, 0)
        self.put(key, row, ends=self.now + LEASE)

    def an_end(self, status: Status, frees: bool) -> dict[str, Any]:
        end: dict[str, Any] = {"result": self.changes} if status is Status.DONE else {}
        return end | {"ttl": TTL * HOUR} if frees and status in FINISHED else end

    def end(self, key: str, row: Row, status: Status, end: dict[str, Any]) -> None:
        ends = self.now + TTL if "ttl" in end else None
        self.put(key, replace(row, status=status, result=end.get("result")), ends=ends)

    def put(self, key: str, row: Row, *, ends: float | None) -> None:
        self.changes += 1
        self.rows[key] = replace(row, changed=self.now, ends=ends, version=self.changes)

    def move(self, by: timedelta) -> None:
        self.world.do(pass_time(self.effects, self.world.engine, by))
        self.moved += by

    def status(self, row: Row) -> Status:
        return Status.UNKNOWN if row.status is Status.PENDING and self.has_ended(row) else row.status

    def has_ended(self, row: Row) -> bool:
        return row.ends is not None and row.ends < self.now


@pytest.mark.parametrize("any_database", ["asyncpg", "aiosqlite"], indirect=True)
def test_no_order_of_events_makes_two_owners_or_revives_a_finished_record(any_database: Database) -> None:
    world = World(any_database)

    class OwnersHere(Owners):
        def __init__(self) -> None:
            super().__init__(world)

    try:
        run_state_machine_as_test(
            OwnersHere,
            settings=settings(
                max_examples=12,
                stateful_step_count=50,
                deadline=None,
                derandomize=True,
                # Shrinking on a real database takes minutes: add Phase.shrink to see the shortest run.
                phases=[Phase.generate],
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        world.close()
